"""From settings and what was retrieved to the mixture: here alone stands what it is made of."""

import torch

from knnstore.lm.mixing import Component, Mixture, Retrieved, neighbor_weights
from knnstore.lm.settings import KNNSettings


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
        lam = torch.full((len(said.weights),), settings.ngrams.lam, device=said.weights.device)
        components.append(Component(said.weights, lam, said.tokens, said.hits, said.rest, said.unigrams))
    if settings.cache is not None:
        assert retrieved.recent is not None
        weights = neighbor_weights(retrieved.recent.distances, settings.cache.temperature)
        lam = torch.full((len(weights),), settings.cache.lam, device=weights.device)
        components.append(Component(weights, lam, retrieved.recent.tokens))
    return Mixture(components, temperature)
