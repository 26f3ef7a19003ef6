"""Prefill of prompts, in chunks or several prompts in one forward pass.

`Prefill` is the prefill of one prompt, `Remembered` its result. `prefill_together` reads several prompts.
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
    """Keys and values of the tokens read, for each layer, with one row; empty if no token was read."""
    length: int
    """Number of tokens read."""
    text: TextState
    """State of the tokens read that retrieval needs."""
    scores: tuple[Likelihoods, ...] = ()
    """Likelihoods of the prompt's tokens after its first token, one object for each chunk; empty if the
    prompt is not scored."""
    next: Tensor | None = None
    """log p of the token after the prompt, float32, shape (v,); None if no token is generated after it."""


class Prefill:
    """The prefill of one prompt: the model reads its tokens in chunks and fills the KV cache.

    Args:
        lm: the model.
        tokens: the tokens of the prompt.
        is_scored: True if the prompt's own tokens are scored.
        is_continued: True if the token after the prompt is predicted. Otherwise the prompt's last token is
            not read, because nothing needs its prediction.
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
        """Likelihoods of each chunk read so far; the caller of `read_chunk` appends them."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens that are not read yet."""
        return self._length - self._read

    def read_chunk(self, settings: KNNSettings, max_tokens: int) -> tuple[ForwardPass, Tensor]:
        """Run one forward pass over the next chunk of the prompt, and extend the KV cache by the chunk.

        The last chunk of a continued prompt also predicts the token after the prompt. After an error the same
        chunk can be read again.

        Args:
            settings: the retrieval settings, for scoring. Unscored prompts and the token after the prompt use
                these settings resolved for generation.
            max_tokens: largest number of tokens to read, at least 1. A chunk that is scored may be shorter.

        Returns:
            The forward pass over the chunk's t tokens, and the target of each token: the next token of the
            prompt, int64, shape (t,). The prompt's last token has the target 0.
        """
        if self.is_scored:
            max_tokens = min(max_tokens, max(1, _VALUES // self._lm.store.identity.vocab_size))
        end = self._read + min(max_tokens, self.tokens_left)
        generating = self._lm.resolve_settings(settings, Purpose.GENERATION)
        settings = settings if self.is_scored else generating
        cache = DynamicCache(self._layers) if self._layers else DynamicCache()
        logits_to_keep = 0 if self.is_scored else 1
        self._text.truncate(self._read)
        forward_pass = read_part(
            self._lm, self._tokens[:, :end], cache, self._text, settings, logits_to_keep=logits_to_keep
        )
        if end == self._length and self._is_continued:
            self._next = following(self._lm, forward_pass, generating)
        targets = pad(self._tokens[0, self._read + 1 : end + 1], (0, 1))[: end - self._read]
        self._layers, self._read = extract_layers(cache), end
        return forward_pass, targets

    @property
    def can_be_read_with_others(self) -> bool:
        """True if `prefill_together` can read the prompt: unread, continued and not scored."""
        return not (self._read or self.is_scored) and self._is_continued

    def get_state(self) -> Remembered:
        """Return the state of the model after the tokens read so far, with the scores of these tokens."""
        return Remembered(self._layers, self._read, self._text, tuple(self.scores), self._next)


def prefill_together(
    lm: KNNLMForCausalLM, prefills: Sequence[Prefill], settings: Sequence[KNNSettings]
) -> None:
    """Read several whole prompts in one left-padded forward pass, and store the result in each `Prefill`.

    If the pass fails, no prompt counts as read.

    Args:
        lm: the model.
        prefills: prompts for which `can_be_read_with_others` is True; at least one.
        settings: the retrieval settings of each prompt. This function resolves them for generation.
    """
    lengths = [prefill.tokens_left for prefill in prefills]
    width = max(lengths)
    tokens = torch.cat([pad(prefill._tokens, (width - prefill.tokens_left, 0)) for prefill in prefills])
    starts = torch.tensor([width - length for length in lengths], device=tokens.device)
    mask, cache = (torch.arange(width, device=tokens.device) >= starts[:, None]).long(), DynamicCache()
    with torch.inference_mode():
        output = lm(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            knn=[lm.resolve_settings(knn, Purpose.GENERATION) for knn in settings],
        )
        next_log_probs = output.logits[:, -1].float().log_softmax(-1)
    layer = cache.layers[-1]
    assert isinstance(layer, TextStateLayer)
    for row, (prefill, length) in enumerate(zip(prefills, lengths, strict=True)):
        row_slice = slice(row, row + 1), slice(None), slice(width - length, None)
        prefill._layers = [(keys[row_slice], values[row_slice]) for keys, values in extract_layers(cache)]
        prefill._text = layer.texts[row]
        prefill._read, prefill._next = length, next_log_probs[row]


def extract_layers(cache: Any) -> Layers:
    """Return the keys and values of each attention layer in a cache, without its `TextStateLayer`."""
    return [(layer.keys, layer.values) for layer in cache.layers if not isinstance(layer, TextStateLayer)]


def has_attention_only(model: Any) -> bool:
    """Check whether a model's cache holds only keys and values of attention, which `Memory` can pad."""
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in layers)
