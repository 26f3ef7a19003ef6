"""What queries meet: cells that they visit, the nearest records, those that carry what came after a query."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import TOKEN_LIMIT
from knnstore.lm.mixing.interpolation import PerQuery


class VisitedCells(NamedTuple):
    """Some cells, and the queries that visit each; see `knnstore.datastore.Visits`."""

    queries: Tensor
    """Their numbers, int64, shape (b, m); -1 where a cell has fewer."""

    tokens: Tensor
    """Of the records, int64, shape (b, r)."""

    distances: Tensor
    """Of each query to each record, float32, shape (b, m, r); +inf where one is missing."""

    log_weights: Tensor | None = None
    """Of the records, float32, shape (b, r); see `neighbor_weights`."""

    ranks: Tensor | None = None
    """How many of a query's cells are nearer, int64, shape (b, m); None where that is not known."""

    def on(self, device: torch.device) -> "VisitedCells":
        """The same on a device."""
        if device.type == "cpu":
            return self
        weights, ranks = (None if of is None else of.to(device) for of in (self.log_weights, self.ranks))
        return VisitedCells(
            self.queries.to(device), self.tokens.to(device), self.distances.to(device), weights, ranks
        )


class Shares(Protocol):
    """What n queries met, as far as it can be said without the records."""

    @property
    def hits(self) -> tuple[bool, ...] | None:
        """Whether each place has the token that came; None where there is a place for each token."""
        ...

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Hear for which temperatures, among others, there will be asked for `weights`."""

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to each place: the records with the token that came and all others, or each token.

        Args:
            temperature: T > 0, for all or of shape (n,).

        Returns:
            Float32, shape (n, places). Rows sum to 1, or to 0 when nothing was met.
        """
        ...


class Hits(NamedTuple):
    """Of h meetings, each of a query with a record that carries the token that came after it."""

    pairs: Tensor
    """Of a query and a cell that it visits, in the order of all cells, int64, shape (h,)."""

    distances: Tensor
    """Float32, shape (h,)."""

    weights: Tensor
    """How many each record counts for, float32, shape (h,)."""


def hits_of(cells: Sequence[VisitedCells], queries: Tensor, gold: Tensor) -> Hits:
    """Find the hits of all cells together: records in the order of their tokens, by binary search.

    Args:
        cells: on one device.
        queries: of all cells, one after another, int64, shape (pairs,); from 0 to n - 1.
        gold: the token that came after each query, int64, shape (n,).
    """
    nothing = torch.empty(0, device=gold.device)
    if not cells:
        return Hits(gold[:0], nothing, nothing)
    shapes = [some.distances.shape for some in cells]
    visits = torch.arange(sum(count for count, _, _ in shapes), device=gold.device)
    each = torch.tensor([shape for shape in shapes for _ in range(shape[0])], device=gold.device)
    _, asked, lengths = each.unbind(1)
    of_records, of_pairs = visits.repeat_interleave(lengths), visits.repeat_interleave(asked)
    tokens = torch.cat([some.tokens.flatten() for some in cells])
    ordered, order = (of_records * TOKEN_LIMIT + tokens).sort()
    wanted = of_pairs * TOKEN_LIMIT + gold[queries]
    low = torch.searchsorted(ordered, wanted)
    counts = torch.searchsorted(ordered, wanted, right=True) - low
    pair = torch.arange(len(counts), device=gold.device).repeat_interleave(counts)
    found = order[torch.arange(len(pair), device=gold.device) + (low - _starts(counts))[pair]]
    # From a record's number to its place among the distances of all cells, one after another.
    at = torch.arange(len(of_pairs), device=gold.device) - _starts(asked)[of_pairs]
    base = (_starts(asked * lengths) - _starts(lengths))[of_pairs] + at * lengths[of_pairs]
    places = found + base[pair]
    ends = torch.tensor([some.distances.numel() for some in cells]).cumsum(0)
    shares = torch.searchsorted(places, ends.to(gold.device)).diff(prepend=places.new_zeros(1)).tolist()
    begins = (ends - ends.diff(prepend=ends.new_zeros(1))).tolist()
    parts = zip(cells, torch.split(places, shares), begins, strict=True)
    distances = torch.cat([nothing, *(some.distances.take(at - begin) for some, at, begin in parts)])
    weights = torch.ones_like(distances)
    if any(some.log_weights is not None for some in cells):
        weights = torch.cat([_log_weights(some).flatten() for some in cells])[found].exp()
    return Hits(pair, distances, weights)


def _starts(sizes: Tensor) -> Tensor:
    """Where each of some parts begins, when they are one after another."""
    return sizes.cumsum(0) - sizes


def _log_weights(cells: VisitedCells) -> Tensor:
    return torch.zeros_like(cells.tokens).float() if cells.log_weights is None else cells.log_weights


def nearest_records(
    cells: Sequence[VisitedCells], asked: Tensor, count: int, k: int
) -> tuple[Tensor, Tensor]:
    """Find the k nearest records of each query.

    Args:
        cells: on one device.
        asked: the queries of all cells, one after another, int64, shape (pairs,); `count` where one is
            missing.
        count: queries, n.
        k: how many.

    Returns:
        Distances and tokens, shape (n, k), nearest first; +inf and anything where there are fewer.
    """
    bounds, begins = _bounds(cells, asked, count, k)[asked], asked.new_zeros(0)
    queries, distances, tokens = [begins], [bounds[:0]], [begins]
    sizes = [some.queries.numel() for some in cells]
    parts = zip(cells, torch.split(asked, sizes), torch.split(bounds, sizes), strict=True)
    for some, of_cells, bound in parts:
        _, across, records = some.distances.shape
        near = _flatnonzero(some.distances <= bound.view(-1, across, 1))
        pairs = near // records
        queries.append(of_cells[pairs])
        distances.append(some.distances.take(near))
        tokens.append(some.tokens.take(pairs // across * records + near % records))
    away, owners = torch.cat(distances), torch.cat(queries)
    order = away.argsort()
    owners, then = owners[order].sort(stable=True)
    order, place = order[then], _places(owners)
    chosen = (place < k) & (owners < count)
    nearest, of_nearest = away.new_full((count, k), torch.inf), asked.new_zeros(count, k)
    at = owners[chosen], place[chosen]
    nearest[at], of_nearest[at] = away[order[chosen]], torch.cat(tokens)[order[chosen]]
    return nearest, of_nearest


def _bounds(cells: Sequence[VisitedCells], asked: Tensor, count: int, k: int) -> Tensor:
    """What hardly more than the k nearest of each query are within, shape (n + 1,).

    The records of each cell, but for a few, are divided into k groups. The nearest of each group, of all
    cells a query visits, are a few, and the k-th of these is at least as far as the k-th of all.
    """
    leasts = [torch.empty(0, k, device=asked.device)]
    for some in cells:
        visits, across, records = some.distances.shape
        if records < k:
            least = pad(some.distances, (0, k - records), value=torch.inf)
        else:
            least = some.distances[..., : records // k * k].reshape(visits, across, -1, k).amin(2)
        leasts.append(least.flatten(0, 1))
    owners, order = asked.sort(stable=True)
    there = owners < count
    owners, place, order = owners[there], _places(owners)[there], order[there]
    most = int(place.max()) + 1 if len(place) else 1
    table = leasts[0].new_full((count + 1, most, k), torch.inf)
    table[owners, place] = torch.cat(leasts)[order]
    bounds = table.flatten(1).topk(k, largest=False, sorted=False).values.amax(1)
    return bounds.clamp(max=torch.finfo(bounds.dtype).max)  # what is missing is beyond it


def _flatnonzero(mask: Tensor) -> Tensor:
    """Where a mask is True, as one number each; on a processor numpy knows sooner."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero()[:, 0]


def _places(owners: Tensor) -> Tensor:
    """The how many-th of its owner's each is; owners ascend; shape (n,)."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
