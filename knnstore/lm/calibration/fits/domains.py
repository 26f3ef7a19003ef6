"""Fitting the weight and the temperature of each domain, after one pass that searched each on its own.

The log-likelihood of p = λ_0 p_LM + Σ_j λ_j p_kNN^(j) is concave in λ; expectation maximization climbs it.
The temperatures are taken from a grid, in turns, while they make it larger.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import Mixed
from knnstore.lm.mixing import LEAST_PROBABILITY, MAX_LAMBDA, DomainWeights, interpolate_on_grid, mix_probs
from knnstore.lm.settings import KNNSettings

MOST_DOMAINS = 16
_LEAST_WEIGHT = 1e-3  # a domain with less is not worth a search
_GAP = 1e-5  # nats for each token between weights found and the best ones, at most
_ITERATIONS = 2_000
_TURNS = 8


@dataclass(frozen=True, slots=True)
class DomainEvidence:
    """What n tokens say about the weights of domains: 4 bytes a token, domain and temperature."""

    k: int
    domains: tuple[str, ...]
    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN^(j) of each token at each temperature, float32, shape (j, n, m); p_LM where nothing was found,
    to which the weight falls there."""
    found: Tensor
    """Whether anything was, bool, shape (j, n)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n,)."""
    probes: int | None = None
    """Cells whose records p_kNN^(j) is over; None where it is over k neighbors."""

    def only(self, wanted: Tensor) -> "DomainEvidence":
        """The evidence of some tokens, bool, shape (n,)."""
        return replace(self, knn=self.knn[:, wanted], found=self.found[:, wanted], lm=self.lm[wanted])

    def log_probs(self, settings: KNNSettings, tokens: Tensor) -> Mixed:
        """Mix at some tokens, shape (m,), as settings with `DomainWeights` for these domains say.

        Each p_kNN^(j) is taken `interpolate_on_grid` of the grid.
        """
        mixer = cast(DomainWeights, settings.mixer)
        lm = self.lm[tokens]
        parts, lam = list[tuple[float, Tensor]](), torch.zeros_like(lm)
        for number in mixer.searched:
            at = self.domains.index(mixer.domains[number])
            factor = mixer.temperature_factors[number] if mixer.temperature_factors else 1.0
            knn = interpolate_on_grid(self.knn[at, tokens], self.temperatures, settings.temperature * factor)
            parts.append((mixer.lambdas[number], knn))
            lam += mixer.lambdas[number] * self.found[at, tokens]
        return Mixed(mix_probs(lm, *parts).log(), lam)


def fit_domains(evidence: DomainEvidence) -> KNNSettings:
    """Fit λ_j and T_j of each domain j; the weights are within `_GAP` of the best for their temperatures."""
    # Where each domain would begin if it were the only one, with a weight of one half.
    losses = [-(evidence.lm[:, None] + knn).log().mean(0) for knn in evidence.knn]
    points = torch.stack(losses).argmin(1)
    for _ in range(_TURNS):
        before = points.clone()
        lambdas = _weights(evidence, points)
        for number in range(len(evidence.domains)):
            knn = _at(evidence, points)
            others = (1 - lambdas.sum()) * evidence.lm + lambdas @ knn - lambdas[number] * knn[number]
            mixed = others[:, None] + lambdas[number] * evidence.knn[number]
            points[number] = mixed.clamp_(min=LEAST_PROBABILITY).log().mean(0).argmax()
        if torch.equal(points, before):
            break
    worth = _weights(evidence, points) >= _LEAST_WEIGHT
    lambdas = _weights(evidence, points, worth)
    lambdas = lambdas * (MAX_LAMBDA / lambdas.sum().clamp(min=MAX_LAMBDA))
    temperatures = evidence.temperatures[points]
    heaviest = float(temperatures[lambdas.argmax()])
    factors = tuple((temperatures / heaviest).tolist())
    mixer = DomainWeights(evidence.domains, tuple(lambdas.tolist()), factors)
    return KNNSettings(evidence.k, heaviest, mixer, probes=evidence.probes)


def mixture_weights(probs: Tensor) -> Tensor:
    """Find the weights with which a mixture is likeliest, by expectation maximization: float64, shape (c,).

    No weights are likelier by more than ``_GAP`` nats for each observation: of concave functions the largest
    component of the gradient tells (it is 1 for every component in use at the optimum). The probabilities, of
    n observations by c components, shape (n, c), are above 0.
    """
    probs = probs.double()
    weights = probs.new_full((probs.shape[1],), 1 / probs.shape[1])
    for _ in range(_ITERATIONS):
        gradient = (probs / (probs @ weights)[:, None]).mean(0)
        weights = weights * gradient
        if gradient.max() < 1 + _GAP:
            break
    return weights


def _weights(evidence: DomainEvidence, points: Tensor, worth: Tensor | None = None) -> Tensor:
    """The λ_j at these temperatures, 0 for domains that are not worth it; float32, shape (j,)."""
    worth = torch.ones(len(points), dtype=torch.bool) if worth is None else worth
    probs = torch.cat([evidence.lm[:, None], _at(evidence, points)[worth].T], 1).clamp(min=LEAST_PROBABILITY)
    weights = torch.zeros(len(points))
    weights[worth] = mixture_weights(probs)[1:].float()
    return weights


def _at(evidence: DomainEvidence, points: Tensor) -> Tensor:
    """p_kNN of each domain at one temperature each, shape (j, n)."""
    return torch.stack([knn[:, point] for knn, point in zip(evidence.knn, points.tolist(), strict=True)])
