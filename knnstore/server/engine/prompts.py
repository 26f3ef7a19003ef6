"""Prefill of prompts: the model reads a prompt's tokens and fills the KV cache, before tokens are generated.

`Prefill` reads one prompt, in chunks. `PromptState` is the state of the model after a prefill.
`prefill_together` reads several whole prompts in one forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from knnstore.lm import (
    KNNLM,
    DummyLayer,
    ForwardPass,
    KNNSettings,
    Likelihoods,
    Purpose,
    TextState,
    TextStateLayer,
    predict_next,
    read_part,
)

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each attention layer, as pairs of tensors of shape (b, heads, t, width): b texts, t
tokens."""

_MAX_CHUNK_LOG_PROBS = 1 << 25
"""Largest number of log-probabilities (tokens × vocabulary) of a chunk that is scored. They take 128 MiB."""


class EncodedSource(NamedTuple):
    """A source of s tokens that an encoder-decoder model has read."""

    states: Tensor
    """Output of the encoder, shape (1, s, h)."""
    layers: Layers
    """Keys and values of each layer of cross-attention, for a batch of one text."""


@dataclass(frozen=True)
class PromptState:
    """State of the model after a prompt, from which the continuations of the prompt are started."""

    layers: Layers
    """Keys and values of the tokens that were read, for each attention layer, for a batch of one text; empty
    if no token was read."""
    length: int
    """Number of tokens that were read."""
    text: TextState
    """The tokens that were read, with the vectors that retrieval needs for the next tokens."""
    scores: tuple[Likelihoods, ...] = ()
    """Likelihoods of the prompt's tokens after its first token, one object for each chunk that was read;
    empty if the prompt is not scored."""
    next: Tensor | None = None
    """Log-probabilities of the token after the prompt, float32, shape (v,); None if no token is generated
    after it."""
    source: EncodedSource | None = None
    """The source of the text; None for a model that reads no source."""


class Prefill:
    """The prefill of one prompt: the model reads the prompt's tokens in chunks and fills a KV cache.

    Args:
        lm: the model, with its store.
        tokens: ids of the prompt's tokens; at least one.
        is_scored: True if the prompt's own tokens get log-probabilities.
        is_continued: True if the token after the prompt is predicted. Otherwise the prompt's last token is
            not read, because its prediction is not needed.
    """

    is_read_whole: ClassVar[bool] = False
    """True if the prompt cannot be read in chunks."""

    def __init__(self, lm: KNNLM, tokens: Sequence[int], *, is_scored: bool, is_continued: bool) -> None:
        self._lm = lm
        self._length = len(tokens) if is_continued else len(tokens) - 1
        self._is_continued = is_continued
        self._next: Tensor | None = None
        self._tokens = torch.tensor([tokens], device=lm.base.device)
        self.is_scored = is_scored
        self._layers: Layers = []
        self._source: EncodedSource | None = None
        self._text = TextState()
        self._read = 0
        self.scores: list[Likelihoods] = []
        """Likelihoods of the tokens of each chunk that was read. The caller of `read_chunk` computes and
        appends them."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens that are not read yet; 0 when the prefill is complete."""
        return self._length - self._read

    def read_chunk(self, settings: KNNSettings, max_tokens: int) -> tuple[ForwardPass, Tensor]:
        """Run one forward pass over the next chunk of the prompt, and extend the KV cache by this chunk.

        The last chunk of a continued prompt also predicts the token after the prompt. If an exception is
        raised, the same chunk can be read again.

        Args:
            settings: the retrieval settings with all components. They are used unchanged if the prompt is
                scored. For an unscored prompt, and to predict the token after the prompt, the components for
                scoring are left out.
            max_tokens: largest number of tokens to read, at least 1. A scored chunk may be shorter, because
                its log-probabilities take much memory.

        Returns:
            The forward pass over the t tokens of the chunk, and the target of each of these tokens: the id of
            the prompt's next token, int64, shape (t,). The prompt's last token has no next token; its target
            is 0.
        """
        if self.is_scored:
            most_scored = _MAX_CHUNK_LOG_PROBS // self._lm.store.identity.vocab_size
            max_tokens = min(max_tokens, max(1, most_scored))
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
            self._next = predict_next(self._lm, forward_pass, generating)
        targets = pad(self._tokens[0, self._read + 1 : end + 1], (0, 1))[: end - self._read]
        self._layers, self._read = extract_layers(cache), end
        return forward_pass, targets

    def read_whole(self, settings: KNNSettings) -> None:
        """Read all tokens that are left in one forward pass.

        Args:
            settings: the retrieval settings, see `read_chunk`.
        """
        self.read_chunk(settings, self.tokens_left)

    @property
    def can_be_read_with_others(self) -> bool:
        """True if `prefill_together` can read the prompt together with other prompts.

        False if a token of the prompt has been read, if the prompt is scored, or if it is not continued.
        """
        return not (self._read or self.is_scored) and self._is_continued

    def get_state(self) -> PromptState:
        """Return the state of the model after the tokens read so far, with the scores of these tokens."""
        return PromptState(self._layers, self._read, self._text, tuple(self.scores), self._next, self._source)


def prefill_together(lm: KNNLM, prefills: Sequence[Prefill], settings: Sequence[KNNSettings]) -> None:
    """Make the model read several whole prompts in one forward pass, padded on the left.

    The resulting state is stored in each `Prefill`. If the pass fails, the exception is raised and no prompt
    counts as read.

    Args:
        lm: the model, with its store.
        prefills: the prompts, at least one. `can_be_read_with_others` must be True for each of them.
        settings: the retrieval settings of each prompt, with all components. This function leaves out the
            components that are for scoring only.
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
    """Return the keys and values of each attention layer of a cache, without its layer of `TextState`."""
    return [(layer.keys, layer.values) for layer in cache.layers if not isinstance(layer, TextStateLayer)]


def has_only_attention_cache(model: Any) -> bool:
    """Check whether a model's cache holds only keys and values of attention.

    Such a cache can be padded, so that texts of different lengths share a batch. The state of a recurrent
    model cannot be padded.
    """
    if model._is_stateful or not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for layer in layers)


def has_first_position_zero(model: Any) -> bool:
    """Check whether a model gives the first token of a text the position 0.

    RoBERTa and the models that follow it begin after the number of the padding token. Their learned positions
    are an embedding with a padding entry.
    """
    return not any(
        name.endswith("position_embeddings")
        and isinstance(module, Embedding)
        and module.padding_idx is not None
        for name, module in model.named_modules()
    )
