"""What n-grams say: those of the stored text, or the own ones of the text that is read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knnstore.lm.mixing import Component, Continuation, Retrieved
from knnstore.lm.settings import KNNSettings, NGramSettings


@dataclass(frozen=True)
class NGrams:
    """Counts of n-grams."""

    name: str
    settings_of: Callable[[KNNSettings], NGramSettings | None]
    """How much they count; None where they do not."""
    said_by: Callable[[Retrieved], Continuation | None]
    """What they say, where they are in use."""

    factors = (1.0,)
    width = 3

    def in_use(self, settings: KNNSettings) -> bool:
        """Whether settings have them."""
        return self.settings_of(settings) is not None

    def component(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Component | None:
        """What was counted after the longest end of each context, and after shorter ones; it has no T."""
        ngrams = self.settings_of(settings)
        if ngrams is None:
            return None
        said = self._said(retrieved)
        lam = ngram_lambdas(ngrams, said.lengths)
        return Component(said.weights, lam, said.tokens, said.hits, said.rest, said.unigrams, self.name)

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """Length, count and successors of the longest end of each context."""
        said = self._said(retrieved)
        if said.suffixes is None:
            return said.weights.new_zeros((len(said.weights), self.width))
        length, *counts = said.suffixes.to(said.weights.dtype).unbind(1)
        return torch.stack([length, *(count.log1p() for count in counts)], 1)

    def _said(self, retrieved: Retrieved) -> Continuation:
        said = self.said_by(retrieved)
        assert said is not None
        return said


def ngram_lambdas(ngrams: NGramSettings, lengths: Tensor) -> Tensor:
    """The λ of n-grams by how many tokens before it the longest has: float32, of the shape of `lengths`."""
    table = torch.tensor(ngrams.by_length or (ngrams.lam,), device=lengths.device)
    return table[lengths.clamp(max=len(table) - 1)]
