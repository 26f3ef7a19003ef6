"""λ and T from a small network over what is known of each token: an adaptive gate (He et al. 2021)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing.mixer import MAX_LAMBDA, Chosen, Retrieved, SimpleMixer
from knnstore.lm.mixing.network import Network
from knnstore.store import Weights

DISTINCT_AMONG = 16
"""Different tokens are counted among at most so many nearest neighbors; more tell a gate nothing."""

_NONE = -1
_FEW = 4
"""Queries, for which a dozen operations on tensors take longer than Python does."""

_FAR = 1e30  # stands in where nothing was found, and λ does not matter


@dataclass(frozen=True)
class GateLambda(SimpleMixer):
    """λ and T of a network: "Efficient Nearest Neighbor Language Models" (He et al. 2021).

    https://arxiv.org/abs/2109.04212. It sees the query, the model's confidence and entropy, the distances
    of the nearest 1, 2, 4, ... neighbors, and how many different tokens are among them. Unlike
    theirs it comes after the search; what may come before it is `Skipping`.
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

    def __call__(self, retrieved: Retrieved, temperature: float) -> Chosen:
        """Choose λ and T of each query."""
        features = gate_features(retrieved, self._k, self._scale)
        expected = len(self._network.mean)
        if features.shape[1] != expected:
            raise ConfigError(
                f"the gate was fitted for another model, or by an older version: it takes {expected} "
                f"features, here are {features.shape[1]}; calibrate again"
            )
        return chosen_by(self._network.on(features.device)(features), temperature)


def chosen_by(outputs: Tensor, temperature: float) -> Chosen:
    """λ and T from a gate's outputs, shape (n, 2): the logit of λ, and by how many octaves T differs."""
    return Chosen(outputs[:, 0].sigmoid() * MAX_LAMBDA, temperature * outputs[:, 1].exp2())


def start_of(lam: float) -> list[float]:
    """The outputs for which `chosen_by` gives a λ, and T as it is."""
    share = min(max(lam / MAX_LAMBDA, 1e-3), 1 - 1e-3)
    return [math.log(share / (1 - share)), 0.0]


def gate_features(retrieved: Retrieved, k: int, scale: float) -> Tensor:
    """What a gate sees of n queries.

    Args:
        retrieved: with `keys`, `lm_entropy`, and `tokens` or `distinct`.
        k: how many neighbors are looked at.
        scale: a typical distance.

    Returns:
        float32, shape (n, f): f = 2 + ⌊log₂ k⌋ + 1 + ⌊log₂ min(k, 16)⌋ + 1 + d.
    """
    assert retrieved.keys is not None
    assert retrieved.lm_entropy is not None
    of_model = [retrieved.lm_max[:, None], retrieved.lm_entropy[:, None]]
    return torch.cat([*of_model, neighbor_features(retrieved, k, scale), retrieved.keys.float()], 1)


def neighbor_features(retrieved: Retrieved, k: int, scale: float) -> Tensor:
    """What a gate sees of the k nearest neighbors alone; see `gate_features`."""
    distances, distinct = retrieved.distances, retrieved.distinct
    if distinct is None:
        assert retrieved.tokens is not None
        distinct = distinct_tokens(retrieved.tokens, distances)
    ranks = [min(rank, distances.shape[1]) - 1 for rank in powers_up_to(k)]
    near = distances[:, ranks]
    found = near < torch.inf
    if not found.all():
        farthest = distances.where(distances.isfinite(), -torch.inf).amax(1, keepdim=True).clamp(min=-_FAR)
        near = near.where(found, farthest)
    counted = len(powers_up_to(min(k, DISTINCT_AMONG)))
    columns = [min(column, distinct.shape[1] - 1) for column in range(counted)]
    # asinh is as a logarithm for the far, and sound for inner products.
    return torch.cat([(near / scale).asinh(), distinct[:, columns].float().log1p()], 1)


def distinct_tokens(tokens: Tensor, distances: Tensor) -> Tensor:
    """How many different tokens are among the nearest 1, 2, 4, ... neighbors, up to `DISTINCT_AMONG`.

    Args:
        tokens: int64, shape (n, k).
        distances: shape (n, k), +inf where a neighbor is missing, which counts as none.

    Returns:
        int16, shape (n, ⌊log₂ min(k, 16)⌋ + 1).
    """
    ranks = powers_up_to(min(tokens.shape[1], DISTINCT_AMONG))
    near = tokens[:, : ranks[-1]].where(distances[:, : ranks[-1]] < torch.inf, _NONE)
    if len(near) <= _FEW:
        counts_of = [[len({*row[:limit]} - {_NONE}) for limit in ranks] for row in near.tolist()]
        return torch.tensor(counts_of, dtype=torch.int16, device=near.device).reshape(-1, len(ranks))
    # Sorted by token, and equal ones by rank: the first of each is the one that counts.
    token, rank = near.sort(dim=1, stable=True)
    first = token != _NONE
    first[:, 1:] &= token[:, 1:] != token[:, :-1]
    counts = torch.zeros_like(first).scatter_(1, rank, first).cumsum(1)
    return counts[:, [limit - 1 for limit in ranks]].to(torch.int16)


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, ... up to k."""
    return [1 << power for power in range(k.bit_length())]
