"""Classifier-free guidance with a store (Sanchez et al. 2023, https://arxiv.org/abs/2306.17806).

    log p = log p_u + s (log p_c - log p_u)

p_c is the mixture after the prompt and the generated tokens. p_u is the mixture after the negative prompt and
the generated tokens. s is the guidance scale. The guidance processor of transformers cannot be used, because
it calls the model without the retrieval settings (`KNNSettings`) of the call.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from knnstore.errors import ConfigError
from knnstore.lm.reading import find_cache
from knnstore.lm.settings import KNNSettings


class Guidance(LogitsProcessor):
    """Logits processor for classifier-free guidance in one call of `generate`.

    Args:
        model: the model with a store.
        knn: the settings of the call.
        scale: the guidance scale s; 1 means no guidance.
        negative_ids: the negative prompts, int64, shape (b, m); None uses the last token of each prompt.
        negative_mask: shape (b, m), 0 at padding; None means no padding.
    """

    def __init__(
        self,
        model: Any,
        knn: KNNSettings,
        scale: float,
        negative_ids: Tensor | None,
        negative_mask: Tensor | None,
    ) -> None:
        self._model, self._knn, self._scale = model, knn, scale
        self._negative_ids, self._negative_mask = negative_ids, negative_mask
        self._prompt_length: int | None = None
        self._latest: tuple[Tensor, Any] | None = None
        """Tokens of the latest call and the cache with these tokens; None if the model gives no cache."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the guided scores of the next token of each text, shape (b, v).

        The scores are not normalized. The first call records the length of the prompt, so an object serves
        one call of `generate`.

        Args:
            input_ids: prompts and generated tokens, int64, shape (b, t).
            scores: logits or log-probabilities of the mixture after `input_ids`, shape (b, v).

        Raises:
            ConfigError: the prompt was given as embeddings without negative prompts, or the number of
                negative prompts does not divide the number of texts.
        """
        scores = scores.log_softmax(-1)
        if self._prompt_length is None:
            self._prompt_length = input_ids.shape[1]
            if self._negative_ids is None and not self._prompt_length:
                raise ConfigError("guidance_scale with inputs_embeds needs negative_prompt_ids")
        unconditional = self._compute_unconditional(input_ids).to(scores.device)
        return self._scale * (scores - unconditional) + unconditional

    def _compute_unconditional(self, input_ids: Tensor) -> Tensor:
        """Compute log-probabilities after negative prompts and generated tokens, float32, shape (b, v).

        The tokens and the KV cache are kept for the next call. If that call has only one token more, the
        model processes only this token.

        Args:
            input_ids: prompts and generated tokens, int64, shape (b, t); the prompts are replaced by the
                negative prompts.
        """
        assert self._prompt_length is not None
        prompt, generated = input_ids[:, : self._prompt_length], input_ids[:, self._prompt_length :]
        negative = prompt[:, -1:] if self._negative_ids is None else self._negative_ids.to(input_ids.device)
        mask = torch.ones_like(negative) if self._negative_mask is None else self._negative_mask
        if len(input_ids) % len(negative):
            raise ConfigError(
                f"negative_prompt_ids has {len(negative)} rows for {len(input_ids)} texts: give one for each"
            )
        copies = len(input_ids) // len(negative)
        text = torch.cat([negative.repeat_interleave(copies, 0), generated], 1)
        mask = mask.to(text.device).repeat_interleave(copies, 0)
        mask = torch.cat([mask, torch.ones_like(generated)], 1)
        # Beam search reorders rows, and rejected drafts are removed: then the whole text is computed again.
        cache, new = None, text
        if self._latest is not None and torch.equal(text[:, :-1], self._latest[0]):
            cache, new = self._latest[1], text[:, -1:]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        output = self._model(
            new,
            attention_mask=mask,
            position_ids=positions[:, -new.shape[1] :],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            knn=self._knn,
        )
        new_cache = find_cache(output)
        self._latest = None if new_cache is None else (text, new_cache)
        log_probs: Tensor = output.logits[:, -1].float().log_softmax(-1)
        return log_probs
