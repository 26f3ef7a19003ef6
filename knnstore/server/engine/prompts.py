"""Reading prompts, part by part, so that what is being written can go on in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.rows import Prompt
from knnstore.server.engine.tickets import Ticket

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer's attention, shape (b, heads, t, width)."""


@dataclass(frozen=True)
class Remembered:
    """What the model remembers of a prompt but for its last token."""

    layers: Layers
    """Of one row; none where nothing was read."""
    length: int
    log_probs: Tensor | None = None
    """Of the mixture after each of these tokens, float32, shape (length, v); None unless asked for."""


class Reading:
    """A prompt that the model reads, but for its last token.

    Args:
        lm: the model.
        tokens: of the prompt.
        is_scored: whether each next one is predicted as well.
    """

    def __init__(self, lm: KNNLMForCausalLM, tokens: Sequence[int], is_scored: bool) -> None:
        self._lm = lm
        self._tokens = torch.tensor([tokens[:-1]], device=lm.base.device)
        self._is_scored = is_scored
        self._layers: Layers = []
        self._log_probs: list[Tensor] = []
        self._read = 0

    @property
    def left(self) -> int:
        """How many tokens are still to be read."""
        return self._tokens.shape[1] - self._read

    def go_on(self, settings: KNNSettings, most: int) -> int:
        """Read at most so many tokens, >= 1; after an error it may be called again.

        Returns:
            How many were read.
        """
        end = self._read + min(most, self.left)
        so_far = self._tokens[:, :end]
        cache = DynamicCache(self._layers) if self._layers else DynamicCache()
        with torch.inference_mode():
            output = self._lm(
                input_ids=so_far[:, self._read :],
                attention_mask=torch.ones_like(so_far),
                past_key_values=cache,
                use_cache=True,
                knn=settings,  # also where nothing is scored: keys of this text are joined and cached
                sequence_ids=so_far,
                logits_to_keep=0 if self._is_scored else 1,
            )
            if self._is_scored:
                self._log_probs.append(output.logits[0].float().log_softmax(-1))
        count = end - self._read
        self._layers, self._read = layers_of(cache), end
        return count

    def remembered(self) -> Remembered:
        """What it has come to."""
        return Remembered(self._layers, self._read, torch.cat(self._log_probs) if self._log_probs else None)


def layers_of(cache: Any) -> Layers:
    """What a cache holds."""
    return [(layer.keys, layer.values) for layer in cache.layers]


@dataclass
class Waiting:
    """A task of which texts have not begun."""

    ticket: Ticket
    begun: int = 0
    reading: Reading | None = None
    """Of the prompt that is next, which its copies share."""

    @property
    def prompt(self) -> Prompt:
        """Which is next."""
        return self.ticket.task.prompts[self.begun // self.ticket.task.copies]
