"""What a search finds, and how several searches become one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The nearest records of each query.

    Rows ascend by distance and no id stands twice in a row. Where fewer than k records match,
    the rest of the row is id -1 at distance +inf.
    """

    ids: Ids
    """int64, shape (q, k)."""

    distances: Distances
    """float32, shape (q, k)."""

    log_weights: NDArray[np.float32] | None = None
    """The log of how many records each stands for, shape (q, k): added by a store that was pruned, and
    never by an adapter. None where each stands for itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """Neighbours of each query, nearest first; missing ones are -1 at +inf, at the end of the row."""

    ids: NDArray[np.int64]
    """Record ids or row numbers, shape (q, k)."""

    distances: Distances
    """As the protocol measures them, shape (q, k)."""

    @classmethod
    def nothing(cls, queries: int, k: int) -> "Found":
        """All missing."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), np.inf, np.float32))

    def named(self, ids: Ids) -> "Found":
        """The same with row r called ids[r]."""
        named = ids.take(self.ids, mode="clip")
        if len(named) and self.ids[:, -1].min() < 0:
            named[self.ids < 0] = -1
        return Found(named, self.distances)

    def padded(self, k: int) -> "Found":
        """The same with k columns, at least as many as there are."""
        short = k - self.ids.shape[1]
        if short == 0:
            return self
        wide = Found.nothing(len(self.ids), k)
        wide.ids[:, :-short] = self.ids
        wide.distances[:, :-short] = self.distances
        return wide

    def nearest(self, k: int) -> "Found":
        """The k nearest in order, from columns in any order of which there are at least k."""
        ids, distances = self.ids, self.distances
        if ids.shape[1] > k:
            kept = np.argpartition(distances, k - 1, axis=1)[:, :k]
            ids, distances = np.take_along_axis(ids, kept, 1), np.take_along_axis(distances, kept, 1)
        order = np.argsort(distances, axis=1)
        return Found(np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1))

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Put some rows in order again, in place, after distances in them changed."""
        order = np.argsort(self.distances[rows], axis=1, kind="stable")
        self.ids[rows] = np.take_along_axis(self.ids[rows], order, axis=1)
        self.distances[rows] = np.take_along_axis(self.distances[rows], order, axis=1)


def merge(parts: Sequence[Found], queries: int, k: int) -> Found:
    """The k nearest of several parts that have no record in common."""
    parts = [part for part in parts if part.ids.shape[1]]
    if not parts:
        return Found.nothing(queries, k)
    if len(parts) == 1 and parts[0].ids.shape[1] <= k:
        return parts[0].padded(k)
    ids = np.concatenate([part.ids for part in parts], axis=1)
    distances = np.concatenate([part.distances for part in parts], axis=1)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]  # of those here the one that uses order
    return Found(np.take_along_axis(ids, order, 1), np.take_along_axis(distances, order, 1)).padded(k)
