"""λ and T from a small network over what is known of each token: an adaptive gate (He et al. 2021)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.mixer import MAX_LAMBDA, Chosen, SimpleMixer
from knnstore.lm.mixing.network import Network
from knnstore.lm.mixing.token_sums import DISTINCT_AMONG, powers_up_to
from knnstore.store import Weights

_FAR = 1e30  # stands in where nothing was found, and λ does not matter


@dataclass(frozen=True)
class GateLambda(SimpleMixer):
    """λ and T of a network: "Efficient Nearest Neighbor Language Models" (He et al. 2021).

    https://arxiv.org/abs/2109.04212. It sees the query, the model's confidence and entropy, the distances
    of the nearest 1, 2, 4, ... neighbors, and how many different tokens are among them. Unlike
    theirs it comes after the search.
    """

    weights: Weights
    """Of the network; in their metadata ``scale`` is the unit of distances, and ``k`` how many neighbors
    were looked at when it was fitted. With fewer the last one stands for those that are missing."""

    name = "gate"

    _network: Network = field(init=False, repr=False, compare=False)
    _scale: float = field(init=False, repr=False, compare=False)
    _k: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_network", Network.of(self.weights))
        object.__setattr__(self, "_scale", float(self.weights.metadata["scale"]))
        object.__setattr__(self, "_k", int(self.weights.metadata["k"]))

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and T of each query."""
        features = gate_features(evidence, self._k, self._scale)
        expected = len(self._network.mean)
        if features.shape[1] != expected:
            raise ConfigError(
                f"the gate was fitted for another model, or by an older version: it takes {expected} "
                f"features, here are {features.shape[1]}; calibrate again"
            )
        return chosen_by(self._network.on(features.device)(features), temperature)


def chosen_by(outputs: Tensor, temperature: float) -> Chosen:
    """Compute λ and T from a gate's outputs, shape (n, 2): the logit of λ, and the change of T in octaves."""
    return Chosen(outputs[:, 0].sigmoid() * MAX_LAMBDA, temperature * outputs[:, 1].exp2())


def start_of(lam: float) -> list[float]:
    """Return the outputs for which `chosen_by` gives this λ and an unchanged T."""
    share = min(max(lam / MAX_LAMBDA, 1e-3), 1 - 1e-3)
    return [math.log(share / (1 - share)), 0.0]


def gate_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute what a gate sees of n queries.

    Args:
        evidence: with `keys` and `lm_entropy`.
        k: number of neighbors that are looked at.
        scale: a typical distance.

    Returns:
        float32, shape (n, f): f = 2 + ⌊log₂ k⌋ + 1 + ⌊log₂ min(k, 16)⌋ + 1 + d.
    """
    assert evidence.keys is not None
    assert evidence.lm_entropy is not None
    of_model = [evidence.lm_max[:, None], evidence.lm_entropy[:, None]]
    return torch.cat([*of_model, neighbor_features(evidence, k, scale), evidence.keys.float()], 1)


def neighbor_features(evidence: Evidence, k: int, scale: float) -> Tensor:
    """Compute what a gate sees of the k nearest neighbors alone; see `gate_features`."""
    distances, distinct = evidence.distances, evidence.distinct
    ranks = [min(rank, distances.shape[1]) - 1 for rank in powers_up_to(k)]
    near = distances[:, ranks]
    found = near < torch.inf
    if not found.all():
        farthest = distances.where(distances.isfinite(), -torch.inf).amax(1, keepdim=True).clamp(min=-_FAR)
        near = near.where(found, farthest)
    counted = len(powers_up_to(min(k, DISTINCT_AMONG)))
    columns = [min(column, distinct.shape[1] - 1) for column in range(counted)]
    # asinh is like a logarithm for large distances, and defined for inner products.
    return torch.cat([(near / scale).asinh(), distinct[:, columns].float().log1p()], 1)
