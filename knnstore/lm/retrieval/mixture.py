"""From settings and what was retrieved to the mixture: here alone stands what it is made of."""

import torch
from torch import Tensor

from knnstore.lm.mixing import Component, Mixture, Retrieved, neighbor_weights
from knnstore.lm.settings import KNNSettings, NGramSettings


def mixture_of(settings: KNNSettings, retrieved: Retrieved) -> Mixture:
    """Weigh what was retrieved for n queries.

    Args:
        settings: whose mixer chooses λ and T.
        retrieved: what was found by the mixer's searches, and by the cache if there is one.
    """
    weights, lam, temperature = settings.mixer.weigh(retrieved, settings.temperature)
    tokens = None if retrieved.visited else retrieved.tokens
    components = [Component(weights, lam, tokens, retrieved.has_token)]
    if settings.ngrams is not None:
        said = retrieved.continuation
        assert said is not None
        lengths = said.weights.new_zeros(len(said.weights)).long() if said.lengths is None else said.lengths
        lam = ngram_lambdas(settings.ngrams, lengths)
        components.append(Component(said.weights, lam, said.tokens, said.hits, said.rest, said.unigrams))
    if settings.cache is not None:
        assert retrieved.recent is not None
        weights = neighbor_weights(retrieved.recent.distances, settings.cache.temperature)
        lam = torch.full((len(weights),), settings.cache.lam, device=weights.device)
        components.append(Component(weights, lam, retrieved.recent.tokens))
    return Mixture(components, temperature)


def ngram_lambdas(ngrams: NGramSettings, lengths: Tensor) -> Tensor:
    """The λ of n-grams by how many tokens before it the longest has: float32, of the shape of `lengths`."""
    table = torch.tensor(ngrams.by_length or (ngrams.lam,), device=lengths.device)
    return table[lengths.clamp(max=len(table) - 1)]
