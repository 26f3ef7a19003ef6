"""The result of a search (`Neighbors`), and merging the results of several searches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids
from knnstore.datastore.visits import Visits, apart

_COLUMNS_HELD = 16
"""`merge_many` merges when it holds more than this multiple of k columns."""


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The nearest records of each query.

    Each row is sorted by ascending distance unless a function's docstring says otherwise, and no id occurs
    twice in a row. If fewer than k records match, the rest of the row is padded: id -1 at distance +inf.
    """

    ids: Ids
    """Record ids, int64, shape (q, k). In results of an index these can be row numbers instead."""

    distances: Distances
    """Distances as `Metric` measures them; float32, shape (q, k)."""

    @classmethod
    def nothing(cls, queries: int, k: int) -> "Neighbors":
        """Return a result of shape (queries, k) in which every neighbor is missing."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), np.inf, np.float32))

    @classmethod
    def joined(cls, parts: Sequence["Neighbors"], *, axis: int = 1) -> "Neighbors":
        """Concatenate one or more results of the same queries by columns, without sorting.

        With axis 0, concatenate results of different queries by rows, each padded to the widest.
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
        """Return all records that each query was compared with, unsorted and padded to at least one column.

        Args:
            found: the visited cells of the queries.
            queries: number of queries, q. A query without a visit gets only missing neighbors.
        """
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
        """Return a copy whose first k columns are the k nearest in order.

        The other columns follow unsorted.
        """
        if k >= self.ids.shape[1]:
            return self.nearest(self.ids.shape[1])
        if k == 1:
            return self._changed(partial(_with_first, at=self.distances.argmin(axis=1)))
        rows, order = np.arange(len(self.ids))[:, None], np.argpartition(self.distances, k - 1, axis=1)
        near = self.distances[rows, order[:, :k]].argsort(axis=1, kind="stable")
        order[:, :k] = order[rows, near]
        return self._changed(lambda array: array[rows, order])

    def rows(self, rows: NDArray[Any]) -> "Neighbors":
        """Return a copy of the rows that `rows` selects, by a mask or by row numbers."""
        return self._changed(lambda array: array[rows])

    def named(self, ids: Ids) -> "Neighbors":
        """Return a copy in which each row number r is replaced by ids[r]; -1 stays -1."""
        named = ids.take(self.ids, mode="clip")
        if len(named) and self.ids[:, -1].min() < 0:
            named[self.ids < 0] = -1
        return replace(self, ids=named)

    def padded(self, k: int) -> "Neighbors":
        """Return the result with k columns, padded with missing neighbors.

        k must be at least the present width.
        """
        queries, columns = self.ids.shape
        return self if columns == k else Neighbors.joined([self, Neighbors.nothing(queries, k - columns)])

    def spread(self, rows: NDArray[np.bool_]) -> "Neighbors":
        """Scatter the rows into a larger result: to the rows where the mask, shape (n,), is True.

        The mask has as many True values as this result has rows. The other rows get only missing neighbors.
        """
        whole = Neighbors.nothing(len(rows), self.ids.shape[1])
        whole.put(rows, self)
        return whole

    def without(self, gone: NDArray[np.bool_]) -> "Neighbors":
        """Return a copy in which the neighbors of a mask, shape (q, k), are missing.

        The missing neighbors stay in their columns; `nearest` sorts them to the end.
        """
        return Neighbors(np.where(gone, -1, self.ids), np.where(gone, np.float32(np.inf), self.distances))

    def nearest(self, k: int) -> "Neighbors":
        """Return the k nearest neighbors in order, from columns in any order.

        Padded if fewer than k columns exist.

        Ties at the k-th distance are broken by the smallest ids.
        """
        # The stable sort is the one that is fast on presorted rows.
        order = np.argsort(self.distances, axis=1, kind="stable")
        if order.shape[1] > k:
            last, next_one = np.take_along_axis(self.distances, order[:, k - 1 : k + 1], axis=1).T
            tied = np.flatnonzero((last == next_one) & np.isfinite(last))
            if len(tied):
                order[tied] = np.lexsort((self.ids[tied], self.distances[tied]), axis=1)
        order = order[:, :k]
        return self._changed(lambda array: np.take_along_axis(array, order, axis=1)).padded(k)

    def put(self, rows: NDArray[Any], part: "Neighbors") -> None:
        """Replace rows in place.

        Args:
            rows: the rows, by a mask or by row numbers.
            part: the new rows. It has no more columns than this result, and is padded.
        """
        part = part.padded(self.ids.shape[1])
        self.ids[rows], self.distances[rows] = part.ids, part.distances

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Sort rows again in place, after their distances have changed."""
        self.put(rows, self.rows(rows).nearest(self.ids.shape[1]))

    def _changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Neighbors":
        """Return a result with the same function applied to ids and distances."""
        return Neighbors(change(self.ids), change(self.distances))


def _with_first(array: NDArray[Any], at: NDArray[np.intp]) -> NDArray[Any]:
    """Return a copy in which each row's first value is exchanged with the value at column `at` of the row."""
    changed, rows = array.copy(), np.arange(len(array))
    changed[:, 0], changed[rows, at] = array[rows, at], array[:, 0]
    return changed


def merge(parts: Sequence[Neighbors], queries: int, k: int) -> Neighbors:
    """Return the k nearest neighbors from several results that have no record in common.

    Without parts all neighbors are missing.
    """
    parts = [part for part in parts if part.ids.shape[1]]
    if not parts:
        return Neighbors.nothing(queries, k)
    if len(parts) == 1 and parts[0].ids.shape[1] <= k:
        return parts[0].padded(k)
    return Neighbors.joined(parts).nearest(k)


def merge_many(parts: Iterable[Neighbors], queries: int, k: int) -> Neighbors:
    """Return the same as `merge`, with at most about `_COLUMNS_HELD` * k columns in memory."""
    held: list[Neighbors] = []
    columns = 0
    for part in parts:
        held.append(part)
        columns += part.ids.shape[1]
        if columns > _COLUMNS_HELD * k:
            held, columns = [merge(held, queries, k)], k
    return merge(held, queries, k)
