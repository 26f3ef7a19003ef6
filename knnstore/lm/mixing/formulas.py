"""λ the same everywhere, or by a formula of the distances: with nothing or next to nothing to fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.mixer import MAX_LAMBDA, Chosen, SimpleMixer
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class FixedLambda(SimpleMixer):
    """The same λ everywhere (Khandelwal et al. 2020)."""

    lam: float
    """Between 0 (the model alone) and 1 (retrieval alone)."""

    name = "fixed"
    needs_nearest_only = True

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lambda must be between 0 and 1, got {self.lam}")

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """All that is selected, or nothing where λ is 0."""
        return (selection,) if self.lam > 0 else ()

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and the temperature given."""
        lam = torch.full((len(evidence.distances),), self.lam, device=evidence.distances.device)
        return Chosen(lam, temperature)


@dataclass(frozen=True, slots=True)
class NearnessLambda(SimpleMixer):
    """λ = max(0, 1 - d/T) for the nearest distance d, of SK-MT (Dai et al. 2023).

    "Simple and Scalable Nearest Neighbor Machine Translation", https://arxiv.org/abs/2302.12188.
    Made for squared distances; where they are negative, λ is as near to 1 as it may be.
    """

    name = "sk-mt"

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ by the nearest distance, and the temperature given."""
        return Chosen((1 - evidence.distances[:, 0] / temperature).clamp(0, MAX_LAMBDA), temperature)


@dataclass(frozen=True, slots=True)
class RelativeConfidence(SimpleMixer):
    """λ by how much nearer the nearest neighbor is than the farthest, of NEST (Li et al. 2024).

    The relative retrieval confidence of https://arxiv.org/abs/2405.19325: the model's own weight is
    1 - λ = σ((r - alpha) / tau), where r = min|d| / max|d| over the neighbors found. A single
    neighbor has r = 1.
    """

    alpha: float = 0.4
    """The ratio at which both weigh the same."""

    tau: float = 0.1
    """How gradually λ falls with the ratio; below 0 it rises."""

    name = "relative-confidence"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and math.isfinite(self.tau) and self.tau != 0):
            raise ConfigError(f"alpha and tau must be finite and tau not 0, got {self.alpha} and {self.tau}")

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ by the ratio of distances, and the temperature given."""
        margin = (self.alpha - relative_distance(evidence.distances)) / self.tau
        return Chosen(margin.sigmoid().clamp(max=MAX_LAMBDA), temperature)


def relative_distance(distances: Tensor) -> Tensor:
    """Compute min|d| / max|d| over each query's neighbors, float32, shape (n,), between 0 and 1.

    It is 1 where there is no neighbor, or where all are at distance 0. Distances are of shape (n, k).
    """
    sizes, found = distances.abs(), distances.isfinite()
    nearest = sizes.amin(1)
    farthest = sizes.where(found, 0.0).amax(1)
    return torch.where(farthest > 0, nearest / farthest, 1.0)
