"""Finding the cache of earlier tokens among the arguments and the results of a model's forward pass.

The name of the cache argument differs between models of transformers. Since transformers 5.24 the name is
``cache``; before, it was ``past_key_values``, and ``cache_params`` for state space models.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from knnstore.errors import ConfigError

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""All names of the cache argument, the newest first."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of a forward function; None if it has no cache argument."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def as_cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model's forward function.

    Returns an empty dict if `cache` is None.

    Raises:
        ConfigError: the model's forward function has no cache argument.
    """
    if cache is None:
        return {}
    name = cache_argument(model.forward)
    if name is None:
        raise ConfigError(f"{type(model).__name__} takes no cache of earlier tokens: give it the whole text")
    return {name: cache}


def find_cache(values: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments or the results of a forward pass; None if they have no cache."""
    named = dict(values.items())  # a `ModelOutput` logs a warning for each access to an old name
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
