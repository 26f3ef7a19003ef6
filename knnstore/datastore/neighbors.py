"""The result of a search (`Neighbors`), and merging the results of several searches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids
from knnstore.datastore.visits import Visits, split_visits

_COLUMNS_HELD = 16
"""Multiple of k. If the results in memory have more columns together, `merge_many` merges them."""


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The k nearest records of each of q queries, as two matrices with a row for each query.

    Each row is sorted by ascending distance unless a function's docstring says otherwise, and no record id
    occurs twice in a row. If a query has fewer than k neighbors, the last columns of its row hold *missing
    neighbors*: id -1 at distance +inf.
    """

    ids: Ids
    """Record ids, int64, shape (q, k). Some functions that search a matrix of keys put row numbers of the
    matrix here instead of record ids; their docstrings say so."""

    distances: Distances
    """Distances as `Metric` measures them; float32, shape (q, k)."""

    @classmethod
    def all_missing(cls, queries: int, k: int) -> "Neighbors":
        """Return a result of shape (queries, k) in which every neighbor is missing: id -1, distance +inf."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), np.inf, np.float32))

    @classmethod
    def concatenate(cls, parts: Sequence["Neighbors"], *, axis: int = 1) -> "Neighbors":
        """Concatenate search results into one result, without sorting.

        Args:
            parts: one or more results. A single result is returned itself.
            axis: 1 joins results of the same queries: the columns are appended, so each query gets the
                neighbors of all results. 0 joins results of different queries: the rows are appended. With 0,
                results with fewer columns are first padded with missing neighbors (id -1 at distance +inf).
        """
        if len(parts) == 1:
            return parts[0]
        if axis == 0:
            width = max(part.ids.shape[1] for part in parts)
            parts = [part.pad_columns(width) for part in parts]
        ids = np.concatenate([part.ids for part in parts], axis)
        return cls(ids, np.concatenate([part.distances for part in parts], axis))

    @classmethod
    def from_visits(cls, found: Sequence[Visits], queries: int) -> "Neighbors":
        """Convert visits (distances of queries to all records of a cluster of near keys) to neighbors.

        Each record that a query was compared with becomes a neighbor of this query. The rows of the result
        are not sorted. All rows are padded to the same length, at least 1, with missing neighbors (id -1 at
        distance +inf). A missing neighbor may stand between two other neighbors of a row.

        Args:
            found: visits of the queries, the result of `SupportsCells.visit`.
            queries: number of queries, q. A query without a visit gets only missing neighbors.
        """
        if found and all(stack.is_by_row(queries) for stack in found):
            return cls.concatenate([cls(stack.ids, stack.distances[:, 0]) for stack in found])
        visits = split_visits(found)
        counts = np.zeros(queries, np.int64)
        for visit in visits:
            counts[visit.queries] += len(visit.ids)
        neighbors = cls.all_missing(queries, max(1, int(counts.max(initial=0))))
        counts[:] = 0
        for visit in visits:
            cells = visit.queries[:, None], counts[visit.queries, None] + np.arange(len(visit.ids))
            neighbors.ids[cells], neighbors.distances[cells] = visit.ids, visit.distances
            counts[visit.queries] += len(visit.ids)
        return neighbors

    def sort_nearest(self, k: int) -> "Neighbors":
        """Return a copy in which the first k columns hold the k nearest neighbors, sorted by distance.

        The other neighbors of each query follow in the later columns, unsorted. The number of columns does
        not change.

        Args:
            k: number of sorted columns, >= 1. If it is at least the number of columns, all neighbors are
                sorted.
        """
        if k >= self.ids.shape[1]:
            return self.select_nearest(self.ids.shape[1])
        if k == 1:
            return self._map_arrays(partial(_swap_into_first_column, columns=self.distances.argmin(axis=1)))
        order = np.argpartition(self.distances, k - 1, axis=1)
        # Indices of the flat arrays, because `take` with them is faster than pairs of indices.
        order += np.arange(0, order.size, order.shape[1])[:, None]
        near_order = self.distances.take(order[:, :k]).argsort(axis=1, kind="stable")
        order[:, :k] = np.take_along_axis(order, near_order, axis=1)
        return self._map_arrays(lambda array: array.take(order))

    def select_rows(self, rows: NDArray[Any]) -> "Neighbors":
        """Return a copy with the neighbors of some queries only.

        Args:
            rows: the queries to keep: a mask of all queries, or row numbers.
        """
        return self._map_arrays(lambda array: array[rows])

    def map_rows_to_ids(self, ids: Ids) -> "Neighbors":
        """Return a result in which row numbers of a searched matrix are replaced by record ids.

        A row number r in `self.ids` becomes ids[r], and -1 (a missing neighbor) stays -1. The new result
        shares the array of distances with this result.

        Args:
            ids: record id of each row of the searched matrix, int64, shape (n,).
        """
        named_ids = ids.take(self.ids, mode="clip")
        if len(named_ids) and self.ids[:, -1].min() < 0:
            named_ids[self.ids < 0] = -1
        return replace(self, ids=named_ids)

    def pad_columns(self, k: int) -> "Neighbors":
        """Append columns of missing neighbors (id -1 at distance +inf), and return a result with k columns.

        Args:
            k: number of columns of the result, at least the number of columns of `self`. If the two numbers
                are equal, `self` is returned.
        """
        queries, columns = self.ids.shape
        return (
            self
            if columns == k
            else Neighbors.concatenate([self, Neighbors.all_missing(queries, k - columns)])
        )

    def scatter_rows(self, rows: NDArray[np.bool_]) -> "Neighbors":
        """Return a result for n queries of which only some were searched, shape (n, k).

        The i-th row of this result becomes the row of the i-th query whose mask value is True. Each query
        whose mask value is False gets only missing neighbors (id -1 at distance +inf).

        Args:
            rows: mask of the n queries, shape (n,); it is True for each query that was searched. The number
                of True values is the number of rows of this result.
        """
        neighbors = Neighbors.all_missing(len(rows), self.ids.shape[1])
        neighbors.replace_rows(rows, self)
        return neighbors

    def mask_neighbors(self, gone: NDArray[np.bool_]) -> "Neighbors":
        """Return a copy in which the neighbors that a mask selects are replaced by missing neighbors.

        A missing neighbor has id -1 and distance +inf. No neighbor moves to another column; call
        `select_nearest` to move missing neighbors to the end of a row.

        Args:
            gone: mask of the neighbors to remove, shape (q, k).
        """
        return Neighbors(np.where(gone, -1, self.ids), np.where(gone, np.float32(np.inf), self.distances))

    def select_nearest(self, k: int) -> "Neighbors":
        """Return the k nearest neighbors of each query, sorted by distance, nearest first.

        The columns of `self` may have any order. The result has k columns; if `self` has fewer columns,
        missing neighbors (id -1 at distance +inf) are appended. If several neighbors compete for the last
        column with equal distances, the neighbors with the smallest ids are kept.
        """
        # The stable sort is the one that is fast on presorted rows.
        order = np.argsort(self.distances, axis=1, kind="stable")
        if order.shape[1] > k:
            last, next_one = np.take_along_axis(self.distances, order[:, k - 1 : k + 1], axis=1).T
            tied = np.flatnonzero((last == next_one) & np.isfinite(last))
            if len(tied):
                order[tied] = np.lexsort((self.ids[tied], self.distances[tied]), axis=1)
        order = order[:, :k]
        return self._map_arrays(lambda array: np.take_along_axis(array, order, axis=1)).pad_columns(k)

    def replace_rows(self, rows: NDArray[Any], part: "Neighbors") -> None:
        """Replace the neighbors of some queries of this result in place.

        Args:
            rows: the queries whose neighbors are replaced: a mask of all queries, or row numbers.
            part: the new neighbors, with one row for each replaced row. If `part` has fewer columns than this
                result, missing neighbors (id -1 at distance +inf) fill the rest.
        """
        part = part.pad_columns(self.ids.shape[1])
        self.ids[rows], self.distances[rows] = part.ids, part.distances

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Sort the neighbors of some queries by distance in place, after their distances have changed.

        Args:
            rows: row numbers of the queries, shape (n,).
        """
        self.replace_rows(rows, self.select_rows(rows).select_nearest(self.ids.shape[1]))

    def _map_arrays(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Neighbors":
        """Return a new result whose ids and distances are made from this result's by the same function.

        Args:
            change: function that is called with the matrix of ids, then with the matrix of distances, and
                returns the new matrix.
        """
        return Neighbors(change(self.ids), change(self.distances))


def _swap_into_first_column(array: NDArray[Any], columns: NDArray[np.intp]) -> NDArray[Any]:
    """Return a copy of a matrix in which row i has exchanged its values in columns 0 and columns[i].

    Args:
        array: matrix, shape (n, k).
        columns: for each row the column whose value moves to column 0, shape (n,).
    """
    changed, rows = array.copy(), np.arange(len(array))
    changed[:, 0], changed[rows, columns] = array[rows, columns], array[:, 0]
    return changed


def merge_neighbors(parts: Sequence[Neighbors], queries: int, k: int) -> Neighbors:
    """Merge several search results of the same queries into the k nearest neighbors of each query.

    Args:
        parts: results of the same queries, each sorted by distance. No record may occur in two results. An
            empty list gives only missing neighbors.
        queries: number of queries.
        k: number of neighbors to keep for each query.

    Returns:
        Neighbors, nearest first, shape (queries, k). If a query has fewer than k neighbors in all results,
        each missing neighbor has id -1 and distance +inf.
    """
    parts = [part for part in parts if part.ids.shape[1]]
    if not parts:
        return Neighbors.all_missing(queries, k)
    if len(parts) == 1 and parts[0].ids.shape[1] <= k:
        return parts[0].pad_columns(k)
    return Neighbors.concatenate(parts).select_nearest(k)


def merge_many(parts: Iterable[Neighbors], queries: int, k: int) -> Neighbors:
    """Merge many search results of the same queries into the k nearest neighbors of each query.

    The function returns the same as `merge_neighbors`, and takes less memory: whenever the results in memory
    have more than 16 * k columns together, they are merged into one result.

    Args:
        parts: results of the same queries, each sorted by distance; they are read one after another. No
            record may occur in two results. Without results, all neighbors are missing.
        queries: number of queries.
        k: number of neighbors to keep for each query.

    Returns:
        Neighbors, nearest first, shape (queries, k). If a query has fewer than k neighbors in all results,
        each missing neighbor has id -1 and distance +inf.
    """
    held_parts: list[Neighbors] = []
    columns = 0
    for part in parts:
        held_parts.append(part)
        columns += part.ids.shape[1]
        if columns > _COLUMNS_HELD * k:
            held_parts, columns = [merge_neighbors(held_parts, queries, k)], k
    return merge_neighbors(held_parts, queries, k)
