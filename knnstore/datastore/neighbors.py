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
        """Concatenate results of the same queries by columns, without sorting.

        With axis 0, concatenate results of different queries by rows. Each is first padded to the number of
        columns of the widest.

        Args:
            parts: one or more results.
            axis: 1 to concatenate columns, 0 to concatenate rows.
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
        """Return every record that a query was compared with as a neighbor of this query.

        Rows are unsorted. They are padded to the same length, at least 1, with missing neighbors, which may
        stand between others.

        Args:
            found: results of `SupportsCells.visit`: distances of the queries to the records of their cells.
            queries: number of queries, q. A query without a visit gets only missing neighbors.
        """
        if found and all(stack.is_by_row(queries) for stack in found):
            return cls.joined([cls(stack.ids, stack.distances[:, 0]) for stack in found])
        visits = apart(found)
        counts = np.zeros(queries, np.int64)
        for visit in visits:
            counts[visit.queries] += len(visit.ids)
        neighbors = cls.nothing(queries, max(1, int(counts.max(initial=0))))
        counts[:] = 0
        for visit in visits:
            cells = visit.queries[:, None], counts[visit.queries, None] + np.arange(len(visit.ids))
            neighbors.ids[cells], neighbors.distances[cells] = visit.ids, visit.distances
            counts[visit.queries] += len(visit.ids)
        return neighbors

    def nearest_first(self, k: int) -> "Neighbors":
        """Return a copy whose first k columns are the k nearest neighbors, sorted by distance.

        The other columns follow unsorted. The number of columns stays the same.
        """
        if k >= self.ids.shape[1]:
            return self.nearest(self.ids.shape[1])
        if k == 1:
            return self._map_arrays(partial(_swap_into_first_column, columns=self.distances.argmin(axis=1)))
        rows, order = np.arange(len(self.ids))[:, None], np.argpartition(self.distances, k - 1, axis=1)
        near_order = self.distances[rows, order[:, :k]].argsort(axis=1, kind="stable")
        order[:, :k] = order[rows, near_order]
        return self._map_arrays(lambda array: array[rows, order])

    def rows(self, rows: NDArray[Any]) -> "Neighbors":
        """Return a copy of the results of some queries, selected by a mask or by row numbers."""
        return self._map_arrays(lambda array: array[rows])

    def named(self, ids: Ids) -> "Neighbors":
        """Return a copy in which each row number r in `self.ids` is replaced by ids[r]; -1 stays -1.

        Args:
            ids: record id of each row number, int64, shape (n,).
        """
        named_ids = ids.take(self.ids, mode="clip")
        if len(named_ids) and self.ids[:, -1].min() < 0:
            named_ids[self.ids < 0] = -1
        return replace(self, ids=named_ids)

    def padded(self, k: int) -> "Neighbors":
        """Return the result with k columns, padded with missing neighbors (id -1 at distance +inf).

        k must be at least the present number of columns. With as many columns, the result is `self`.
        """
        queries, columns = self.ids.shape
        return self if columns == k else Neighbors.joined([self, Neighbors.nothing(queries, k - columns)])

    def spread(self, rows: NDArray[np.bool_]) -> "Neighbors":
        """Return a larger result, shape (n, k), with this result's rows where a mask is True.

        The other rows get only missing neighbors.

        Args:
            rows: mask, shape (n,), with as many True values as this result has rows.
        """
        neighbors = Neighbors.nothing(len(rows), self.ids.shape[1])
        neighbors.put(rows, self)
        return neighbors

    def without(self, gone: NDArray[np.bool_]) -> "Neighbors":
        """Return a copy in which the neighbors selected by a mask are missing (id -1 at distance +inf).

        Missing neighbors keep their columns; call `nearest` to sort them to the end.

        Args:
            gone: mask, shape (q, k).
        """
        return Neighbors(np.where(gone, -1, self.ids), np.where(gone, np.float32(np.inf), self.distances))

    def nearest(self, k: int) -> "Neighbors":
        """Return the k nearest neighbors, sorted by distance; the columns of `self` may have any order.

        The result has k columns, and is padded if `self` has fewer. If several neighbors have the k-th
        smallest distance, the neighbors with the smallest ids are kept.
        """
        # The stable sort is the one that is fast on presorted rows.
        order = np.argsort(self.distances, axis=1, kind="stable")
        if order.shape[1] > k:
            last, next_one = np.take_along_axis(self.distances, order[:, k - 1 : k + 1], axis=1).T
            tied = np.flatnonzero((last == next_one) & np.isfinite(last))
            if len(tied):
                order[tied] = np.lexsort((self.ids[tied], self.distances[tied]), axis=1)
        order = order[:, :k]
        return self._map_arrays(lambda array: np.take_along_axis(array, order, axis=1)).padded(k)

    def put(self, rows: NDArray[Any], part: "Neighbors") -> None:
        """Replace the results of some queries in place.

        Args:
            rows: the rows to replace, as a mask or as row numbers.
            part: the new rows. They may have fewer columns than this result; then they are padded.
        """
        part = part.padded(self.ids.shape[1])
        self.ids[rows], self.distances[rows] = part.ids, part.distances

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Sort some rows by distance in place, for example after their distances have changed.

        Args:
            rows: numbers of the rows.
        """
        self.put(rows, self.rows(rows).nearest(self.ids.shape[1]))

    def _map_arrays(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Neighbors":
        """Return a result whose arrays are `change(ids)` and `change(distances)`."""
        return Neighbors(change(self.ids), change(self.distances))


def _swap_into_first_column(array: NDArray[Any], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Return a copy of a matrix in which each row's first value is exchanged with another value of the row.

    Args:
        array: matrix, shape (n, k).
        columns: column of the other value in each row, shape (n,).
    """
    changed, rows = array.copy(), np.arange(len(array))
    changed[:, 0], changed[rows, columns] = array[rows, columns], array[:, 0]
    return changed


def merge(parts: Sequence[Neighbors], queries: int, k: int) -> Neighbors:
    """Return the k nearest neighbors of each query from several results, sorted, shape (queries, k).

    Args:
        parts: results of the same queries without common records. A single part with at most k columns keeps
            its order. Without parts, all neighbors are missing.
        queries: number of queries.
        k: number of neighbors.
    """
    parts = [part for part in parts if part.ids.shape[1]]
    if not parts:
        return Neighbors.nothing(queries, k)
    if len(parts) == 1 and parts[0].ids.shape[1] <= k:
        return parts[0].padded(k)
    return Neighbors.joined(parts).nearest(k)


def merge_many(parts: Iterable[Neighbors], queries: int, k: int) -> Neighbors:
    """Return the result of `merge`, without holding all parts in memory.

    Parts are merged whenever more than `_COLUMNS_HELD` * k columns are in memory.
    """
    held_parts: list[Neighbors] = []
    columns = 0
    for part in parts:
        held_parts.append(part)
        columns += part.ids.shape[1]
        if columns > _COLUMNS_HELD * k:
            held_parts, columns = [merge(held_parts, queries, k)], k
    return merge(held_parts, queries, k)
