"""The cache of a model's forward pass: the name of its argument, and where it stands in inputs and outputs.

Models of transformers take what they remember of earlier tokens under different names. Since transformers
5.24 the name is ``cache``; before, it was ``past_key_values``, and ``cache_params`` in state space models.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from knnstore.errors import ConfigError

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""All names of the argument, the newest first."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name under which a forward pass takes a cache; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def as_cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument that gives a cache to a model's forward pass; it is empty where `cache` is None.

    Raises:
        ConfigError: the model takes no cache.
    """
    if cache is None:
        return {}
    name = cache_argument(model.forward)
    if name is None:
        raise ConfigError(f"{type(model).__name__} takes no cache of earlier tokens: give it the whole text")
    return {name: cache}


def find_cache(values: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments or the results of a forward pass; None if there is none."""
    named = dict(values.items())  # a `ModelOutput` logs a warning when it is asked for an old name
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
