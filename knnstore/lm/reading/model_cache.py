"""Finding the KV cache among the arguments and the results of a model's forward pass.

The name of the cache argument differs between models of transformers. Since transformers 5.24 the name is
``cache``; before, it was ``past_key_values``, and ``cache_params`` for state space models. The module also
has `DummyLayer`, the layer of a cache that holds nothing, for versions of transformers without this class;
and `copy_without_gaps`, which closes the gaps that drafts leave in the cache of a batch.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import cache_utils

from knnstore.errors import ConfigError

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""All names that models use for the argument with the KV cache, the newest name first."""


def get_cache_argument_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of a forward function; None if it has no cache argument."""
    function = getattr(forward, "__func__", forward)
    if inspect.isfunction(function):
        return _find_cache_argument(function)
    # A partial, such as accelerate's, holds its model: it must not stay in the cache.
    return _find_cache_argument.__wrapped__(function)


@lru_cache(maxsize=32)
def _find_cache_argument(function: Callable[..., Any]) -> str | None:
    """Return the name of a function's cache argument. Cached, because each decoding step asks for it."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def as_cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model's forward function.

    Returns an empty dict if `cache` is None.

    Raises:
        ConfigError: the model's forward function has no cache argument.
    """
    if cache is None:
        return {}
    name = get_cache_argument_name(model.forward)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__} accepts no cache of earlier tokens: give it the whole text"
        )
    return {name: cache}


def find_cache(values: Mapping[str, Any]) -> Any:
    """Return the KV cache among the arguments or the results of a forward pass; None if there is none."""
    named = dict(values.items())  # a `ModelOutput` logs a warning for each access to an old name
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)


if TYPE_CHECKING or hasattr(cache_utils, "DummyLayer"):
    from transformers.cache_utils import DummyLayer as DummyLayer
else:

    class DummyLayer(cache_utils.CacheLayerMixin):
        """Layer of a cache that holds no keys and values; transformers has this class since 5.20."""

        is_compileable = is_croppable = True
        supports_early_init = False

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
            """Do nothing, because the layer holds no keys and values."""

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[None, None]:
            """Return (None, None), because the layer holds nothing.

            Raises:
                NotImplementedError: keys or values are not None.
            """
            if key_states is not None or value_states is not None:
                raise NotImplementedError("this layer holds no keys and values")
            return None, None

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Return the length and the offset of an attention mask without earlier tokens."""
            return query_length, 0

        def get_seq_length(self) -> int:
            """Return 0, because the layer holds no tokens."""
            return 0

        def get_max_length(self) -> int:
            """Return -1, which means no limit."""
            return -1

        def offload(self) -> None:
            """Do nothing, because the layer holds nothing to move."""

        def prefetch(self) -> None:
            """Do nothing, because the layer holds nothing to move."""


def allows_gaps(model: Any) -> bool:
    """Check whether a text in a model's cache may have gaps, which the attention mask hides.

    In a gap, the number of columns between two tokens differs from the difference of their positions. This
    changes the predictions if the attention counts columns: sliding windows and chunks, local layers
    (GPT-Neo, whose mask also has no more columns than the model has positions), and a model that takes no
    positions (MPT, whose biases follow the columns).
    """
    config = model.config.get_text_config(decoder=True)
    return (
        all(
            type(layer) in (cache_utils.DynamicLayer, DummyLayer)
            for layer in cache_utils.DynamicCache(config=config).layers
        )
        and not hasattr(config, "attention_layers")
        and "position_ids" in inspect.signature(model.forward).parameters
    )


def copy_without_gaps(
    values: Tensor, is_token: NDArray[np.bool_], shape: tuple[int, int], end: int
) -> Tensor:
    """Copy the keys or the values of a batch of texts into new columns, where no text has gaps.

    Args:
        values: keys or values of one layer, shape (b, heads, t, width).
        is_token: True where a column holds a token of a text, shape (texts, columns), with at most b texts
            and t columns. The other columns of a text are padding, gaps or free.
        shape: numbers of rows and columns of the result, with at least as many rows as texts.
        end: index of the new column after the last token of each text; at least the length of the longest.

    Returns:
        Tensor of shape (rows, heads, columns, width). It is 0 outside of the texts, because a NaN there would
        spread through the attention.
    """
    rows, columns = shape
    copied = values.new_zeros((rows, values.shape[1], columns, values.shape[3]))
    for row, is_used in enumerate(is_token):
        used = torch.from_numpy(np.flatnonzero(is_used)).to(values.device)
        copied[row, :, end - len(used) : end] = values[row, :, used]
    return copied
