"""Cells with the queries that visit them, and those records of theirs that carry what came after a query."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from knnstore.datastore import TOKEN_LIMIT


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
