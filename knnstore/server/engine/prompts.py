"""Prefill of prompts, in chunks or several prompts in one forward pass.

`Reading` is the prefill of one prompt, `Remembered` its result. `read_together` reads several prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from knnstore.lm import (
    DummyLayer,
    ForwardPass,
    KNNLMForCausalLM,
    KNNSettings,
    Likelihoods,
    Purpose,
    TextState,
    TextStateLayer,
    following,
    read_part,
)

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer's attention, shape (b, heads, t, width)."""

_VALUES = 1 << 25
"""Largest number of log-probabilities of a scored chunk. They take 128 MiB."""


@dataclass(frozen=True)
class Remembered:
    """State of the model after the prefill of a prompt."""

    layers: Layers
    """KV cache of the prompt, one row; empty if no token was read."""
    length: int
    """Number of tokens read."""
    text: TextState
    scores: tuple[Likelihoods, ...] = ()
    """Likelihoods of the prompt's tokens after the first, one object for each chunk; empty if not scored."""
    next: Tensor | None = None
    """log p of the token after the prompt, float32, shape (v,); None if the prompt is not continued."""


class Reading:
    """The prefill of one prompt.

    Args:
        lm: the model.
        tokens: the tokens of the prompt.
        is_scored: True if the prompt's own tokens are scored.
        is_continued: True if the token after the prompt is predicted. Otherwise the last token is not read.
    """

    def __init__(
        self, lm: KNNLMForCausalLM, tokens: Sequence[int], *, is_scored: bool, is_continued: bool
    ) -> None:
        self._lm = lm
        self._length = len(tokens) if is_continued else len(tokens) - 1
        self._is_continued = is_continued
        self._next: Tensor | None = None
        self._tokens = torch.tensor([tokens], device=lm.base.device)
        self.is_scored = is_scored
        self._layers: Layers = []
        self._text = TextState()
        self._read = 0
        self.scores: list[Likelihoods] = []
        """Likelihoods of each chunk read so far; the caller of `go_on` appends them."""

    @property
    def left(self) -> int:
        """Number of tokens that are not read yet."""
        return self._length - self._read

    def go_on(self, settings: KNNSettings, most: int) -> tuple[ForwardPass, Tensor]:
        """Read the next chunk. After an error the same chunk can be read again.

        Predicts the token after the prompt when the last chunk is read, if the prompt is continued.

        Args:
            settings: the settings to score with; text is generated with those resolved for generation.
            most: largest number of tokens to read, at least 1.

        Returns:
            The forward pass, and the target of each of its tokens, int64, shape (t,). The target of the
            prompt's last token is 0.
        """
        if self.is_scored:
            most = min(most, max(1, _VALUES // self._lm.store.identity.vocab_size))
        end = self._read + min(most, self.left)
        generating = self._lm.resolve_settings(settings, Purpose.GENERATION)
        settings = settings if self.is_scored else generating
        cache = DynamicCache(self._layers) if self._layers else DynamicCache()
        keep = 0 if self.is_scored else 1
        self._text.truncate(self._read)
        part = read_part(self._lm, self._tokens[:, :end], cache, self._text, settings, logits_to_keep=keep)
        if end == self._length and self._is_continued:
            self._next = following(self._lm, part, generating)
        came = pad(self._tokens[0, self._read + 1 : end + 1], (0, 1))[: end - self._read]
        self._layers, self._read = layers_of(cache), end
        return part, came

    @property
    def can_be_read_with_others(self) -> bool:
        """True if `read_together` can read it: it is unread, not scored and continued."""
        return not (self._read or self.is_scored) and self._is_continued

    def remembered(self) -> Remembered:
        """Return the state after the tokens read so far."""
        return Remembered(self._layers, self._read, self._text, tuple(self.scores), self._next)


def read_together(lm: KNNLMForCausalLM, readings: Sequence[Reading], settings: Sequence[KNNSettings]) -> None:
    """Read whole prompts in one left-padded forward pass. If it fails, no prompt counts as read.

    Args:
        lm: the model.
        readings: prompts for which `can_be_read_with_others` is True; at least one.
        settings: the settings of each prompt; they are resolved for generation.
    """
    lengths = [reading.left for reading in readings]
    width = max(lengths)
    tokens = torch.cat([pad(one._tokens, (width - one.left, 0)) for one in readings])
    begins = torch.tensor([width - length for length in lengths], device=tokens.device)
    mask, cache = (torch.arange(width, device=tokens.device) >= begins[:, None]).long(), DynamicCache()
    with torch.inference_mode():
        output = lm(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            knn=[lm.resolve_settings(one, Purpose.GENERATION) for one in settings],
        )
        following = output.logits[:, -1].float().log_softmax(-1)
    layer = cache.layers[-1]
    assert isinstance(layer, TextStateLayer)
    for row, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
        at = slice(row, row + 1), slice(None), slice(width - length, None)
        reading._layers = [(keys[at], values[at]) for keys, values in layers_of(cache)]
        reading._text = layer.texts[row]
        reading._read, reading._next = length, following[row]


def layers_of(cache: Any) -> Layers:
    """Return the keys and values of each of the model's layers in a cache."""
    return [(layer.keys, layer.values) for layer in cache.layers if not isinstance(layer, TextStateLayer)]


def has_attention_only(model: Any) -> bool:
    """Check whether a model's cache holds attention keys and values only, as `Memory` needs."""
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in layers)
