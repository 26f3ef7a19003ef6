"""p_kNN of target tokens at every temperature of a grid, and between its points."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery
from knnstore.lm.mixing.token_sums import NeighborSums

CHUNK_VALUES = 1 << 20
"""How many neighbors are weighed at once: what stays in a CPU's cache."""

_OCTAVES = (-6.0, 3.0)
_STEP = 0.5


def grid(distances: Tensor) -> Tensor:
    """Choose temperatures around the neighbors' typical distance from the nearest, ascending by half octaves.

    The distances, shape (n, k), are of a sample of tokens for which something was found, ascending.
    """
    gaps = torch.where(distances.isfinite(), distances - distances[:, :1], 0.0)
    spread = float((gaps.sum(1) / distances.isfinite().sum(1)).mean())
    smallest, largest = (spread * 2**octaves for octaves in _OCTAVES)
    if spread == 0:  # the neighbors of each token are equally far: every temperature weighs them alike
        largest = float(distances[:, 0].abs().mean()) or 1.0
        smallest = largest / 2
    steps = int(np.ceil(np.log2(largest / smallest) / _STEP)) + 1
    return smallest * 2 ** (_STEP * torch.arange(steps))


def targets_on_grid(distances: Tensor, hits: Tensor, ks: Sequence[int], temperatures: Tensor) -> Tensor:
    """Compute p_kNN of n target tokens among the first neighbors, for each k and temperature.

    Args:
        distances: float32, shape (n, k), +inf where one is missing.
        hits: whether a neighbor has the target token, bool, shape (n, k).
        ks: ascending.
        temperatures: shape (m,).

    Returns:
        float32, shape (len(ks), n, m); 0 where nothing is found.
    """
    knn = torch.empty(len(ks), len(distances), len(temperatures))
    slices = [slice(start, stop) for start, stop in zip([0, *ks], ks, strict=False)]
    for rows in torch.split(torch.arange(len(distances)), max(1, CHUNK_VALUES // ks[-1])):
        near = distances[rows, : ks[-1]]
        nearest = near.amin(1, keepdim=True)
        gaps = torch.where(nearest.isfinite(), nearest, 0.0) - near
        for column, temperature in enumerate(temperatures):
            weights = (gaps / temperature).exp_()
            total = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            weights *= hits[rows, : ks[-1]]
            gold = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            knn[:, rows, column] = (gold / total.clamp_(min=LEAST_PROBABILITY)).clamp_(max=1.0)
    return knn


def between_points(knn: Tensor, temperatures: Tensor, wanted: Tensor | float) -> Tensor:
    """Interpolate p_kNN at any temperature: on the cubic through the nearest four points, or all if fewer.

    Args:
        knn: at each temperature, shape (n, m).
        temperatures: ascending by a constant factor, shape (m,).
        wanted: a temperature for each token, shape (n,), or one for all; at most the last one.
    """
    if len(temperatures) == 1:
        return knn[:, 0]
    scale, last = temperatures.log(), len(temperatures) - 1
    place = (torch.as_tensor(wanted).log() - scale[0]) / (scale[1] - scale[0])
    place = place.clamp(0, last).expand(len(knn))
    nodes = min(4, len(temperatures))
    first = (place.floor() - 1).clamp(0, last + 1 - nodes)
    at, total = place - first, torch.zeros(len(knn))
    for node in range(nodes):
        factor = torch.ones(len(knn))
        for other in range(nodes):
            if other != node:
                factor = factor * (at - other) / (node - other)
        total += factor * knn.gather(1, first.long()[:, None] + node)[:, 0]
    return total.clamp_(0, 1)


@dataclass(frozen=True, slots=True)
class TargetSums:
    """p_kNN of n target tokens on a grid of temperatures: all that is kept of a search; see `TokenSums`."""

    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN at each of them, float32, shape (n, m)."""
    found: Tensor
    """Whether the search found any record, bool, shape (n,)."""
    nearest: NeighborSums | None = None
    """The nearest records, for mixers that look at them."""

    tokens = None

    @classmethod
    def nothing(cls, count: int, temperatures: Tensor) -> "TargetSums":
        """Return the sums of `count` tokens for none of which a record is found."""
        return cls(temperatures, torch.zeros(count, len(temperatures)), torch.zeros(count, dtype=torch.bool))

    @property
    def distances(self) -> Tensor:
        """To the nearest records, float32, shape (n, k)."""
        assert self.nearest is not None
        return self.nearest.distances

    @property
    def distinct(self) -> Tensor:
        """`distinct_tokens` of the nearest records."""
        assert self.nearest is not None
        return self.nearest.distinct

    @property
    def hits(self) -> Tensor:
        """Whether a place is that of the target token: the first of two is. bool, shape (n, 2)."""
        return torch.tensor([[True, False]]).expand(len(self.found), -1)

    def select_rows(self, rows: slice | Tensor) -> "TargetSums":
        """Return the sums of some of the tokens."""
        nearest = None if self.nearest is None else self.nearest.select_rows(rows)
        return TargetSums(self.temperatures, self.knn[rows], self.found[rows], nearest)

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Do nothing: the grid is known."""

    def weights(self, temperature: PerQuery) -> Tensor:
        """Interpolate p_kNN of the target token and of all others on the grid, shape (n, 2)."""
        target = between_points(self.knn, self.temperatures, temperature)
        return torch.stack([target, 1 - target], 1) * self.found[:, None]
