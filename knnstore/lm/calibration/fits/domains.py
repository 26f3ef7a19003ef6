"""Fitting λ_j and T_j of each domain j, on text for which each domain was searched alone.

The log-likelihood of p = λ_0 p_LM + Σ_j λ_j p_kNN^(j) is concave in λ, and is maximized by expectation
maximization. Each T_j is chosen from a grid in turn, until no T_j changes.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import Mixed
from knnstore.lm.mixing import LEAST_PROBABILITY, MAX_LAMBDA, DomainWeights, interpolate_on_grid, mix_probs
from knnstore.lm.settings import KNNSettings

MOST_DOMAINS = 16
_MIN_WEIGHT = 1e-3  # a domain with less is not worth a search
_GAP = 1e-5  # nats for each token between weights found and the best ones, at most
_ITERATIONS = 2_000
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class DomainEvidence:
    """Probabilities of n tokens, for fitting one weight for each domain (a named set of stored documents).

    The object takes 4 bytes for each token, domain and temperature.
    """

    k: int
    """Number of neighbors that were searched in each domain."""
    domains: tuple[str, ...]
    """Names of the domains that were searched."""
    temperatures: Tensor
    """The temperatures at which p_kNN is computed, float32, shape (m,), ascending."""
    knn: Tensor
    """Probability of each token by the records of each domain at each temperature, float32, shape (j, n, m).
    If no record was found, it is the model's probability, because the model then gets the domain's weight."""
    found: Tensor
    """True where a record of the domain was found for the token, bool, shape (j, n)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n,)."""
    probes: int | None = None
    """Number of cells (groups of records with near keys) that are searched for each query. The probabilities
    then use all records of these cells. None if they use only the k nearest records."""

    def select_tokens(self, wanted: Tensor) -> "DomainEvidence":
        """Return the probabilities of the tokens that a mask selects.

        Args:
            wanted: True for the tokens to keep, bool, shape (n,).
        """
        return replace(self, knn=self.knn[:, wanted], found=self.found[:, wanted], lm=self.lm[wanted])

    def log_probs(self, settings: KNNSettings, tokens: Tensor) -> Mixed:
        """Compute log-probabilities of tokens in a mixture with one weight for each domain.

        The probability by a domain's records is interpolated between the temperatures of the grid.

        Args:
            settings: settings whose mixer is a `DomainWeights` with weights of domains in `domains`.
            tokens: indices of tokens of the text, int64, shape (m,).

        Returns:
            The log-probability of each token, and the sum of the weights of the domains that found a record.
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
    """Fit a weight λ_j and a temperature T_j for each domain j; return settings with `DomainWeights`.

    A domain is a named set of stored documents. Domains with a λ_j below `_MIN_WEIGHT` get λ_j = 0. The
    log-likelihood per token is within `_GAP` nats of the best for the chosen temperatures.

    Args:
        evidence: the tokens' probabilities by each domain.
    """
    # 1) Start with the best T of each domain alone, at a weight of one half.
    losses = [-(evidence.lm[:, None] + knn).log().mean(0) for knn in evidence.knn]
    points = torch.stack(losses).argmin(1)
    # 2) Fit all λ_j, then each T_j in turn, until no T_j changes.
    for _ in range(_MAX_ROUNDS):
        before = points.clone()
        lambdas = _fit_weights(evidence, points)
        for number in range(len(evidence.domains)):
            knn = _select_probs(evidence, points)
            others = (1 - lambdas.sum()) * evidence.lm + lambdas @ knn - lambdas[number] * knn[number]
            mixed = others[:, None] + lambdas[number] * evidence.knn[number]
            points[number] = mixed.clamp_(min=LEAST_PROBABILITY).log().mean(0).argmax()
        if torch.equal(points, before):
            break
    # 3) Drop domains with little weight, and fit the λ_j of the others.
    is_fitted = _fit_weights(evidence, points) >= _MIN_WEIGHT
    lambdas = _fit_weights(evidence, points, is_fitted)
    lambdas = lambdas * (MAX_LAMBDA / lambdas.sum().clamp(min=MAX_LAMBDA))
    temperatures = evidence.temperatures[points]
    heaviest = float(temperatures[lambdas.argmax()])
    factors = tuple((temperatures / heaviest).tolist())
    mixer = DomainWeights(evidence.domains, tuple(lambdas.tolist()), factors)
    return KNNSettings(evidence.k, heaviest, mixer, probes=evidence.probes)


def fit_mixture_weights(probs: Tensor) -> Tensor:
    """Fit the weights of a mixture of c distributions by expectation maximization.

    The fit ends when the mean log-likelihood of an observation is within ``_GAP`` nats of the best value, or
    after `_ITERATIONS` steps. The log-likelihood is concave in the weights. So its gradient bounds the
    distance to the best value: at the best weights each partial derivative is at most 1.

    Args:
        probs: probability of n observations by each of the c distributions, above 0, shape (n, c).

    Returns:
        The weights, float64, shape (c,), which sum to 1.
    """
    probs = probs.double()
    weights = probs.new_full((probs.shape[1],), 1 / probs.shape[1])
    for _ in range(_ITERATIONS):
        gradient = (probs / (probs @ weights)[:, None]).mean(0)
        weights = weights * gradient
        if gradient.max() < 1 + _GAP:
            break
    return weights


def _fit_weights(evidence: DomainEvidence, points: Tensor, is_fitted: Tensor | None = None) -> Tensor:
    """Fit the weight λ_j of each domain at fixed temperatures. The model has the weight 1 - Σ λ_j.

    Args:
        evidence: the tokens' probabilities by each domain.
        points: index of each domain's temperature in the grid, int64, shape (j,).
        is_fitted: True for the domains to fit, bool, shape (j,); None means all domains.

    Returns:
        The weights, float32, shape (j,); 0 for domains that are not fitted.
    """
    is_fitted = torch.ones(len(points), dtype=torch.bool) if is_fitted is None else is_fitted
    probs = torch.cat([evidence.lm[:, None], _select_probs(evidence, points)[is_fitted].T], 1).clamp(
        min=LEAST_PROBABILITY
    )
    weights = torch.zeros(len(points))
    weights[is_fitted] = fit_mixture_weights(probs)[1:].float()
    return weights


def _select_probs(evidence: DomainEvidence, points: Tensor) -> Tensor:
    """Return each domain's probabilities of the tokens at the domain's temperature, float32, shape (j, n).

    Args:
        evidence: the tokens' probabilities by each domain.
        points: index of each domain's temperature in the grid, int64, shape (j,).
    """
    return torch.stack([knn[:, point] for knn, point in zip(evidence.knn, points.tolist(), strict=True)])
