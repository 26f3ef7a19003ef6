"""Results of a search as weighted sums of tokens, from which p_kNN is computed.

    p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

`TokenSums` is the interface. `NeighborSums` sums over the k nearest records; `CellSums` in `cell_sums` sums
over all records of the probed cells, and `DeviceSums` in `device_sums` does so on a GPU; the engine decides
between them. `TargetSums` keeps p_kNN of target tokens alone, at each temperature of a grid, for fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import Ids
from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery, compute_neighbor_weights

DISTINCT_AMONG = 16
"""Number of nearest neighbors among which different tokens are counted; more do not help a gate."""

CHUNK_VALUES = 1 << 20
"""Number of neighbors that are weighted at once, so that they stay in a CPU's cache."""

_OCTAVES = (-6.0, 3.0)
_OCTAVE_STEP = 0.5

_MAX_LOOPED_QUERIES = 16
"""Up to this many queries, a loop in Python is faster than a dozen operations on tensors."""


class TokenSums(Protocol):
    """The results of one search for n queries, as weights of columns.

    A column stands for a record or a token.
    """

    @property
    def distances(self) -> Tensor:
        """Distances of the nearest records, ascending, float32, shape (n, m), m >= 1; +inf if missing."""
        ...

    @property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... records of each query.

        int16, shape (n, r).
        """
        ...

    @property
    def tokens(self) -> Tensor | None:
        """Token of each column of `weights`, int64, shape (n, columns).

        None if only `hits` (which columns have the target token) is kept, or if the columns are the whole
        vocabulary.
        """
        ...

    @property
    def hits(self) -> Tensor | None:
        """Mask of the columns of `weights`, bool, shape (n, columns): True for the target token.

        None if the result names the token of each column in `tokens` instead, or if the columns are the whole
        vocabulary.
        """
        ...

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Compute and keep the results of `weights` for these temperatures, so that later calls are fast."""
        ...

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the probability of each column, a softmax of -distance / T over the records.

        The columns are the records, or the tokens of the vocabulary, or two columns: the target token, and
        all other tokens together.

        Args:
            temperature: T > 0: one value for all queries, or one for each query, shape (n,).

        Returns:
            Float32, shape (n, columns). A row sums to 1, or is 0 if nothing was found.
        """
        ...

    def select_rows(self, rows: slice | Tensor) -> Self:
        """Return the results of some of the queries; `rows` is a slice, indices or a mask."""
        ...


@dataclass(frozen=True, slots=True)
class NeighborSums:
    """The k nearest records of n queries, with one column for each record; all tensors are on one device."""

    distances: Tensor
    """Distances, float32, shape (n, k); +inf for a missing neighbor. The first columns are sorted, the
    nearest neighbor first: at least the columns that a mixer uses."""

    tokens: Tensor | None = None
    """Tokens, int64, shape (n, k); arbitrary if a neighbor is missing. None if only hits were kept."""

    hits: Tensor | None = None
    """In place of `tokens`: True for a neighbor with the target token; bool, shape (n, k)."""

    ids: Ids | None = None
    """Record ids, int64, shape (n, k), -1 if missing; kept only for sources."""

    known_distinct: Tensor | None = None
    """The value of `distinct`, kept in place of `tokens`; None if `distinct` is computed from `tokens`."""

    _prepared: dict[float, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def all_missing(cls, queries: int, device: torch.device | None = None) -> "NeighborSums":
        """Return the results of a search that found nothing: one missing neighbor for each query.

        Args:
            queries: number of queries.
            device: device of the tensors; None for the default device.
        """
        distances = torch.full((queries, 1), torch.inf, device=device)
        return cls(distances, torch.zeros_like(distances, dtype=torch.int64))

    @property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... neighbors of each query.

        int16, shape (n, r).
        """
        if self.known_distinct is not None:
            return self.known_distinct
        assert self.tokens is not None
        return count_distinct_tokens(self.tokens, self.distances)

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Compute and keep the results of `weights` for these temperatures, so that later calls are fast."""
        if not self._prepared.keys() >= set(temperatures):
            every = compute_neighbor_weights(self.distances[:, None], torch.tensor(temperatures))
            self._prepared.update(zip(temperatures, every.unbind(1), strict=True))

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the probability of each neighbor, a softmax of -distance / T, float32, shape (n, k).

        Args:
            temperature: T > 0: one value for all queries, or one for each query, shape (n,).

        Returns:
            A row sums to 1, or is 0 for a query without neighbors.
        """
        if isinstance(temperature, float) and temperature in self._prepared:
            return self._prepared[temperature]
        return compute_neighbor_weights(self.distances, temperature)

    def reduce_to_targets(self, targets: Tensor, *, with_distinct: bool) -> "NeighborSums":
        """Return a smaller copy, in which `hits` replaces `tokens`: 5 bytes for each neighbor instead of 12.

        `hits` is True for a neighbor with the target token.

        Args:
            targets: target token of each query, int64, shape (n,).
            with_distinct: True to keep `distinct` too, which a gate needs.
        """
        assert self.tokens is not None
        distinct = self.distinct if with_distinct else None
        hits = self.tokens == targets[:, None]
        return NeighborSums(self.distances, hits=hits, known_distinct=distinct)

    def keep_nearest(self, k: int) -> "NeighborSums":
        """Return a copy with only the first k neighbors of each query; `known_distinct` does not change.

        Args:
            k: number of neighbors. The neighbors must be sorted by distance, the nearest first.
        """
        return self._map_columns(lambda column: column[:, :k])

    def select_rows(self, rows: slice | Tensor) -> "NeighborSums":
        """Return the results of some of the queries; `rows` is a slice, indices or a mask."""
        distinct = None if self.known_distinct is None else self.known_distinct[rows]
        at = (
            rows.numpy() if isinstance(rows, Tensor) else rows
        )  # numpy takes a tensor of one row for a number
        ids = None if self.ids is None else self.ids[at]
        chosen = replace(self, ids=None)._map_columns(lambda column: column[rows])
        return replace(chosen, known_distinct=distinct, ids=ids)

    @classmethod
    def concatenate(cls, parts: Sequence["NeighborSums"], k: int = 1) -> "NeighborSums":
        """Concatenate the results of several groups of queries. Record ids are dropped.

        Args:
            parts: the results of each group, at least one.
            k: least number of columns of the result; missing neighbors are filled in.
        """
        width = max(k, *(part.distances.shape[1] for part in parts))

        def concatenate_field(name: str, missing: float) -> Any:
            """Concatenate a field of all parts, padded to the same width; None if no part has it."""
            values = [getattr(part, name) for part in parts]
            if all(value is None for value in values):
                return None
            filled = [
                torch.full_like(part.distances, missing) if value is None else value
                for part, value in zip(parts, values, strict=True)
            ]
            return torch.cat([pad(value, (0, width - value.shape[1]), value=missing) for value in filled])

        counts = [part.known_distinct for part in parts if part.known_distinct is not None]
        return cls(
            concatenate_field("distances", torch.inf),
            concatenate_field("tokens", 0),
            concatenate_field("hits", False),
            known_distinct=torch.cat(counts) if counts else None,
        )

    def _map_columns(self, change: Callable[[Any], Any]) -> "NeighborSums":
        """Return a copy in which `change` is applied to each array of shape (n, k)."""
        names = "distances", "tokens", "hits", "ids"
        values = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: None if value is None else change(value) for name, value in values.items()
        }
        return replace(self, **changed)


def count_distinct_tokens(tokens: Tensor, distances: Tensor) -> Tensor:
    """Count the different tokens among the nearest 1, 2, 4, ... neighbors, up to `DISTINCT_AMONG`.

    Args:
        tokens: int64, shape (n, k).
        distances: shape (n, k); a missing neighbor (+inf) is not counted.

    Returns:
        int16, shape (n, ⌊log₂ min(k, 16)⌋ + 1).
    """
    width = min(tokens.shape[1], DISTINCT_AMONG)
    near, found = tokens[:, :width], distances[:, :width] < torch.inf
    if len(near) <= _MAX_LOOPED_QUERIES and near.device.type == "cpu":
        return _count_distinct_in_rows(near.tolist(), found.sum(1).tolist(), list_powers_of_two(width))
    # A token is counted at its first rank. Missing neighbors have the last ranks, so they hide no token.
    is_repeated = (near[:, :, None] == near[:, None, :]).tril_(-1).any(2)
    counts = (found & ~is_repeated).cumsum(1)
    return counts.index_select(1, get_rank_columns(width, width, counts.device)).to(torch.int16)


def _count_distinct_in_rows(
    rows: Sequence[Sequence[int]], found: Sequence[int], ranks: Sequence[int]
) -> Tensor:
    """Count the different values among the first values of each row, int16, shape (rows, ranks).

    Args:
        rows: rows of values.
        found: number of values to use of each row, from its beginning.
        ranks: for each column of the result, the number of values at the beginning of a row to look at.
    """
    counts = [
        [len({*row[: min(rank, count)]}) for rank in ranks] for row, count in zip(rows, found, strict=True)
    ]
    return torch.tensor(counts, dtype=torch.int16).reshape(len(rows), len(ranks))


def list_powers_of_two(k: int) -> list[int]:
    """Return the powers of two from 1 up to at most k, ascending; an empty list for k = 0."""
    return [1 << power for power in range(k.bit_length())]


@lru_cache(maxsize=32)
def get_rank_columns(k: int, width: int, device: torch.device) -> Tensor:
    """Return the columns of the neighbors with rank 1, 2, 4, ... up to k, in a matrix of `width` columns.

    For a rank above `width`, the last column is returned. The result is cached, because creating the tensor
    takes longer than using it.

    Returns:
        int64, shape (⌊log₂ k⌋ + 1,), on the device; read only.
    """
    with torch.inference_mode(False):  # the tensor may be used again to train
        return torch.tensor([min(rank, width) - 1 for rank in list_powers_of_two(k)], device=device)


def make_temperature_grid(distances: Tensor) -> Tensor:
    """Choose temperatures to try from the differences between distances; each is √2 times the one before.

    Args:
        distances: ascending distances of a sample of queries that found something, shape (n, k).

    Returns:
        Temperatures, float32, shape (m,).
    """
    gaps = torch.where(distances.isfinite(), distances - distances[:, :1], 0.0)
    spread = float((gaps.sum(1) / distances.isfinite().sum(1)).mean())
    smallest, largest = (spread * 2**octaves for octaves in _OCTAVES)
    if spread == 0:  # equal distances: the temperature makes no difference
        largest = float(distances[:, 0].abs().mean()) or 1.0
        smallest = largest / 2
    steps = int(np.ceil(np.log2(largest / smallest) / _OCTAVE_STEP)) + 1
    return smallest * 2 ** (_OCTAVE_STEP * torch.arange(steps))


def compute_target_probs_on_grid(
    distances: Tensor, hits: Tensor, ks: Sequence[int], temperatures: Tensor
) -> Tensor:
    """Compute the probability of n target tokens by their neighbors, for each k and each temperature.

    Args:
        distances: float32, shape (n, k), +inf if a neighbor is missing.
        hits: True for a neighbor with the target token, bool, shape (n, k).
        ks: numbers of neighbors, ascending; the last one is at most k.
        temperatures: shape (m,).

    Returns:
        float32, shape (len(ks), n, m); 0 in rows without a neighbor.
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


def interpolate_on_grid(knn: Tensor, temperatures: Tensor, wanted: Tensor | float) -> Tensor:
    """Interpolate tokens' probabilities between temperatures, by a cubic through the nearest four points.

    If the grid has fewer than four temperatures, the curve goes through all of them.

    Args:
        knn: probability of each token by its neighbors at each temperature of the grid, shape (n, m).
        temperatures: the grid, ascending by a constant factor, shape (m,).
        wanted: the temperature at which to interpolate, for each token, shape (n,), or one for all tokens. A
            value outside the grid is moved to the nearest end.

    Returns:
        The probabilities, shape (n,), between 0 and 1.
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
    """Only the probabilities of n target tokens by the retrieved records, at each temperature of a grid."""

    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""

    knn: Tensor
    """Probability of each target token at each temperature, float32, shape (n, m)."""

    found: Tensor
    """True for a query whose search found a record, bool, shape (n,)."""

    nearest: NeighborSums | None = None
    """The nearest records, for mixers that use them; None if they were not kept."""

    tokens = None

    @classmethod
    def all_zero(cls, count: int, temperatures: Tensor) -> "TargetSums":
        """Return the results of `count` queries that found no record; all probabilities are 0."""
        return cls(temperatures, torch.zeros(count, len(temperatures)), torch.zeros(count, dtype=torch.bool))

    @property
    def distances(self) -> Tensor:
        """Distances of the nearest records, float32, shape (n, k).

        An AssertionError is raised if the nearest records were not kept (`nearest` is None).
        """
        assert self.nearest is not None
        return self.nearest.distances

    @property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... records of each query.

        int16, shape (n, r).
        """
        assert self.nearest is not None
        return self.nearest.distinct

    @property
    def hits(self) -> Tensor:
        """Mask of the columns of `weights`, bool, shape (n, 2): True for the target token, else False."""
        return torch.tensor([[True, False]]).expand(len(self.found), -1)

    def select_rows(self, rows: slice | Tensor) -> "TargetSums":
        """Return the results of some of the queries; `rows` is a slice, indices or a mask."""
        nearest = None if self.nearest is None else self.nearest.select_rows(rows)
        return TargetSums(self.temperatures, self.knn[rows], self.found[rows], nearest)

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Do nothing, because the probabilities on the grid are already known."""

    def weights(self, temperature: PerQuery) -> Tensor:
        """Interpolate the probabilities of the target token and of all other tokens together, shape (n, 2).

        A row is 0 for a query without records.

        Args:
            temperature: T > 0: one value for all queries, or one for each query, shape (n,).
        """
        target = interpolate_on_grid(self.knn, self.temperatures, temperature)
        return torch.stack([target, 1 - target], 1) * self.found[:, None]
