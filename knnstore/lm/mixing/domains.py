"""A weight for each domain: p(y) = λ_0 p_LM(y) + Σ_j λ_j p_kNN^(j)(y), where λ_0 + Σ_j λ_j = 1.

Each domain is searched on its own, so that a large one cannot push the neighbors of a small one out of the k
nearest (Min et al. 2023, https://arxiv.org/abs/2308.04430, mix stores so). A domain in which nothing is
found gives its weight back to the model, as one does that was removed or is not selected.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from knnstore.errors import ConfigError
from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.mixer import Weighed
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class DomainWeights:
    """λ_j and T_j of each domain j; the k neighbors of each are found by `retrieve`."""

    domains: tuple[str, ...]
    """Their names, each once."""

    lambdas: tuple[float, ...]
    """λ_j of each, 0 or more; together at most 1. One with λ_j = 0 is not searched."""

    temperature_factors: tuple[float, ...] = ()
    """T_j of each divided by T of the settings; none is 1."""

    name = "domains"
    needs_nearest_only = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", tuple(self.domains))  # JSON has lists
        for field in ("lambdas", "temperature_factors"):
            object.__setattr__(self, field, tuple(map(float, getattr(self, field))))
        count = len(set(self.domains))
        if not (count == len(self.domains) == len(self.lambdas) > 0):
            raise ConfigError("weights of domains need each domain once, and a lambda for each")
        if len(self.temperature_factors) not in (0, count):
            raise ConfigError(f"{count} domains need {count} temperature factors or none")
        if not all(lam >= 0 for lam in self.lambdas) or sum(self.lambdas) > 1 + 1e-6:
            raise ConfigError(f"lambdas of domains must be at least 0 and together at most 1: {self.lambdas}")
        if not all(0 < factor < math.inf for factor in self.temperature_factors):
            raise ConfigError("every temperature factor of domains must be above 0 and finite")

    @property
    def searched(self) -> tuple[int, ...]:
        """The numbers of the domains that have a weight."""
        return tuple(number for number, lam in enumerate(self.lambdas) if lam > 0)

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Each domain that has a weight, on its own."""
        return [replace(selection, domains=(self.domains[number],)) for number in self.searched]

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Weigh each neighbor by λ_j p_kNN^(j), divided by the sum of the λ_j of the domains found.

        Args:
            evidence: n queries with the k neighbors of each domain that has a weight, in columns side by
                side.
            temperature: T of the settings.

        Returns:
            That sum of the λ_j as λ, and the mean T_j over the domains found.
        """
        distances, numbers = evidence.distances, list(self.searched)
        if not numbers:
            zeros = torch.zeros(len(distances), device=distances.device)
            return Weighed(torch.zeros_like(distances), zeros, zeros + temperature)
        lambdas = torch.tensor(self.lambdas, device=distances.device)[numbers]
        factors = torch.tensor(self.temperature_factors or [1.0] * len(self.domains))[numbers]
        temperatures = temperature * factors.to(distances.device)
        weights = evidence.weights(temperatures.tolist())
        given = lambdas * (weights.sum(2) > 0)
        lam = given.sum(1)
        shares = (given / lam[:, None]).where(lam[:, None] > 0, 0.0)
        mean = (shares * temperatures).sum(1).where(lam > 0, temperature)
        return Weighed((weights * shares[:, :, None]).flatten(1), lam.clamp(max=1.0), mean)
