"""Prefill and decoding with an encoder-decoder model: it reads a source and generates e.g. its translation.

`PairPrefill` reads a source, and `read_sources_together` reads several in one forward pass. `PairBatch`
decodes texts that have equally many tokens. `make_generation_rules` returns the rules of the generation
configuration of the model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from knnstore.lm import KNNLM, KNNSettings, Purpose, SourceBatch, TextStateLayer
from knnstore.server.engine.batch import Batch, Step
from knnstore.server.engine.prompts import EncodedSource, Prefill, PromptState, extract_layers
from knnstore.server.engine.rows import Prompt, Row


class PairPrefill(Prefill):
    """The prefill of a source and of the decoder's first tokens, always in one forward pass.

    Args:
        lm: the encoder-decoder model, with its store.
        prompt: the prompt, with the source. `prompt.tokens` are the decoder's first tokens.
    """

    is_read_whole = True

    def __init__(self, lm: KNNLM, prompt: Prompt) -> None:
        super().__init__(lm, prompt.tokens, is_scored=False, is_continued=True)
        self._source_tokens = prompt.source

    @property
    def tokens_left(self) -> int:
        """Number of tokens of the source; 0 when the prefill is complete."""
        return 0 if self._read else len(self._source_tokens)

    def read_whole(self, settings: KNNSettings) -> None:
        """Read the source and the first tokens of the decoder."""
        read_sources_together(self._lm, [self], [settings])


def read_sources_together(
    lm: KNNLM, prefills: Sequence[PairPrefill], settings: Sequence[KNNSettings]
) -> None:
    """Make the model read several sources in one forward pass, padded on the right.

    The resulting state is stored in each `PairPrefill`. If the pass fails, the exception is raised and no
    source counts as read.

    Args:
        lm: the encoder-decoder model, with its store.
        prefills: the sources, at least one.
        settings: the retrieval settings of each source. Components that are for scoring only are left out.
    """
    device, cache = lm.base.device, EncoderDecoderCache(DynamicCache(), DynamicCache())
    batch = SourceBatch.from_rows([np.array(prefill._source_tokens) for prefill in prefills])
    input_ids, mask = (torch.as_tensor(part, device=device) for part in batch)
    with torch.inference_mode():
        output = lm(
            input_ids=input_ids,
            attention_mask=mask,
            decoder_input_ids=torch.cat([prefill._tokens for prefill in prefills]),
            cache=cache,
            use_cache=True,
            knn=[lm.resolve_settings(knn, Purpose.GENERATION) for knn in settings],
        )
        next_log_probs = output.logits[:, -1].float().log_softmax(-1)
    layer = cache.self_attention_cache.layers[-1]
    assert isinstance(layer, TextStateLayer)
    own, cross = extract_layers(cache.self_attention_cache), extract_layers(cache.cross_attention_cache)
    for row, prefill in enumerate(prefills):
        one, length = slice(row, row + 1), len(prefill._source_tokens)
        prefill._layers = [(keys[one], values[one]) for keys, values in own]
        prefill._source = EncodedSource(
            output.encoder_last_hidden_state[one, :length],
            [(keys[one, :, :length], values[one, :, :length]) for keys, values in cross],
        )
        prefill._text = layer.texts[row]
        prefill._read, prefill._next = prefill._tokens.shape[1], next_log_probs[row]


class _PaddedSources(NamedTuple):
    """The sources of a batch, padded on the right to the longest source, s tokens."""

    states: Tensor
    """Output of the encoder, shape (b, s, h)."""
    mask: Tensor
    """0 at padding, int64, shape (b, s)."""
    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of each layer of cross-attention, shape (b, heads, s, width)."""


class PairBatch(Batch):
    """The texts of an encoder-decoder model that get their next tokens in the same steps.

    They have equally many tokens, because most decoders count positions from the beginning of the KV cache,
    where other batches have padding.

    Args:
        lm: the encoder-decoder model, with its store.
    """

    def __init__(self, lm: KNNLM) -> None:
        super().__init__(lm)
        self._sources: dict[Row, EncodedSource] = {}
        self._padded: tuple[list[Row], _PaddedSources] | None = None

    def fits(self, row: Row) -> bool:
        """Check whether a text has as many tokens as the texts of the batch."""
        return not self.rows or len(row.tokens) == len(self.rows[0].tokens)

    def add_row(self, row: Row, prompt_state: PromptState) -> None:
        """Add a text to the batch, with the KV cache of its tokens and its source."""
        assert prompt_state.source is not None
        super().add_row(row, prompt_state)
        self._sources[row] = prompt_state.source

    def remove_rows(self, finished: Sequence[Row]) -> None:
        """Remove texts from the batch."""
        for row in finished:
            del self._sources[row]
        super().remove_rows(finished)

    def predict_next(self, settings: Sequence[KNNSettings]) -> Step:
        """Run one forward pass over the last token of each text, and return its predictions.

        There are no drafts. See `Batch.predict_next`.
        """
        with torch.inference_mode():
            sources = self._pad_sources()
            output = self._lm(
                encoder_outputs=BaseModelOutput(last_hidden_state=sources.states),
                attention_mask=sources.mask,
                decoder_input_ids=torch.tensor(
                    [row.tokens[-1:] for row in self.rows], device=self._lm.base.device
                ),
                cache=EncoderDecoderCache(self._kv_cache.begin_step(1), DynamicCache(sources.layers)),
                use_cache=True,
                knn=settings,
            )
            return Step([[] for _ in self.rows], output.logits.float().log_softmax(-1))

    def _pad_sources(self) -> _PaddedSources:
        """Return the sources of all texts as one batch. It is computed again if the texts have changed."""
        if self._padded is not None and self._padded[0] == self.rows:
            return self._padded[1]
        sources = [self._sources[row] for row in self.rows]
        lengths = torch.tensor([source.states.shape[1] for source in sources], device=self._lm.base.device)
        width = int(lengths.max())

        def join(parts: Sequence[Tensor]) -> Tensor:
            """Join tensors of shape (1, ..., s_i, width) along the batch, padded with zeros."""
            return torch.cat([pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts])

        layers = [
            (join([keys for keys, _ in layer]), join([values for _, values in layer]))
            for layer in zip(*(source.layers for source in sources), strict=True)
        ]
        mask = (torch.arange(width, device=lengths.device) < lengths[:, None]).long()
        padded = _PaddedSources(join([source.states for source in sources]), mask, layers)
        self._padded = [*self.rows], padded
        return padded


def make_generation_rules(lm: Any, prompt: Prompt, max_tokens: int) -> LogitsProcessorList:
    """Return the logits processors that transformers' `generate` would use for this model and prompt.

    They are made from the model's generation configuration. For example, they forbid tokens that are never
    generated, or enforce a minimum length. Rules for sampling and beam search are left out. A forced last
    token is left out too, because a text that was cut at `max_tokens` must not look complete.

    Args:
        lm: the encoder-decoder model.
        prompt: the prompt of the text.
        max_tokens: largest number of tokens that are generated.
    """
    device, length = lm.base.device, len(prompt.tokens)
    config, _ = lm._prepare_generation_config(
        None,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        guidance_scale=None,
        max_new_tokens=None,
        max_length=length + max_tokens,
    )
    config.forced_eos_token_id = None
    lm._prepare_special_tokens(config, True, device=device)
    processors: LogitsProcessorList = lm._get_logits_processor(
        config,
        input_ids_seq_length=length,
        encoder_input_ids=torch.tensor([prompt.source], device=device),
        device=device,
        model_kwargs={},
    )
    return processors
