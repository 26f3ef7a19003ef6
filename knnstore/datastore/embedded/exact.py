"""Exact search: one matrix in memory, compared by matrix multiplication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.distances import BLOCK_VALUES, nearest_rows, paired
from knnstore.datastore.embedded.segment import Columns, Segment
from knnstore.datastore.neighbors import Neighbors, merge
from knnstore.datastore.ranges import IdRanges

_CHUNK = 1 << 16  # rows converted, moved or gathered at a time
_LONG_SLICE = 4096  # rows; slices of a filter from this length on are searched where they lie

# Matrix multiplication finds |q - x|² as q² - 2qx + x², which rounds at the scale of q² + x². Where the
# distance is below this share of it, more than about 1e-5 of the distance may be lost (with the largest
# error seen, 0.8e-6 of q² + x²), so it is computed again from the difference.
_CANCELLING = 2.0**-4

NearestRows = Callable[[Keys, Keys, int, Metric, Distances], Neighbors]
"""Finds the k nearest rows of a matrix, as `nearest_rows` does."""


@dataclass(slots=True)
class _Span:
    """Where the live rows of a segment are in the matrix."""

    columns: Columns
    dead: IdRanges
    start: int
    stop: int


class ExactIndex:
    """The live rows of some segments of one group as a float32 matrix.

    Nothing is built before the first `update`. For L2 the keys are kept relative to about their
    mean, which changes no distance and makes the rounding errors of the multiplication smaller.
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

    def update(self, segments: Sequence[Segment]) -> None:
        """Hold the live rows of exactly these segments: drop what died, add what is new.

        Must not run beside a search. After an error it holds nothing.
        """
        try:
            self._update(segments)
        except BaseException:
            self._spans, self._rows = [], 0
            raise

    def count(self, ids: IdRanges | None) -> int:
        """How many rows there are, of all or of those with some ids."""
        return self._rows if ids is None else int(np.diff(self._slices(ids), axis=1).sum())

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest rows of each query, of all or of those with some ids."""
        reachable = min(k, self._rows)
        if reachable == 0 or len(queries) == 0:
            return Neighbors.nothing(len(queries), k)
        centered = queries - self._center
        if ids is None:
            found = self._search_rows(centered, slice(0, self._rows), reachable)
        else:
            found = self._nearest_among(centered, reachable, self._slices(ids))
        if self._metric is Metric.L2:
            self._recompute(found, centered)
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
            for segment in wanted.values():
                self._add(segment)

    def _search_rows(self, queries: Keys, rows: slice | NDArray[np.int64], k: int) -> Neighbors:
        return self._nearest(queries, self._matrix[rows], k, self._metric, self._norms[rows])

    def _nearest_among(self, queries: Keys, k: int, slices: NDArray[np.int64]) -> Neighbors:
        """Search some slices of rows: long ones in place, short ones gathered."""
        lengths = slices[:, 1] - slices[:, 0]
        parts: list[Neighbors] = []
        for start, stop in slices[lengths >= _LONG_SLICE].tolist():
            part = self._search_rows(queries, slice(start, stop), k)
            part.ids[part.ids >= 0] += start
            parts = [merge([*parts, part], len(queries), k)]
        rows = IdRanges(slices[lengths < _LONG_SLICE]).ids()
        for at in range(0, len(rows), _CHUNK):
            some = rows[at : at + _CHUNK]
            part = self._search_rows(queries, some, k).named(some)
            parts = [merge([*parts, part], len(queries), k)]
        return merge(parts, len(queries), k)

    def _slices(self, ids: IdRanges) -> NDArray[np.int64]:
        """The rows of the matrix with some ids, as slices, shape (s, 2)."""
        found = [ids.rows_in(self._ids[span.start : span.stop]) + span.start for span in self._spans]
        return np.concatenate([np.empty((0, 2), np.int64), *found])

    def _recompute(self, found: Neighbors, queries: Keys) -> None:
        """Compute those distances from the difference that cancellation made inexact."""
        scale = self._norms.take(found.ids, mode="clip")  # what is missing is at infinity, not below any
        scale += np.einsum("qd,qd->q", queries, queries)[:, None]
        scale *= _CANCELLING
        inexact = found.distances < scale
        of_query, at = np.divmod(np.flatnonzero(inexact), inexact.shape[1])
        step = max(1, BLOCK_VALUES // self._dim)
        for start in range(0, len(at), step):
            some = of_query[start : start + step], at[start : start + step]
            found.distances[some] = paired(queries[some[0]], self._matrix[found.ids[some]], Metric.L2)
        found.sort_rows(np.flatnonzero(inexact.any(axis=1)))

    def _keep(self, span: _Span, segment: Segment) -> None:
        """Move the rows of a span that are still live to the end of what was kept."""
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
        """Move rows down, in pieces, so that overlapping ones need no copy of the whole."""
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
    """Find the k nearest of some rows of a segment by comparing with each; found.ids are record ids.

    Args:
        segment: is read in pieces.
        rows: row numbers.
        queries: float32, shape (q, dim).
        k: how many, at least 1.
        metric: how distances are measured.
        nearest: an engine's own search of a matrix.
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
    """About the mean key, rounded so that subtracting it from keys in half precision is exact."""
    largest = max(segments, key=lambda segment: segment.live)
    rows = np.unique(np.linspace(0, largest.rows - 1, 4096).astype(np.int64))
    mean = largest.columns.keys_at(rows).astype(np.float32).mean(axis=0)
    with np.errstate(over="ignore"):
        rounded = mean.astype(np.float16).astype(np.float32)
    center: Keys = np.where(np.isfinite(rounded), rounded, mean)
    return center
