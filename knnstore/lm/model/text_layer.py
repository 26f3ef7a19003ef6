"""The texts of a batch ride in the model's cache, as one more layer behind the model's own.

transformers reorders, repeats, selects and crops the layers of a cache while it generates (beams, several
sequences, drafts), so the texts follow. `docs/architecture.md` lists the kinds of caches that were tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, EncoderDecoderCache

from knnstore.errors import ConfigError
from knnstore.lm.reading import CACHE_NAMES, find_cache
from knnstore.lm.text_state import TextState


class TextStateLayer(DummyLayer):
    """One `TextState` for each row of a cache.

    Args:
        texts: of the rows.
    """

    def __init__(self, texts: Sequence[TextState]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.texts = list(texts)

    def reset(self) -> None:
        """Forget all texts; the next pass begins new ones."""
        self.texts = []

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of each text; their number is negative, as in transformers."""
        for text in self.texts:
            text.truncate(text.length - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row go on with the text of another one, shape (b,); a text that several take is copied."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._select([row for row in range(len(self.texts)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows, by number or by a mask."""
        self._select(torch.arange(len(self.texts), device=indices.device)[indices].tolist())

    def _select(self, rows: Sequence[int]) -> None:
        taken, texts = set[int](), list[TextState]()
        for row in rows:
            texts.append(self.texts[row].fork() if row in taken else self.texts[row])
            taken.add(row)
        self.texts = texts


class _ListWithTexts(list[Any]):
    """What a model keeps as a list (RWKV), with the texts that were read; a list takes no attribute."""


_ATTRIBUTE = "knnstore_texts"
"""Where the texts ride on what is no `Cache` of transformers."""


def past_length(values: Mapping[str, Any]) -> int | None:
    """Count the tokens that a model has read before, from the arguments of its forward pass.

    Returns:
        Their number, padding included; 0 without a cache. None where there are some, and the cache, that of a
        recurrent model, does not tell how many.
    """
    cache = _text_cache(values)
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # there is no layer of attention
        return None if cache.has_previous_state() else 0


def texts_in(values: Mapping[str, Any]) -> Sequence[TextState] | None:
    """Return the texts that ride in the cache among a pass's arguments or results; None if there are none."""
    cache = _text_cache(values)
    if cache is not None and not isinstance(cache, Cache):
        return getattr(cache, _ATTRIBUTE, None)
    layer = cache.layers[-1] if isinstance(cache, Cache) and cache.layers else None
    return layer.texts if isinstance(layer, TextStateLayer) and layer.texts else None


def attach_texts(values: Any, texts: Sequence[TextState] | None) -> None:
    """Let texts ride in the cache among a forward pass's arguments or results, in place of others.

    Args:
        values: the arguments or results; nothing is done where they have no cache.
        texts: one for each row; None removes those that ride there.
    """
    cache = _text_cache(values)
    if isinstance(cache, Cache):
        if cache.layers and isinstance(cache.layers[-1], TextStateLayer):
            cache.layers.pop()
        if texts is not None:
            cache.layers.append(TextStateLayer(texts))
        return
    if type(cache) in (list, tuple):
        named = dict(values.items())  # a `ModelOutput` logs a warning when it is asked for an old name
        name = next(name for name in CACHE_NAMES if named.get(name) is cache)
        cache = values[name] = _ListWithTexts(cache)
    if cache is not None:
        setattr(cache, _ATTRIBUTE, texts)


def check_rows(values: Mapping[str, Any], input_ids: Tensor, new: int) -> None:
    """Refuse rows that have changed places in what is no `Cache` of transformers, as beams do.

    Args:
        values: arguments of a forward pass.
        input_ids: the texts so far, shape (b, n), or only the new tokens.
        new: tokens of the pass.

    Raises:
        ConfigError: a row goes on with another text than that which rides in its place.
    """
    texts = texts_in(values)
    if texts is None or isinstance(_text_cache(values), Cache) or input_ids.shape[1] <= new:
        return
    for text, row in zip(texts, input_ids[:, :-new].cpu().numpy(), strict=True):
        tokens = text.tokens(max(0, text.length - len(row)), text.length)
        if text.has_all_tokens and not np.array_equal(tokens, row[len(row) - len(tokens) :]):
            raise ConfigError(
                "this model's memory of earlier tokens does not follow when rows change places, as beams "
                "do: generate with use_cache=False"
            )


class PassTexts(NamedTuple):
    """The texts that a forward pass continues."""

    texts: Sequence[TextState] | None
    """Of each row, as they were before the pass; None where they cannot be followed."""
    is_text: NDArray[np.bool_] | None
    """Which positions of the pass are no padding, shape (b, t); None is all."""
    why_not: str
    """Why the texts cannot be followed, and how to call instead; empty where they can be."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def texts_of_pass(
    values: Mapping[str, Any], batch: int, length: int, text_mask: Tensor | None = None
) -> PassTexts:
    """Find the texts of a forward pass: those that ride in its cache, or new ones if it has none.

    Args:
        values: arguments of the pass: its cache, ``attention_mask`` and ``position_ids``.
        batch: rows of the pass.
        length: positions of the pass.
        text_mask: 0 at padding, shape (b, t), where ``attention_mask`` does not tell.
    """
    mask, positions, read = values.get("attention_mask"), values.get("position_ids"), past_length(values)
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
    if isinstance(positions, Tensor) and not _are_of_one_text(positions, is_text):
        return PassTexts(None, is_text, _PACKED)
    texts = texts_in(values)
    if read == 0:
        texts = [TextState() for _ in range(batch)]
    if texts is None:
        return PassTexts(None, is_text, _UNKNOWN.format("a text" if read is None else f"{read} tokens"))
    if len(texts) != batch:
        return PassTexts(None, is_text, _ROWS.format(len(texts), batch))
    return PassTexts(texts, is_text, "")


_NEED = "a continuous cache, n-grams and keys of several states need"
_MASK = (
    f"{_NEED} to know where each text begins, which a mask of more than two dimensions does not tell: give "
    "attention_mask of shape (batch, tokens)"
)
_PACKED = (
    f"position_ids do not count up along a row, as where it holds several texts: {_NEED} one text in each row"
)
_UNKNOWN = (
    f"the cache holds {{}} that the model with a store has not read, and {_NEED} the tokens read "
    "before: give the whole text as input_ids, or a cache that this model has filled"
)
_ROWS = (
    f"the cache has {{}} texts and this pass {{}}, and {_NEED} the tokens of each: give a cache of these rows"
)


def _are_of_one_text(positions: Tensor, is_text: NDArray[np.bool_] | None) -> bool:
    """Check that positions count up along each row but at padding, so that a row is one text."""
    if positions.ndim != 2 or positions.shape[1] < 2:
        return True
    follows = positions.diff(dim=1).cpu().numpy() == 1
    if is_text is not None:
        follows |= ~(is_text[:, 1:] & is_text[:, :-1])
    return bool(follows.all())


def _text_cache(values: Mapping[str, Any]) -> Any:
    """Return the `Cache` among a pass's arguments or results, or what older models have; None for none."""
    cache = find_cache(values)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
