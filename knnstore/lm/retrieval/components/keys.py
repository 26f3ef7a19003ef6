"""The neighbors from the store, as the settings' mixer weighs them."""

from torch import Tensor

from knnstore.lm.mixing import Component, Retrieved, neighbor_features, powers_up_to
from knnstore.lm.settings import KNNSettings

_LOOKED_AT = 64
"""Of the nearest neighbors a gate sees the distances of the 1st, 2nd, 4th, ... and how many tokens differ."""


class Keys:
    """Neighbors from the store."""

    name = "keys"
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2 * len(powers_up_to(_LOOKED_AT))

    def in_use(self, settings: KNNSettings) -> bool:
        """Whether settings have a search to make."""
        return settings.retrieves

    def component(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Component:
        """Weigh by the mixer, which chooses λ and scales T."""
        is_single = len(settings.mixer.searches(settings.selection)) == 1
        if settings.gate is not None and (is_single or retrieved.visited):
            retrieved.prepare([settings.temperature * one for one in self.factors])
        weights, lam, temperature = settings.mixer.weigh(retrieved, settings.temperature * factor)
        tokens = None if retrieved.visited else retrieved.tokens
        return Component(weights, lam, tokens, retrieved.has_token, name=self.name, temperature=temperature)

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """Distances, and how many different tokens are near."""
        return neighbor_features(retrieved, _LOOKED_AT, unit)
