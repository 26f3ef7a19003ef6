"""The mixer with a weight for each domain: p(y) = λ_0 p_LM(y) + Σ_j λ_j p_kNN^(j)(y), λ_0 + Σ_j λ_j = 1.

Each domain has a search of its own, so that the k nearest records of a large domain do not displace those of
a small one (Min et al. 2023, https://arxiv.org/abs/2308.04430, mix stores in this way). If a domain finds
nothing, was removed or is not selected, then the model gets its weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from knnstore.checks import convert_floats
from knnstore.errors import ConfigError
from knnstore.lm.mixing.mixer import Evidence, Weighed
from knnstore.lm.transfers import upload
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class DomainWeights:
    """The mixer with a weight λ_j and a temperature T_j for each domain j (a named set of documents)."""

    domains: tuple[str, ...]
    """Names of the domains, each once."""

    lambdas: tuple[float, ...]
    """λ_j of each domain, 0 or more; their sum is at most 1. A domain with λ_j = 0 is not searched."""

    temperature_factors: tuple[float, ...] = ()
    """T_j of each domain divided by the settings' T; empty means 1 for all domains."""

    name = "domains"
    needs_nearest_only = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", tuple(self.domains))  # JSON has lists
        convert_floats(self, "lambdas", "temperature_factors")
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
        """Indices into `domains` of the domains with a weight λ_j above 0.

        Only these domains are searched.
        """
        return tuple(number for number, lam in enumerate(self.lambdas) if lam > 0)

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return one selection for each domain with a weight above 0: `selection` with only this domain.

        Args:
            selection: the stored documents that the user selected. Its domains are replaced, its other limits
                stay.
        """
        return [replace(selection, domains=(self.domains[number],)) for number in self.searched]

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Compute the joint distribution of the records from all domains, and its weight λ, for each query.

        Args:
            evidence: the search results for n queries: one result for each domain with λ_j > 0.
            temperature: T of the settings.

        Returns:
            λ: the sum of λ_j over the domains in which something was found. Weights: λ_j p_kNN^(j) of each
            neighbor, divided by λ. Temperature: the mean T_j of these domains, weighted by λ_j.
        """
        distances, numbers = evidence.distances, list(self.searched)
        if not numbers:
            zeros = torch.zeros(len(distances), device=distances.device)
            return Weighed(torch.zeros_like(distances), zeros, zeros + temperature)
        lambdas = upload(torch.tensor(self.lambdas)[numbers], distances.device)
        factors = torch.tensor(self.temperature_factors or [1.0] * len(self.domains))[numbers]
        weights = evidence.weights((temperature * factors).tolist())
        temperatures = upload(temperature * factors, distances.device)
        given = lambdas * (weights.sum(2) > 0)
        lam = given.sum(1)
        shares = (given / lam[:, None]).where(lam[:, None] > 0, 0.0)
        mean = (shares * temperatures).sum(1).where(lam > 0, temperature)
        return Weighed((weights * shares[:, :, None]).flatten(1), lam.clamp(max=1.0), mean)
