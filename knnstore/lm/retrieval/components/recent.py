"""What the text itself has said a moment ago: the continuous cache."""

import torch
from torch import Tensor

from knnstore.lm.mixing import Component, RecentGold, Retrieved, neighbor_weights
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
        temperature, tokens, hits = settings.cache.temperature * factor, None, None
        if isinstance(recent, RecentGold):
            weights = recent.weights(temperature)
            hits = torch.tensor([[True, False]]).expand(len(weights), -1)
        else:
            weights, tokens = neighbor_weights(recent.distances, temperature), recent.tokens
        lam = torch.full((len(weights),), settings.cache.lam, device=weights.device)
        return Component(weights, lam, tokens, hits, name=self.name, temperature=temperature)

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """The distance to the nearest of these tokens, and how many there are."""
        recent = retrieved.recent
        assert recent is not None
        return torch.stack([(recent.nearest / unit).asinh(), recent.counts.float().log1p()], 1)


def recent_temperatures(settings: KNNSettings) -> tuple[float, ...]:
    """Those at which settings with a cache weigh what is recent."""
    assert settings.cache is not None
    factors = () if settings.gate is None else settings.gate.factors.get(RecentText.name, ())
    return tuple(sorted({settings.cache.temperature * factor for factor in (1.0, *factors)}))
