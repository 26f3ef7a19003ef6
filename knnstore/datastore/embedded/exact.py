"""Exact search of keys in a matrix in memory, by matrix multiplication."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.distances import BLOCK_VALUES, find_nearest_rows, paired_distances
from knnstore.datastore.embedded.segment import Columns, Segment
from knnstore.datastore.neighbors import Neighbors, merge_neighbors
from knnstore.datastore.ranges import IdRanges

_CHUNK = 1 << 16  # rows converted, moved or gathered at a time
_LONG_SLICE = 4096  # rows; slices of at least this length are searched in place, the rest is gathered

# Matrix multiplication finds |q - x|² as q² - 2qx + x², which rounds at the scale of q² + x². Where the
# distance is below this share of it, more than about 1e-5 of the distance may be lost (with the largest
# error seen, 0.8e-6 of q² + x²), so it is computed again from the difference.
_CANCELLING = 2.0**-4

# Distances by multiplication that differ by no more than this share of q² + x² may be those of equal keys.
_NOISE = 2e-6
_SPARE = 8  # neighbors searched beyond k, to see whether others are as near as the k-th

NearestRows = Callable[[Keys, Keys, int, Metric, Distances], Neighbors]
"""Finds the k nearest rows of a matrix, as `find_nearest_rows` does."""


@dataclass(slots=True)
class _Span:
    """The rows start to stop - 1 of the matrix of an `ExactIndex`, which hold the live records of a segment.

    A segment is an immutable set of records. A record is live if it is neither deleted nor replaced.
    """

    columns: Columns
    """Ids and keys of the segment."""

    dead: IdRanges
    """Row numbers of the segment that were deleted or replaced when its records were copied."""

    start: int
    stop: int


class ExactIndex:
    """Searches the live records of several segments of one group exactly, in a float32 matrix of their keys.

    A segment is an immutable set of records with ids and keys. Its live records are the records that are
    neither deleted nor replaced. A new index has no records; `update` fills the matrix. For L2, a *center*,
    which is approximately the mean key, is subtracted from all keys and queries. Distances stay the same, and
    rounding errors become smaller.

    Args:
        dim: number of components of a key.
        metric: metric of the distances.
        nearest: function that finds the nearest rows of a matrix.
    """

    def __init__(self, dim: int, metric: Metric, nearest: NearestRows = find_nearest_rows) -> None:
        self._dim = dim
        self._metric = metric
        self._nearest = nearest
        self._center = np.zeros(dim, np.float32)
        self._spans: list[_Span] = []
        self._rows = 0
        self._matrix = np.empty((0, dim), np.float32)
        self._norms = np.empty(0, np.float32)
        self._ids = np.empty(0, np.int64)
        self._in_half = True

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments to search, and copy the keys of their live records to the matrix.

        A segment is an immutable set of records. Live records are neither deleted nor replaced. Keys that are
        in the matrix already are not read again. No search may run during the call. If an error is raised,
        the index is empty afterwards.

        Args:
            segments: all segments to search; other segments are removed.
        """
        try:
            self._replace_segments(segments)
        except BaseException:
            self._spans, self._rows = [], 0
            raise

    def count(self, ids: IdRanges | None) -> int:
        """Return the number of records in the index whose id is in `ids`; None counts all records."""
        return self._rows if ids is None else int(np.diff(self._find_slices(ids), axis=1).sum())

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query. Among equally near records, smaller ids come first.

        Args:
            queries: query vectors, float32, shape (q, dim).
            k: number of neighbors, >= 1.
            ids: ids of the records that may be found; None allows all records.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k records may be
            found, each missing neighbor has id -1 and distance +inf.
        """
        reachable = min(k + _SPARE, self._rows)
        if reachable == 0 or len(queries) == 0:
            return Neighbors.all_missing(len(queries), k)
        centered = queries - self._center
        slices = np.array([[0, self._rows]]) if ids is None else self._find_slices(ids)
        neighbors = self._search_slices(centered, reachable, slices)
        if self._metric is Metric.L2:
            self._recompute_inexact(neighbors, queries, centered)
        if reachable > k:
            neighbors = self._select_nearest(neighbors, k, queries, centered, slices)
        return neighbors.map_rows_to_ids(self._ids).pad_columns(k)

    def _replace_segments(self, segments: Sequence[Segment]) -> None:
        """Change the matrix so that it has the keys of exactly the live records of `segments`.

        Live records are neither deleted nor replaced. Rows of records that are not live any more, or not in
        `segments`, are removed. Rows of new records are appended. After an error the content of the matrix is
        undefined.

        Args:
            segments: all segments (sets of records) to search.
        """
        new_segments = {id(segment.columns): segment for segment in segments}
        spans, self._spans = self._spans, []
        self._rows = 0
        for span in spans:
            segment = new_segments.pop(id(span.columns), None)
            if segment is not None:
                self._keep_span(span, segment)
        if new_segments:
            self._grow_arrays(self._rows + sum(segment.live for segment in new_segments.values()))
            if self._rows == 0 and self._metric is Metric.L2:
                self._center = _compute_center(list(new_segments.values()))
            self._in_half &= all(segment.columns.dtype == np.float16 for segment in new_segments.values())
            for segment in new_segments.values():
                self._append_segment(segment)

    def _search_slices(self, queries: Keys, k: int, slices: NDArray[np.int64]) -> Neighbors:
        """Find for each query the k nearest among the rows of the matrix in the given ranges.

        Args:
            queries: query vectors minus the center, shape (q, dim).
            k: number of neighbors.
            slices: ranges [start, stop) of row numbers to search, shape (s, 2).

        Returns:
            Neighbors, nearest first, shape (q, k), whose ids are row numbers of the matrix. If there are
            fewer than k rows, each missing neighbor has id -1 and distance +inf.
        """
        parts: list[Neighbors] = []
        for rows in self._split_slices(slices):
            nearest_in_piece = self._nearest(queries, self._matrix[rows], k, self._metric, self._norms[rows])
            if isinstance(rows, slice):
                nearest_in_piece.ids[nearest_in_piece.ids >= 0] += rows.start
            else:
                nearest_in_piece = nearest_in_piece.map_rows_to_ids(rows)
            parts = [merge_neighbors([*parts, nearest_in_piece], len(queries), k)]
        return merge_neighbors(parts, len(queries), k)

    @staticmethod
    def _split_slices(slices: NDArray[np.int64]) -> Iterator[slice | NDArray[np.int64]]:
        """Convert ranges of rows to selections of rows that can be searched one after another.

        First each long range is yielded as a slice, because its part of the matrix can be read in place. Then
        the rows of all short ranges are yielded together, as arrays of at most 65,536 row numbers.

        Args:
            slices: ranges [start, stop) of row numbers, shape (s, 2).
        """
        lengths = slices[:, 1] - slices[:, 0]
        long = lengths >= (_LONG_SLICE if len(slices) > 1 else 1)
        yield from (slice(start, stop) for start, stop in slices[long].tolist())
        rows = IdRanges(slices[~long]).ids()
        yield from (rows[chunk_start : chunk_start + _CHUNK] for chunk_start in range(0, len(rows), _CHUNK))

    def _find_slices(self, ids: IdRanges) -> NDArray[np.int64]:
        """Return the matrix rows whose record ids are in `ids`: ranges [start, stop), int64, shape (s, 2)."""
        slices = [ids.find_slices(self._ids[span.start : span.stop]) + span.start for span in self._spans]
        return np.concatenate([np.empty((0, 2), np.int64), *slices])

    def _recompute_inexact(self, neighbors: Neighbors, queries: Keys, centered: Keys) -> None:
        """Compute inaccurate L2 distances again, and replace them in place.

        A distance from matrix multiplication is inaccurate if it is small compared to the norms of the
        vectors. It is computed again from the difference of the vectors. Rows of `neighbors` with changed
        distances are sorted again.

        Args:
            neighbors: row numbers of the matrix, and their distances from the queries; changed in place.
            queries: query vectors, shape (q, dim).
            centered: query vectors minus the center, shape (q, dim).
        """
        scale = self._norms.take(
            neighbors.ids, mode="clip"
        )  # missing neighbors are at infinity, so they are never inexact
        scale += np.einsum("qd,qd->q", centered, centered)[:, None]
        scale *= _CANCELLING
        inexact = neighbors.distances < scale
        query_rows, columns = np.divmod(np.flatnonzero(inexact), inexact.shape[1])
        step = max(1, BLOCK_VALUES // self._dim)
        for start in range(0, len(columns), step):
            cells = query_rows[start : start + step], columns[start : start + step]
            neighbors.distances[cells] = self._compute_exact_distances(
                queries[cells[0]], centered[cells[0]], neighbors.ids[cells]
            )
        neighbors.sort_rows(np.flatnonzero(inexact.any(axis=1)))

    def _compute_exact_distances(self, queries: Keys, centered: Keys, rows: NDArray[np.int64]) -> Distances:
        """Compute the distance between query i and row rows[i] of the matrix, for each i.

        L2 distances are computed from the difference of the vectors. So two rows with equal keys get exactly
        the same distance from a query. If all keys are in half precision, this also holds for two rows of
        different indexes.

        Args:
            queries: query vectors, shape (n, dim), or (dim,) to compare one query with all rows.
            centered: query vectors minus the center, in the shape of `queries`.
            rows: row numbers of the matrix, shape (n,).

        Returns:
            Distances, float32, shape (n,).
        """
        if self._in_half:
            return paired_distances(queries, self._matrix[rows] + self._center, self._metric)
        return paired_distances(centered, self._matrix[rows], self._metric)

    def _select_nearest(
        self, neighbors: Neighbors, k: int, queries: Keys, centered: Keys, slices: NDArray[np.int64]
    ) -> Neighbors:
        """Return the k nearest of more than k neighbors. Of equally near records, the smallest ids are kept.

        Rounding can hide that two records are equally near. So distances that differ from the k-th smallest
        distance by no more than a rounding error are computed again from the differences of the vectors.

        Args:
            neighbors: more than k row numbers of the matrix for each query, and their distances, nearest
                first; changed in place.
            k: number of neighbors to keep.
            queries: query vectors, shape (q, dim).
            centered: query vectors minus the center, shape (q, dim).
            slices: ranges [start, stop) of the rows that were searched, shape (s, 2).

        Returns:
            Neighbors, shape (q, k), sorted by distance, whose ids are row numbers of the matrix.
        """
        last = neighbors.distances[:, k - 1]
        squares = np.einsum("qd,qd->q", centered, centered)
        norms = self._norms.take(neighbors.ids[:, k - 1], mode="clip")
        scale = squares + norms if self._metric is Metric.L2 else np.sqrt(squares * norms)
        lower_bounds, upper_bounds = last - _NOISE * scale, last + _NOISE * scale
        uncertain_queries = np.flatnonzero(
            (neighbors.distances[:, k] <= upper_bounds) & np.isfinite(neighbors.distances[:, k])
        )
        for query in uncertain_queries:
            distances, rows = neighbors.distances[query], neighbors.ids[query]
            certain_count = int(np.searchsorted(distances, lower_bounds[query]))
            tied_rows = rows[certain_count : np.searchsorted(distances, upper_bounds[query], side="right")]
            if distances[-1] <= upper_bounds[query]:  # there may be more rows that are as near
                other_rows = self._find_rows_within(
                    centered[query], squares[query], upper_bounds[query], slices
                )
                tied_rows = np.setdiff1d(np.append(tied_rows, other_rows), rows[:certain_count])
            exact_distances = self._compute_exact_distances(queries[query], centered[query], tied_rows)
            order = np.lexsort((self._ids[tied_rows], exact_distances))[: k - certain_count]
            rows[certain_count:k], distances[certain_count:k] = tied_rows[order], exact_distances[order]
        selected = Neighbors(neighbors.ids[:, :k], np.ascontiguousarray(neighbors.distances[:, :k]))
        selected.sort_rows(uncertain_queries)
        return selected

    def _find_rows_within(
        self, query: Keys, squared_norm: np.float32, max_distance: np.float32, slices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the numbers of the matrix rows that are at most `max_distance` from a query.

        Args:
            query: query vector minus the center (the vector that is subtracted from all keys), shape (dim,).
            squared_norm: squared norm of `query`; used for L2 only.
            max_distance: largest distance in the index's metric (L2: the squared distance). The caller has
                added a margin for rounding errors.
            slices: ranges [start, stop) of the rows to compare, shape (s, 2).

        Returns:
            Row numbers, int64, shape (n,), not sorted.
        """
        row_parts = []
        for rows in self._split_slices(slices):
            distances = -(self._matrix[rows] @ query)
            if self._metric is Metric.L2:
                distances = 2 * distances + self._norms[rows] + squared_norm
            near_rows = np.flatnonzero(distances <= max_distance)
            row_parts.append(near_rows + rows.start if isinstance(rows, slice) else rows[near_rows])
        return np.concatenate(row_parts)

    def _keep_span(self, span: _Span, segment: Segment) -> None:
        """Keep the matrix rows of a segment's live records, and drop the rows of records deleted since.

        The rows move directly behind the rows that were kept before. If any row is kept, the list `_spans`
        gets an entry with the new place of the rows.

        Args:
            span: the rows of the matrix that hold the segment's records so far.
            segment: the newest version of the segment, in which more records may be deleted.
        """
        start = self._rows
        if segment.dead == span.dead:
            self._move_rows(IdRanges([(span.start, span.stop)]))
        else:
            former_rows = (IdRanges([(0, segment.rows)]) - span.dead).ids()
            alive = np.flatnonzero(~segment.dead.contains(former_rows))
            self._move_rows(IdRanges.from_ids(alive + span.start))
        if self._rows > start:
            self._spans.append(_Span(segment.columns, segment.dead, start, self._rows))

    def _move_rows(self, rows: IdRanges) -> None:
        """Move rows of the matrix to the end of the rows in use, and count them in `_rows`.

        The first `_rows` rows are in use. Rows are moved in chunks, because source and target may overlap.

        Args:
            rows: row numbers as ranges, ascending, none below `_rows`.
        """
        for first, last in rows:
            if first == self._rows:
                self._rows = last
                continue
            for start in range(first, last, _CHUNK):
                stop = min(start + _CHUNK, last)
                target = slice(self._rows, self._rows + stop - start)
                for array in (self._matrix, self._norms, self._ids):
                    array[target] = array[start:stop]
                self._rows = target.stop

    def _grow_arrays(self, rows: int) -> None:
        """Make room in the matrix for `rows` rows in all.

        If the arrays of keys, norms and ids are too small, they are replaced by larger arrays with the same
        content.
        """
        if rows > len(self._matrix):
            capacity = rows if self._rows == 0 else max(rows, len(self._matrix) * 5 // 4)
            for name in ("_matrix", "_norms", "_ids"):
                old_array = getattr(self, name)
                new_array = np.empty((capacity, *old_array.shape[1:]), old_array.dtype)
                new_array[: self._rows] = old_array[: self._rows]
                setattr(self, name, new_array)

    def _append_segment(self, segment: Segment) -> None:
        """Append the centered keys, norms and ids of a segment's live records to the matrix.

        Live records are the records that are neither deleted nor replaced. The caller has made room for them.

        Args:
            segment: immutable set of records.
        """
        ids, keys = segment.columns.ids, segment.columns.keys
        start = self._rows
        for first, last in segment.live_rows():
            for chunk_start in range(first, last, _CHUNK):
                rows = slice(chunk_start, min(chunk_start + _CHUNK, last))
                target = slice(self._rows, self._rows + rows.stop - rows.start)
                added = self._matrix[target]
                np.subtract(keys[rows], self._center, out=added)
                np.einsum("nd,nd->n", added, added, out=self._norms[target])
                self._ids[target] = ids[rows]
                self._rows = target.stop
        self._spans.append(_Span(segment.columns, segment.dead, start, self._rows))


def compare_rows(
    segment: Segment,
    rows: IdRanges,
    queries: Keys,
    k: int,
    metric: Metric,
    nearest: NearestRows = find_nearest_rows,
) -> Neighbors:
    """Find for each query the k nearest of some records of a segment, by comparing with each record.

    Args:
        segment: an immutable set of records on disk or in memory; its records are read in chunks.
        rows: numbers of the records to compare with, as ranges; 0 is the segment's first record.
        queries: query vectors, float32, shape (q, dim).
        k: number of neighbors, >= 1.
        metric: metric of the distances.
        nearest: function that finds the nearest rows of a matrix.

    Returns:
        Record ids and distances, each of shape (q, k), nearest first. If there are fewer than k records to
        compare with, each missing neighbor has id -1 and distance +inf.
    """
    numbers = rows.ids()
    neighbors = Neighbors.all_missing(len(queries), k)
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        ids, keys = segment.columns.ids[chunk], segment.columns.keys_at(chunk)
        index = ExactIndex(queries.shape[1], metric, nearest)
        index.update([Segment.from_arrays(segment.group, ids, keys)])
        neighbors = merge_neighbors([neighbors, index.search(queries, k, None)], len(queries), k)
    return neighbors


def _compute_center(segments: Sequence[Segment]) -> Keys:
    """Estimate the mean key of several segments from at most 4096 keys of the largest segment.

    The mean is rounded to half precision. So a key that is stored in half precision minus the mean has no
    rounding error in float32.

    Args:
        segments: one or more sets of records of one group.

    Returns:
        The mean key, float32, shape (dim,).
    """
    largest = max(segments, key=lambda segment: segment.live)
    rows = np.unique(np.linspace(0, largest.rows - 1, 4096).astype(np.int64))
    mean = largest.columns.keys_at(rows).astype(np.float32).mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float16).astype(np.float32)
    center: Keys = np.where(np.isfinite(rounded), rounded, mean)
    return center
