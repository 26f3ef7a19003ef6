"""Exact search in a matrix in memory, by matrix multiplication."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.distances import BLOCK_VALUES, nearest_rows, paired
from knnstore.datastore.embedded.segment import Columns, Segment
from knnstore.datastore.neighbors import Neighbors, merge
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
"""Finds the k nearest rows of a matrix, as `nearest_rows` does."""


@dataclass(slots=True)
class _Span:
    """The rows of the matrix that hold the live rows of a segment."""

    columns: Columns
    dead: IdRanges
    start: int
    stop: int


class ExactIndex:
    """The live rows of some segments of one group as a float32 matrix.

    The matrix is built by the first `update`. For L2 about the mean key is subtracted from all keys:
    distances stay the same, and the rounding errors of the multiplication become smaller.
    """

    def __init__(self, dim: int, metric: Metric, nearest: NearestRows = nearest_rows) -> None:
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
        """Set the segments to search: drop rows that are dead now, and add new rows.

        No search may run meanwhile. After an error the index is empty.
        """
        try:
            self._update(segments)
        except BaseException:
            self._spans, self._rows = [], 0
            raise

    def count(self, ids: IdRanges | None) -> int:
        """Return the number of rows, of all records or of those with `ids`."""
        return self._rows if ids is None else int(np.diff(self._slices(ids), axis=1).sum())

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query, among all or those with `ids`.

        Among equally near records, those with the smallest ids are returned.
        """
        reachable = min(k + _SPARE, self._rows)
        if reachable == 0 or len(queries) == 0:
            return Neighbors.nothing(len(queries), k)
        centered = queries - self._center
        slices = np.array([[0, self._rows]]) if ids is None else self._slices(ids)
        found = self._nearest_among(centered, reachable, slices)
        if self._metric is Metric.L2:
            self._recompute(found, queries, centered)
        if reachable > k:
            found = self._cut(found, k, queries, centered, slices)
        return found.named(self._ids).padded(k)

    def _update(self, segments: Sequence[Segment]) -> None:
        wanted = {id(segment.columns): segment for segment in segments}
        spans, self._spans = self._spans, []
        self._rows = 0
        for span in spans:
            segment = wanted.pop(id(span.columns), None)
            if segment is not None:
                self._keep(span, segment)
        if wanted:
            self._reserve(self._rows + sum(segment.live for segment in wanted.values()))
            if self._rows == 0 and self._metric is Metric.L2:
                self._center = _center(list(wanted.values()))
            self._in_half &= all(segment.columns.dtype == np.float16 for segment in wanted.values())
            for segment in wanted.values():
                self._add(segment)

    def _search_rows(self, queries: Keys, rows: slice | NDArray[np.int64], k: int) -> Neighbors:
        return self._nearest(queries, self._matrix[rows], k, self._metric, self._norms[rows])

    def _nearest_among(self, queries: Keys, k: int, slices: NDArray[np.int64]) -> Neighbors:
        """Find the k nearest rows among some slices of rows, shape (s, 2)."""
        parts: list[Neighbors] = []
        for rows in self._pieces(slices):
            part = self._search_rows(queries, rows, k)
            if isinstance(rows, slice):
                part.ids[part.ids >= 0] += rows.start
            else:
                part = part.named(rows)
            parts = [merge([*parts, part], len(queries), k)]
        return merge(parts, len(queries), k)

    @staticmethod
    def _pieces(slices: NDArray[np.int64]) -> Iterator[slice | NDArray[np.int64]]:
        """Yield long slices of rows, to be read in place, and arrays of the rows of short ones."""
        lengths = slices[:, 1] - slices[:, 0]
        long = lengths >= (_LONG_SLICE if len(slices) > 1 else 1)
        yield from (slice(start, stop) for start, stop in slices[long].tolist())
        rows = IdRanges(slices[~long]).ids()
        yield from (rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK))

    def _slices(self, ids: IdRanges) -> NDArray[np.int64]:
        """Return the rows of the matrix with `ids` as slices, shape (s, 2)."""
        found = [ids.rows_in(self._ids[span.start : span.stop]) + span.start for span in self._spans]
        return np.concatenate([np.empty((0, 2), np.int64), *found])

    def _recompute(self, found: Neighbors, queries: Keys, centered: Keys) -> None:
        """Compute inexact distances again, from the difference of the vectors."""
        scale = self._norms.take(
            found.ids, mode="clip"
        )  # missing neighbors are at infinity, so they are never inexact
        scale += np.einsum("qd,qd->q", centered, centered)[:, None]
        scale *= _CANCELLING
        inexact = found.distances < scale
        of_query, at = np.divmod(np.flatnonzero(inexact), inexact.shape[1])
        step = max(1, BLOCK_VALUES // self._dim)
        for start in range(0, len(at), step):
            some = of_query[start : start + step], at[start : start + step]
            found.distances[some] = self._measure(queries[some[0]], centered[some[0]], found.ids[some])
        found.sort_rows(np.flatnonzero(inexact.any(axis=1)))

    def _measure(self, queries: Keys, centered: Keys, rows: NDArray[np.int64]) -> Distances:
        """Return the distance of each query from its row. Equal keys get equal distances, to the last bit.

        If all keys are in half precision, this holds between groups too: subtracting the center was exact.
        """
        if self._in_half:
            return paired(queries, self._matrix[rows] + self._center, self._metric)
        return paired(centered, self._matrix[rows], self._metric)

    def _cut(
        self, found: Neighbors, k: int, queries: Keys, centered: Keys, slices: NDArray[np.int64]
    ) -> Neighbors:
        """Return the k nearest of more than k; among equal distances the smallest ids are chosen."""
        last = found.distances[:, k - 1]
        squares = np.einsum("qd,qd->q", centered, centered)
        norms = self._norms.take(found.ids[:, k - 1], mode="clip")
        scale = squares + norms if self._metric is Metric.L2 else np.sqrt(squares * norms)
        least, most = last - _NOISE * scale, last + _NOISE * scale
        unsure = np.flatnonzero((found.distances[:, k] <= most) & np.isfinite(found.distances[:, k]))
        for query in unsure:
            distances, rows = found.distances[query], found.ids[query]
            sure = int(np.searchsorted(distances, least[query]))
            as_near = rows[sure : np.searchsorted(distances, most[query], side="right")]
            if distances[-1] <= most[query]:  # there may be more rows that are as near
                others = self._rows_within(centered[query], squares[query], most[query], slices)
                as_near = np.setdiff1d(np.append(as_near, others), rows[:sure])
            measured = self._measure(queries[query], centered[query], as_near)
            chosen = np.lexsort((self._ids[as_near], measured))[: k - sure]
            rows[sure:k], distances[sure:k] = as_near[chosen], measured[chosen]
        cut = Neighbors(found.ids[:, :k], np.ascontiguousarray(found.distances[:, :k]))
        cut.sort_rows(unsure)
        return cut

    def _rows_within(
        self, query: Keys, square: np.float32, most: np.float32, slices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows in slices whose distance from a centered query is at most `most`.

        Args:
            query: shape (dim,).
            square: the query's squared norm.
            most: the largest distance; the caller adds a margin for rounding.
            slices: shape (s, 2).
        """
        within = []
        for rows in self._pieces(slices):
            distances = -(self._matrix[rows] @ query)
            if self._metric is Metric.L2:
                distances = 2 * distances + self._norms[rows] + square
            near = np.flatnonzero(distances <= most)
            within.append(near + rows.start if isinstance(rows, slice) else rows[near])
        return np.concatenate(within)

    def _keep(self, span: _Span, segment: Segment) -> None:
        """Move the rows of a span that are still live behind the rows that were kept before."""
        start = self._rows
        if segment.dead == span.dead:
            self._move(IdRanges([(span.start, span.stop)]))
        else:
            before = (IdRanges([(0, segment.rows)]) - span.dead).ids()
            alive = np.flatnonzero(~segment.dead.contains(before))
            self._move(IdRanges.of_ids(alive + span.start))
        if self._rows > start:
            self._spans.append(_Span(segment.columns, segment.dead, start, self._rows))

    def _move(self, rows: IdRanges) -> None:
        """Move rows down, in pieces, because source and target may overlap."""
        for first, last in rows:
            if first == self._rows:
                self._rows = last
                continue
            for start in range(first, last, _CHUNK):
                stop = min(start + _CHUNK, last)
                to = slice(self._rows, self._rows + stop - start)
                for array in (self._matrix, self._norms, self._ids):
                    array[to] = array[start:stop]
                self._rows = to.stop

    def _reserve(self, rows: int) -> None:
        if rows > len(self._matrix):
            capacity = rows if self._rows == 0 else max(rows, len(self._matrix) * 5 // 4)
            for name in ("_matrix", "_norms", "_ids"):
                former = getattr(self, name)
                larger = np.empty((capacity, *former.shape[1:]), former.dtype)
                larger[: self._rows] = former[: self._rows]
                setattr(self, name, larger)

    def _add(self, segment: Segment) -> None:
        ids, keys = segment.columns.ids, segment.columns.keys
        start = self._rows
        for first, last in segment.live_rows():
            for at in range(first, last, _CHUNK):
                rows = slice(at, min(at + _CHUNK, last))
                to = slice(self._rows, self._rows + rows.stop - rows.start)
                added = self._matrix[to]
                np.subtract(keys[rows], self._center, out=added)
                np.einsum("nd,nd->n", added, added, out=self._norms[to])
                self._ids[to] = ids[rows]
                self._rows = to.stop
        self._spans.append(_Span(segment.columns, segment.dead, start, self._rows))


def compare_rows(
    segment: Segment,
    rows: IdRanges,
    queries: Keys,
    k: int,
    metric: Metric,
    nearest: NearestRows = nearest_rows,
) -> Neighbors:
    """Find the k nearest of some rows of a segment for each query, by comparing with every row.

    Args:
        segment: the segment; it is read in pieces.
        rows: row numbers.
        queries: float32, shape (q, dim).
        k: number of neighbors, >= 1.
        metric: the distance.
        nearest: an engine's own search of a matrix.

    Returns:
        Neighbors with record ids.
    """
    numbers = rows.ids()
    found = Neighbors.nothing(len(queries), k)
    for start in range(0, len(numbers), _CHUNK):
        some = numbers[start : start + _CHUNK]
        ids, keys = segment.columns.ids[some], segment.columns.keys_at(some)
        piece = ExactIndex(queries.shape[1], metric, nearest)
        piece.update([Segment.in_memory(segment.group, ids, keys)])
        found = merge([found, piece.search(queries, k, None)], len(queries), k)
    return found


def _center(segments: Sequence[Segment]) -> Keys:
    """Return about the mean key, rounded so that subtracting it from keys in half precision is exact."""
    largest = max(segments, key=lambda segment: segment.live)
    rows = np.unique(np.linspace(0, largest.rows - 1, 4096).astype(np.int64))
    mean = largest.columns.keys_at(rows).astype(np.float32).mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float16).astype(np.float32)
    center: Keys = np.where(np.isfinite(rounded), rounded, mean)
    return center
