"""What the text itself has said a moment ago: the continuous cache."""

import torch
from torch import Tensor

from knnstore.lm.mixing import Component, Retrieved, neighbor_weights
from knnstore.lm.settings import KNNSettings


class RecentText:
    """The continuous cache."""

    name = "cache"
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    width = 2

    def in_use(self, settings: KNNSettings) -> bool:
        """Whether settings have one."""
        return settings.cache is not None

    def component(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Component | None:
        """Weigh the tokens before each by their distance, with one λ."""
        if settings.cache is None:
            return None
        recent = retrieved.recent
        assert recent is not None
        temperature = settings.cache.temperature * factor
        weights = neighbor_weights(recent.distances, temperature)
        lam = torch.full((len(weights),), settings.cache.lam, device=weights.device)
        return Component(weights, lam, recent.tokens, name=self.name, temperature=temperature)

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """The distance to the nearest of these tokens, and how many there are."""
        recent = retrieved.recent
        assert recent is not None
        nearest, count = recent.distances.amin(1), recent.distances.isfinite().sum(1)
        return torch.stack([(nearest / unit).asinh(), count.float().log1p()], 1)
