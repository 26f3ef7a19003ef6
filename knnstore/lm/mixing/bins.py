"""The mixer with bins: λ and T by the nearest distance and the model's confidence."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from knnstore.checks import convert_floats
from knnstore.errors import ConfigError
from knnstore.lm.mixing.mixer import Chosen, Evidence, SimpleMixer
from knnstore.lm.transfers import upload_floats


@dataclass(frozen=True, slots=True)
class BinnedLambda(SimpleMixer):
    """A mixer with a λ for each bin of the nearest neighbor's distance (Drozdov et al. 2022).

    https://arxiv.org/abs/2210.15859. If `confidence_edges` is not empty, each bin is divided again by the
    model's confidence, the log-probability of its most probable token. A value on an edge belongs to the
    upper bin.
    """

    distance_edges: tuple[float, ...]
    """Edges between the bins of distances, ascending, finite; b edges make b + 1 bins."""

    lambdas: tuple[float, ...]
    """λ of each bin: all confidence bins of the nearest distance bin, then of the next distance bin, etc."""

    temperature_factors: tuple[float, ...] = ()
    """Factor of the settings' T in each bin, in the order of `lambdas`; empty means the factor 1 in all
    bins."""

    confidence_edges: tuple[float, ...] = ()
    """Edges between the bins of the model's confidence, a log-probability; ascending, finite. Empty means one
    bin."""

    name = "bins"
    needs_nearest_only = True

    def __post_init__(self) -> None:
        # JSON has lists.
        convert_floats(self, "distance_edges", "lambdas", "temperature_factors", "confidence_edges")
        for edges in (self.distance_edges, self.confidence_edges):
            if not all(map(math.isfinite, edges)) or any(low >= high for low, high in pairwise(edges)):
                raise ConfigError(f"edges of bins must be finite and ascending, got {edges}")
        bins = (len(self.distance_edges) + 1) * (len(self.confidence_edges) + 1)
        if len(self.lambdas) != bins or len(self.temperature_factors) not in (0, bins):
            raise ConfigError(
                f"the edges make {bins} bins, for which there are {len(self.lambdas)} lambdas and "
                f"{len(self.temperature_factors)} temperature factors"
            )
        if not all(0 <= lam <= 1 for lam in self.lambdas):
            raise ConfigError("every lambda of bins must be between 0 and 1")
        if not all(0 < factor < math.inf for factor in self.temperature_factors):
            raise ConfigError("every temperature factor of bins must be above 0 and finite")

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Return the weight λ and the temperature T of each query, which depend on the query's bin.

        The bin depends on the distance to the nearest record, and on the model's confidence.

        Args:
            evidence: the search result and the model's confidence for n queries.
            temperature: T of the settings.
        """
        bins = find_bins(evidence, self.distance_edges, self.confidence_edges)
        lam = upload_floats(self.lambdas, bins.device)[bins]
        if not self.temperature_factors:
            return Chosen(lam, temperature)
        factors = upload_floats(self.temperature_factors, bins.device)
        return Chosen(lam, temperature * factors[bins])


def find_bins(
    evidence: Evidence, distance_edges: tuple[float, ...], confidence_edges: tuple[float, ...] = ()
) -> Tensor:
    """Return the number of each query's bin, int64, shape (n,); it is an index into `BinnedLambda.lambdas`.

    Args:
        evidence: the search result and the model's confidence for n queries.
        distance_edges: edges between the bins of the nearest distance, ascending.
        confidence_edges: edges between the bins of the model's confidence, ascending; empty for one bin.
    """
    bins = _assign_bins(evidence.distances[:, 0], distance_edges)
    if not confidence_edges:
        return bins
    return bins * (len(confidence_edges) + 1) + _assign_bins(evidence.lm_max, confidence_edges)


def _assign_bins(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """For each value count the edges at or below it, which is the number of its bin; int64, shape (n,)."""
    limits = upload_floats(edges, values.device)
    return torch.bucketize(values.contiguous(), limits, right=True)
