"""Keys: the nearest records of the store, as the settings' mixer weighs them."""

from torch import Tensor

from knnstore.lm.mixing import DISTINCT_AMONG, Contribution, Retrieved, neighbor_features, powers_up_to
from knnstore.lm.settings import KNNSettings


class Keys:
    """Neighbors from the store."""

    name = "keys"
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2 * len(powers_up_to(DISTINCT_AMONG))

    def is_used(self, settings: KNNSettings) -> bool:
        """Check whether settings have a search to make."""
        return settings.retrieves

    def contribute(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Contribution:
        """Weigh the neighbors by the mixer, which chooses λ and scales T."""
        is_single = len(settings.mixer.searches(settings.selection)) == 1
        if settings.gate is not None and (is_single or retrieved.visited):
            retrieved.prepare([settings.temperature * one for one in self.factors])
        weights, lam, temperature = settings.mixer.weigh(retrieved, settings.temperature * factor)
        tokens = None if retrieved.visited else retrieved.tokens
        return Contribution(
            weights, lam, tokens, retrieved.has_token, name=self.name, temperature=temperature
        )

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """Return the distances of the nearest 1, 2, 4, ..., and the number of different tokens among them."""
        return neighbor_features(retrieved, DISTINCT_AMONG, unit)
