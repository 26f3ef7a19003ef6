"""The cells of a group, and visits to the nearest cells of several groups."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import CodecFile, IdRanges, Keys, Metric, Neighbors, Segment, StoredFile, Visit
from knnstore_cells.index import SegmentCells
from knnstore_cells.kept import Cell, KeptCells
from knnstore_cells.partition import arranged, center_distances, fit_centers
from knnstore_cells.policy import Policy

_SMALL = 4096  # records; where no more match, all are compared
_VALUES = 1 << 24  # distances that are in memory at once


class _Part(NamedTuple):
    """The cells of one segment."""

    segment: Segment
    cells: SegmentCells
    alive: NDArray[np.bool_] | None
    """Which rows are live, shape (rows,); None where all are."""


class CellGroup:
    """The records of one group.

    Args:
        dim: number of components of a key.
        metric: how distances are measured.
        policy: how many cells there are, and how many a search visits.
        opens: the index of a segment, if it has one that can be used.
        kept: where cells are kept between searches.
    """

    def __init__(
        self,
        dim: int,
        metric: Metric,
        policy: Policy,
        opens: Callable[[Segment], SegmentCells | None],
        kept: KeptCells,
    ) -> None:
        self._dim = dim
        self.metric = metric
        self._policy = policy
        self._opens = opens
        self._kept = kept
        self._version = object()
        self._segments: Sequence[Segment] = ()
        self._parts: list[_Part] = []
        self._matching: tuple[IdRanges | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
        self._codec_file: CodecFile | None = None
        self._rotation: Tensor | None = None
        self.rows = 0
        """How many are live."""
        self.centers = torch.empty(0, dim)
        """Of the cells, float32, shape (cells, dim)."""
        self.origins = self.centers
        """The centers, turned."""
        self.counts = np.zeros(0, np.int64)
        """Live records of each cell, shape (cells,)."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search.

        Raises:
            FileNotFoundError: the file of an index is gone, the first time that it is.
        """
        self._segments = ()
        known = {_name(part.segment): part.cells for part in self._parts}
        self.rows = sum(segment.live for segment in segments)
        found = [known.get(_name(segment)) or self._opens(segment) for segment in segments]
        centers = self._common_centers(segments, found)
        self._parts = []
        for segment, cells in zip(segments, found, strict=True):
            fits = cells is not None and np.array_equal(cells.centers, centers)
            own = cells if cells is not None and fits else arranged(segment, centers)
            alive = _mask(segment.live_rows(), segment.rows) if segment.dead else None
            self._parts.append(_Part(segment, own, alive))
        self._set_rotation(segments)
        self.centers = torch.from_numpy(centers)
        self.origins = self.turned(self.centers)
        self.counts = self._count(lambda part: part.alive)
        self._matching = (None, self.counts)
        self._version = object()
        self._segments = segments

    def turned(self, vectors: Tensor) -> Tensor:
        """Vectors, shape (n, dim), in the space of the cells' keys: distances are the same there."""
        return vectors if self._rotation is None else vectors @ self._rotation

    def matching(self, ids: IdRanges | None) -> NDArray[np.int64]:
        """How many live records of each cell have some ids, shape (cells,)."""
        if ids is None:
            return self.counts
        last, counts = self._matching
        if last is not ids:
            counts = self._count(lambda part: _mask(part.segment.live_rows(ids), part.segment.rows))
            self._matching = (ids, counts)
        return counts

    def cell(self, number: int) -> Cell:
        """The live records of a cell."""
        return self._kept.get(self._version, number, self._read)

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find about the k nearest records of each query, and k always where there are k."""
        counts = self.matching(ids)
        total, cells = int(counts.sum()), int((counts > 0).sum())
        if total == 0 or not len(queries):
            return Neighbors.nothing(len(queries), k)
        probes = cells if total <= max(_SMALL, 4 * k) else self._policy.probes_for(k, cells, total)
        found = self._nearest(queries, k, ids, probes)
        short = np.flatnonzero(found.ids[:, min(k, total) - 1] < 0)
        if len(short):  # the cells visited did not hold enough
            found.put(short, self._nearest(queries[short], k, ids, cells))
        return found

    def _nearest(self, queries: Keys, k: int, ids: IdRanges | None, probes: int) -> Neighbors:
        largest = np.sort(self.matching(ids))[-probes:].sum()
        step = max(1, _VALUES // int(largest))
        parts = []
        for start in range(0, len(queries), step):
            some = queries[start : start + step]
            visits = visit([self], some, probes, ids)
            parts.append(Neighbors.visited(visits, len(some)).nearest(k))
        return Neighbors.joined(parts, axis=0)

    def _common_centers(self, segments: Sequence[Segment], found: Sequence[SegmentCells | None]) -> Keys:
        """The centers of the largest segment that has some; else new ones, as where one cell was enough."""
        wanted = self._policy.cells_for(self.rows)
        known = [
            (segment.rows, cells.centers)
            for segment, cells in zip(segments, found, strict=True)
            if cells and (len(cells.centers) > 1 or wanted == 1)
        ]
        return max(known, key=lambda one: one[0])[1] if known else fit_centers(list(segments), wanted)

    def _set_rotation(self, segments: Sequence[Segment]) -> None:
        """Take the space of the codec by which most is coded."""
        coded = [segment for segment in segments if segment.columns.codec_file]
        self._codec_file = max(coded, key=lambda one: one.rows).columns.codec_file if coded else None
        rotation = self._codec_file.codec.rotation if self._codec_file else None
        self._rotation = None if rotation is None else torch.from_numpy(rotation)

    def _count(self, rows: Callable[[_Part], NDArray[np.bool_] | None]) -> NDArray[np.int64]:
        counts = np.zeros(len(self.centers), np.int64)
        for part in self._parts:
            chosen = rows(part)
            if chosen is None:
                counts += np.diff(part.cells.starts)
            else:
                counts += np.bincount(part.cells.cell_of_rows()[chosen], minlength=len(counts))
        return counts

    def _read(self, number: int) -> Cell:
        """Read a cell from its segments."""
        ids, keys = [], []
        for segment, cells, alive in self._parts:
            rows = cells.rows[cells.starts[number] : cells.starts[number + 1]].astype(np.int64)
            if alive is not None:
                rows = rows[alive[rows]]
            if len(rows):
                ids.append(segment.columns.ids_at(rows))
                keys.append(self._keys_of(segment, rows))
        read = torch.cat([self.origins[:0], *keys])
        if self.metric is Metric.L2:
            read -= self.origins[number]
        return Cell(np.concatenate([np.empty(0, np.int64), *ids]), read, (read * read).sum(1))

    def _keys_of(self, segment: Segment, rows: NDArray[np.int64]) -> Tensor:
        """The keys of some rows, turned."""
        columns, file = segment.columns, self._codec_file
        if file is not None and columns.codec_file is file:
            return torch.from_numpy(file.codec.turned(columns.codes_at(rows, file)))
        return self.turned(torch.from_numpy(columns.keys_at(rows).astype(np.float32)))


def _name(segment: Segment) -> tuple[int, StoredFile | None]:
    """What stays the same as long as a segment's rows and its index do."""
    return id(segment.columns), segment.index.file if segment.index else None


def _mask(rows: IdRanges, count: int) -> NDArray[np.bool_]:
    """Which of so many rows are among some."""
    mask = np.zeros(count, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return mask


def visit(groups: Sequence[CellGroup], queries: Keys, probes: int, ids: IdRanges | None) -> list[Visit]:
    """Let each query visit its nearest cells of some groups together; see `SupportsCells.visit`."""
    cells = [np.flatnonzero(group.matching(ids)) for group in groups]
    owners = np.repeat(np.arange(len(groups)), [len(numbers) for numbers in cells])
    if not len(owners) or not len(queries):
        return []
    asked, metric = torch.from_numpy(queries), groups[0].metric
    centers = torch.cat([group.centers[numbers] for group, numbers in zip(groups, cells, strict=True)])
    nearest = _nearest_cells(asked, centers, min(probes, len(owners)), metric).flatten()
    order = nearest.argsort(stable=True)
    visitors = order.div(len(nearest) // len(queries), rounding_mode="floor")
    visited, counts = torch.unique_consecutive(nearest[order], return_counts=True)
    numbers, turned = np.concatenate(cells), [group.turned(asked) for group in groups]
    visits = []
    for at, of_cell in zip(visited.tolist(), torch.split(visitors, counts.tolist()), strict=True):
        group, number = groups[owners[at]], int(numbers[at])
        found, keys, norms = _matching(group.cell(number), ids)
        distances = _measure(turned[owners[at]][of_cell], keys, norms, group.origins[number], metric)
        visits.append(Visit(of_cell.numpy(), found, distances.numpy()))
    return visits


def _matching(cell: Cell, ids: IdRanges | None) -> Cell:
    """The records of a cell that have some ids."""
    if ids is None:
        return cell
    chosen = ids.contains(cell.ids)
    if chosen.all():
        return cell
    rows = torch.from_numpy(np.flatnonzero(chosen))
    return Cell(cell.ids[chosen], cell.keys[rows], cell.norms[rows])


def _nearest_cells(queries: Tensor, centers: Tensor, probes: int, metric: Metric) -> Tensor:
    """The numbers of the nearest cells, shape (q, probes)."""
    if probes == len(centers):
        return torch.arange(probes).expand(len(queries), -1)
    step = max(1, _VALUES // len(centers))
    return torch.cat(
        [
            center_distances(some, centers, metric).topk(probes, largest=False, sorted=False).indices
            for some in torch.split(queries, step)
        ]
    )


def _measure(queries: Tensor, keys: Tensor, norms: Tensor, center: Tensor, metric: Metric) -> Tensor:
    """Measure each query against each key of a cell, shape (m, r)."""
    if metric is Metric.IP:
        return -(queries @ keys.T)
    queries = queries - center
    distances = torch.addmm(norms, queries, keys.T, alpha=-2)
    distances += (queries * queries).sum(1)[:, None]
    return distances.clamp_(min=0)
