"""Storing the texts of a batch in the model's cache, as one more layer after the model's layers.

transformers reorders, repeats, selects and crops the layers of a cache during generation (beams, several
sequences, drafts), so the texts change in the same way. `docs/architecture.md` lists the kinds of caches that
were tested.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from knnstore.errors import ConfigError
from knnstore.lm.reading import CACHE_NAMES, DummyLayer, find_cache
from knnstore.lm.text_state import TextState


class TextStateLayer(DummyLayer):
    """Layer of a KV cache that holds one `TextState` (tokens and keys of a text) for each row.

    Args:
        texts: the text of each row of the batch.
    """

    def __init__(self, texts: Sequence[TextState]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.texts = list(texts)

    def reset(self) -> None:
        """Remove all texts; the next forward pass begins new texts."""
        self.texts = []

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``abs(tokens_to_remove)`` tokens of each text.

        The sign does not matter, because it differs between versions of transformers.
        """
        for text in self.texts:
            text.truncate(text.length - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each row the text of row ``beam_idx[row]``; a text that several rows use is copied.

        Args:
            beam_idx: int64, shape (b,).
        """
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, as independent copies, next to each other."""
        self._select([row for row in range(len(self.texts)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the selected rows, given as indices or as a bool mask."""
        self._select(torch.arange(len(self.texts), device=indices.device)[indices].tolist())

    def _select(self, rows: Sequence[int]) -> None:
        """Replace the texts by the texts of `rows`, in this order; repeated rows get copies."""
        taken, texts = set[int](), list[TextState]()
        for row in rows:
            texts.append(self.texts[row].fork() if row in taken else self.texts[row])
            taken.add(row)
        self.texts = texts


class _ListWithTexts(list[Any]):
    """A cache that is a list (RWKV), with an attribute for the texts; a plain list has no attributes."""


_ATTRIBUTE = "knnstore_texts"
"""Name of the attribute for the texts on a cache that is not a `Cache` of transformers."""


def get_cached_length(values: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the KV cache of a forward pass, padding included.

    Args:
        values: arguments of the forward pass.

    Returns:
        The number of tokens; 0 without a cache. None if the length is not known, because the cache is a
        recurrent model's cache that is not empty, or is not a `Cache` of transformers.
    """
    cache = _get_self_attention_cache(values)
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # the cache has no attention layer
        return None if cache.has_previous_state() else 0


def get_cached_texts(values: Mapping[str, Any]) -> Sequence[TextState] | None:
    """Return the texts that `attach_texts` stored in the cache of a forward pass; None if it has no texts.

    Args:
        values: arguments or results of the forward pass.
    """
    cache = _get_self_attention_cache(values)
    if cache is not None and not isinstance(cache, Cache):
        return getattr(cache, _ATTRIBUTE, None)
    layer = cache.layers[-1] if isinstance(cache, Cache) and cache.layers else None
    return layer.texts if isinstance(layer, TextStateLayer) and layer.texts else None


def attach_texts(values: Any, texts: Sequence[TextState] | None) -> None:
    """Store texts in the KV cache of a forward pass; they replace texts that were stored earlier.

    Args:
        values: arguments or results of the forward pass. If they have no cache, nothing is done. If the cache
            is a list or tuple, which has no attributes, it is replaced in `values` by a `_ListWithTexts`.
        texts: one text for each row; None removes the texts.
    """
    cache = _get_self_attention_cache(values)
    if isinstance(cache, Cache):
        if cache.layers and isinstance(cache.layers[-1], TextStateLayer):
            cache.layers.pop()
        if texts is not None:
            cache.layers.append(TextStateLayer(texts))
        return
    if type(cache) in (list, tuple):
        named = dict(values.items())  # a `ModelOutput` logs a warning for each access to an old name
        name = next(name for name in CACHE_NAMES if named.get(name) is cache)
        cache = values[name] = _ListWithTexts(cache)
    if cache is not None:
        setattr(cache, _ATTRIBUTE, texts)


def check_rows_not_reordered(values: Mapping[str, Any], input_ids: Tensor, new: int) -> None:
    """Check that beam search has not reordered the rows of a cache that does not support reordering.

    Only a cache that is not a `Cache` of transformers is checked, by comparing its texts with `input_ids`.

    Args:
        values: arguments of a forward pass.
        input_ids: the texts so far, shape (b, n). If it has only the new tokens, nothing is checked.
        new: number of tokens in the pass.

    Raises:
        ConfigError: the earlier tokens of a row differ from the text in the cache.
    """
    texts = get_cached_texts(values)
    if texts is None or isinstance(_get_self_attention_cache(values), Cache) or input_ids.shape[1] <= new:
        return
    for text, row in zip(texts, input_ids[:, :-new].cpu().numpy(), strict=True):
        tokens = text.tokens(max(0, text.length - len(row)), text.length)
        if text.has_all_tokens and not np.array_equal(tokens, row[len(row) - len(tokens) :]):
            raise ConfigError(
                "the rows were reordered, as in beam search, but the cache of this model cannot be "
                "reordered: generate with use_cache=False"
            )


class PassTexts(NamedTuple):
    """The texts that a forward pass continues."""

    texts: Sequence[TextState] | None
    """The text of each row before the pass; None if the texts are not known."""
    is_text: NDArray[np.bool_] | None
    """False at padding, shape (b, t); None means no padding."""
    why_not: str
    """Error message with the reason why the texts are not known, and the remedy; empty if they are known."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def get_texts_of_pass(
    values: Mapping[str, Any], batch: int, length: int, text_mask: Tensor | None = None
) -> PassTexts:
    """Return the texts that a forward pass continues, and where the pass has padding.

    The texts come from the cache of the pass. If the cache is empty or missing, the texts are new and empty.
    Never raises an error: if the texts are not known, `PassTexts.why_not` has the error message for the
    caller.

    Args:
        values: arguments of the pass: its cache, ``attention_mask`` and ``position_ids``.
        batch: number of rows in the pass.
        length: number of positions in the pass.
        text_mask: shape (b, t), 0 at padding; if given, it replaces ``attention_mask``.
    """
    mask, positions, read = (
        values.get("attention_mask"),
        values.get("position_ids"),
        get_cached_length(values),
    )
    is_text: NDArray[np.bool_] | None = None
    if text_mask is None and isinstance(mask, Tensor) and mask.ndim == 2:
        stop = mask.shape[1] if read is None else min(read + length, mask.shape[1])
        text_mask, mask = mask[:, stop - length : stop], None
    if text_mask is not None:
        is_text, mask = text_mask.cpu().numpy() != 0, None
        if is_text.all():
            is_text = None
    if mask is not None:
        return PassTexts(None, is_text, _MASK)
    if isinstance(positions, Tensor) and not _are_consecutive(positions, is_text):
        return PassTexts(None, is_text, _PACKED)
    texts = get_cached_texts(values)
    if read == 0:
        texts = [TextState() for _ in range(batch)]
    if texts is None:
        return PassTexts(None, is_text, _UNKNOWN.format("a text" if read is None else f"{read} tokens"))
    if len(texts) != batch:
        return PassTexts(None, is_text, _ROWS.format(len(texts), batch))
    return PassTexts(texts, is_text, "")


_NEED = "a continuous cache, n-grams and keys of several states need"
_MASK = (
    f"{_NEED} to know where each text begins, which a mask of more than two dimensions does not show: give "
    "attention_mask of shape (batch, tokens)"
)
_PACKED = (
    f"position_ids do not count up along a row, as if the row had several texts: {_NEED} one text in each row"
)
_UNKNOWN = (
    f"the cache contains {{}} that the model with a store has not read, but {_NEED} the tokens read "
    "before: give the whole text as input_ids, or a cache that this model has filled"
)
_ROWS = (
    f"the cache has {{}} texts but this pass has {{}}, and {_NEED} the tokens of each text: give a cache of "
    "these rows"
)


def _are_consecutive(positions: Tensor, is_text: NDArray[np.bool_] | None) -> bool:
    """Check whether positions increase by 1 along each row, so that a row is one text.

    Padding is ignored. True for positions that do not have shape (b, t), or with t < 2.

    Args:
        positions: ``position_ids`` of a forward pass.
        is_text: False at padding, shape (b, t); None means no padding.
    """
    if positions.ndim != 2 or positions.shape[1] < 2:
        return True
    follows = positions.diff(dim=1).cpu().numpy() == 1
    if is_text is not None:
        follows |= ~(is_text[:, 1:] & is_text[:, :-1])
    return bool(follows.all())


def _get_self_attention_cache(values: Mapping[str, Any]) -> Any:
    """Return the KV cache in the arguments or results of a forward pass; None if it has no cache.

    If the cache is an `EncoderDecoderCache`, its self-attention cache is returned.
    """
    cache = find_cache(values)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
