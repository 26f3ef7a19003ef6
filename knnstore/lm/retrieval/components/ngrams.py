"""What the n-grams of the stored text say."""

import torch
from torch import Tensor

from knnstore.lm.mixing import Component, Retrieved
from knnstore.lm.settings import KNNSettings, NGramSettings


class NGrams:
    """Counts of n-grams."""

    name = "n-grams"
    factors = (1.0,)
    width = 3

    def in_use(self, settings: KNNSettings) -> bool:
        """Whether settings have them."""
        return settings.ngrams is not None

    def component(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Component | None:
        """What was counted after the longest end of each context, and after shorter ones; it has no T."""
        if settings.ngrams is None:
            return None
        said = retrieved.continuation
        assert said is not None
        lam = ngram_lambdas(settings.ngrams, said.lengths)
        return Component(said.weights, lam, said.tokens, said.hits, said.rest, said.unigrams, self.name)

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """Length, count and successors of the longest end of each context."""
        said = retrieved.continuation
        assert said is not None
        if said.suffixes is None:
            return said.weights.new_zeros((len(said.weights), self.width))
        length, *counts = said.suffixes.to(said.weights.dtype).unbind(1)
        return torch.stack([length, *(count.log1p() for count in counts)], 1)


def ngram_lambdas(ngrams: NGramSettings, lengths: Tensor) -> Tensor:
    """The λ of n-grams by how many tokens before it the longest has: float32, of the shape of `lengths`."""
    table = torch.tensor(ngrams.by_length or (ngrams.lam,), device=lengths.device)
    return table[lengths.clamp(max=len(table) - 1)]
