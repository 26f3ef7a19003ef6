"""What a search finds, and how several searches become one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids
from knnstore.datastore.visits import Visits, apart

_COLUMNS_HELD = 16


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The nearest records of each query.

    Rows ascend by distance, where nothing else is said, and no id stands twice in a row. Where fewer than k
    records match, the rest of the row is missing: id -1 at distance +inf.
    """

    ids: Ids
    """Record ids, or row numbers where an index says so; int64, shape (q, k)."""

    distances: Distances
    """As `Metric` measures them; float32, shape (q, k)."""

    @classmethod
    def nothing(cls, queries: int, k: int) -> "Neighbors":
        """All missing."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), np.inf, np.float32))

    @classmethod
    def joined(cls, parts: Sequence["Neighbors"], *, axis: int = 1) -> "Neighbors":
        """Put one or more parts of the same queries beside each other, in the order given.

        With axis 0 parts of any queries come below each other, padded to the widest.
        """
        if len(parts) == 1:
            return parts[0]
        if axis == 0:
            width = max(part.ids.shape[1] for part in parts)
            parts = [part.padded(width) for part in parts]
        ids = np.concatenate([part.ids for part in parts], axis)
        return cls(ids, np.concatenate([part.distances for part in parts], axis))

    @classmethod
    def visited(cls, found: Sequence[Visits], queries: int) -> "Neighbors":
        """All records that each query was measured against, in any order, as wide as the widest needs."""
        if found and all(some.is_by_row(queries) for some in found):
            return cls.joined([cls(some.ids, some.distances[:, 0]) for some in found])
        visits = apart(found)
        counts = np.zeros(queries, np.int64)
        for visit in visits:
            counts[visit.queries] += len(visit.ids)
        met = cls.nothing(queries, max(1, int(counts.max(initial=0))))
        counts[:] = 0
        for visit in visits:
            places = visit.queries[:, None], counts[visit.queries, None] + np.arange(len(visit.ids))
            met.ids[places], met.distances[places] = visit.ids, visit.distances
            counts[visit.queries] += len(visit.ids)
        return met

    def nearest_first(self, k: int) -> "Neighbors":
        """The same with the k nearest of each query in order, and the others after them in any order."""
        if k >= self.ids.shape[1]:
            return self.nearest(self.ids.shape[1])
        if k == 1:
            return self._changed(partial(_with_first, at=self.distances.argmin(axis=1)))
        rows, order = np.arange(len(self.ids))[:, None], np.argpartition(self.distances, k - 1, axis=1)
        near = self.distances[rows, order[:, :k]].argsort(axis=1, kind="stable")
        order[:, :k] = order[rows, near]
        return self._changed(lambda array: array[rows, order])

    def rows(self, rows: NDArray[Any]) -> "Neighbors":
        """Copy those of some queries, given by a mask or by their numbers."""
        return self._changed(lambda array: array[rows])

    def named(self, ids: Ids) -> "Neighbors":
        """The same with row r called ids[r]."""
        named = ids.take(self.ids, mode="clip")
        if len(named) and self.ids[:, -1].min() < 0:
            named[self.ids < 0] = -1
        return replace(self, ids=named)

    def padded(self, k: int) -> "Neighbors":
        """The same with k columns, at least as many as there are."""
        queries, columns = self.ids.shape
        return self if columns == k else Neighbors.joined([self, Neighbors.nothing(queries, k - columns)])

    def spread(self, rows: NDArray[np.bool_]) -> "Neighbors":
        """The same as the rows of a larger result that are True, shape (n,); the others find nothing."""
        whole = Neighbors.nothing(len(rows), self.ids.shape[1])
        whole.put(rows, self)
        return whole

    def without(self, gone: NDArray[np.bool_]) -> "Neighbors":
        """The same with some missing in their places, bool of shape (q, k); see `nearest`."""
        return Neighbors(np.where(gone, -1, self.ids), np.where(gone, np.float32(np.inf), self.distances))

    def nearest(self, k: int) -> "Neighbors":
        """The k nearest in order, from columns in any order.

        Of equally near ones that have no room together, those with the least ids.
        """
        # Of the kinds of sort the one that uses order.
        order = np.argsort(self.distances, axis=1, kind="stable")
        if order.shape[1] > k:
            last, next_one = np.take_along_axis(self.distances, order[:, k - 1 : k + 1], axis=1).T
            tied = np.flatnonzero((last == next_one) & np.isfinite(last))
            if len(tied):
                order[tied] = np.lexsort((self.ids[tied], self.distances[tied]), axis=1)
        order = order[:, :k]
        return self._changed(lambda array: np.take_along_axis(array, order, axis=1)).padded(k)

    def put(self, rows: NDArray[Any], part: "Neighbors") -> None:
        """Replace those of some queries, given by a mask or by their numbers, in place.

        The part has no more columns than this.
        """
        part = part.padded(self.ids.shape[1])
        self.ids[rows], self.distances[rows] = part.ids, part.distances

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Put some rows in order again, in place, after distances in them changed."""
        self.put(rows, self.rows(rows).nearest(self.ids.shape[1]))

    def _changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Neighbors":
        return Neighbors(change(self.ids), change(self.distances))


def _with_first(array: NDArray[Any], at: NDArray[np.intp]) -> NDArray[Any]:
    """Each row with the value at a column of its own and the one at the first exchanged."""
    changed, rows = array.copy(), np.arange(len(array))
    changed[:, 0], changed[rows, at] = array[rows, at], array[:, 0]
    return changed


def merge(parts: Sequence[Neighbors], queries: int, k: int) -> Neighbors:
    """The k nearest of several parts that have no record in common."""
    parts = [part for part in parts if part.ids.shape[1]]
    if not parts:
        return Neighbors.nothing(queries, k)
    if len(parts) == 1 and parts[0].ids.shape[1] <= k:
        return parts[0].padded(k)
    return Neighbors.joined(parts).nearest(k)


def merge_many(parts: Iterable[Neighbors], queries: int, k: int) -> Neighbors:
    """What `merge` gives, holding some multiple of k columns at a time, however many parts there are."""
    held: list[Neighbors] = []
    columns = 0
    for part in parts:
        held.append(part)
        columns += part.ids.shape[1]
        if columns > _COLUMNS_HELD * k:
            held, columns = [merge(held, queries, k)], k
    return merge(held, queries, k)
