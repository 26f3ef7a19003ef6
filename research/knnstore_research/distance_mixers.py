"""Mixers that choose λ by a formula of the distances, with next to nothing to fit: SK-MT and NEST.

`calibrate` tries both where this package is installed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knnstore.datastore import Metric
from knnstore.errors import ConfigError
from knnstore.lm import KNNSettings
from knnstore.lm.calibration import GridEvidence, ScoredText, fit_temperature_and_lambda
from knnstore.lm.mixing import MAX_LAMBDA, Chosen, Evidence, SimpleMixer, interpolate_on_grid, mix_probs

_TEMPERATURES = 100
"""Temperatures that are tried, evenly spaced in their logarithm."""


@dataclass(frozen=True, slots=True)
class NearnessLambda(SimpleMixer):
    """λ = max(0, 1 - d/T) for the nearest distance d, as in SK-MT (Dai et al. 2023).

    Paper: "Simple and Scalable Nearest Neighbor Machine Translation", https://arxiv.org/abs/2302.12188. The
    formula is for squared distances. With negative distances (inner products) λ is `MAX_LAMBDA`.
    """

    name = "sk-mt"

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose the weight λ of each query by its nearest distance; the temperature stays unchanged."""
        return Chosen((1 - evidence.distances[:, 0] / temperature).clamp(0, MAX_LAMBDA), temperature)

    @classmethod
    def fit(cls, evidence: GridEvidence, scored: ScoredText) -> KNNSettings | None:
        """Fit the temperature T to scored tokens, and return settings with this mixer and T.

        Returns None for inner products, because these distances are negative.

        Args:
            evidence: probabilities of the tokens to fit on.
            scored: the text; only its metric is used.
        """
        if scored.metric == Metric.IP:
            return None
        mixer, grid = cls(), evidence.temperatures
        # The best T is of the size of the distances, which may lie above the grid.
        highest = max(float(grid[-1]), 4 * float(evidence.nearest.distances.mean()))
        tried = torch.logspace(math.log2(float(grid[0])), math.log2(highest), _TEMPERATURES, 2).tolist()

        def likelihood(temperature: float) -> float:
            knn = interpolate_on_grid(evidence.knn, grid, temperature)
            lam = mixer(evidence.nearest, temperature).lam
            return float(mix_probs(evidence.lm[:, 0], (lam, knn)).log().sum())

        return evidence.build_settings(max(tried, key=likelihood), mixer)


@dataclass(frozen=True, slots=True)
class RelativeConfidence(SimpleMixer):
    """Large λ if the nearest neighbor is much nearer than the farthest, as in NEST (Li et al. 2024).

    This is the relative retrieval confidence of https://arxiv.org/abs/2405.19325. The model's own weight is
    1 - λ = σ((r - alpha) / tau), where r = min|d| / max|d| over the k neighbors found. A single neighbor
    gives r = 1. This mixer needs k neighbors, so it cannot be used if all records of whole cells are
    retrieved.
    """

    alpha: float = 0.4
    """The ratio r at which the model and the retrieved records have the same weight."""

    tau: float = 0.1
    """Scale of the ratio. λ falls as r grows; with a negative value it rises."""

    name = "relative-confidence"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and math.isfinite(self.tau) and self.tau != 0):
            raise ConfigError(f"alpha and tau must be finite and tau not 0, got {self.alpha} and {self.tau}")

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose the weight λ of each query by the ratio of its distances.

        The temperature stays unchanged.
        """
        margin = (self.alpha - relative_distance(evidence.distances)) / self.tau
        return Chosen(margin.sigmoid().clamp(max=MAX_LAMBDA), temperature)

    @classmethod
    def fit(cls, evidence: GridEvidence, scored: ScoredText) -> KNNSettings | None:
        """Fit alpha and tau to scored tokens, and return settings with this mixer.

        The temperature is the one that is best for a fixed weight λ. Returns None if the probabilities are
        sums over whole cells, because there are no k neighbors then.

        Args:
            evidence: probabilities of the tokens to fit on.
            scored: the text, with the distances of the neighbors.
        """
        if evidence.probes is not None:
            return None
        temperature, lam = fit_temperature_and_lambda(evidence)
        knn = interpolate_on_grid(evidence.knn, evidence.temperatures, temperature)
        k = evidence.k
        ratios = torch.cat(
            [
                relative_distance(scored.distances[rows, :k])
                for rows in scored.split_into_chunks(k, evidence.tokens)
            ]
        )
        middle, spread = float(ratios.mean()), float(ratios.std().clamp(min=1e-6))
        standardized = (ratios - middle) / spread
        start = torch.tensor(lam).clamp(0.01, 0.99).logit().item()
        weights = torch.tensor([start, -0.1], requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=50, line_search_fn="strong_wolfe")

        def step() -> Tensor:
            optimizer.zero_grad()
            chosen = (weights[0] + weights[1] * standardized).sigmoid()
            loss = -mix_probs(evidence.lm[:, 0], (chosen, knn)).log().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(step)  # type: ignore[no-untyped-call]
        level, slope = weights.detach().double().tolist()
        slope = min(slope, -1e-6) if slope <= 0 else max(slope, 1e-6)
        return evidence.build_settings(temperature, cls(middle - spread * level / slope, -spread / slope))


def relative_distance(distances: Tensor) -> Tensor:
    """Compute min|d| / max|d| over each query's neighbors, float32, shape (n,), between 0 and 1.

    The result is 1 for a query without neighbors, or if all distances are 0.

    Args:
        distances: distances of k neighbors, shape (n, k); +inf for a missing neighbor.
    """
    sizes, is_neighbor = distances.abs(), distances.isfinite()
    nearest = sizes.amin(1)
    farthest = sizes.where(is_neighbor, 0.0).amax(1)
    return torch.where(farthest > 0, nearest / farthest, 1.0)
