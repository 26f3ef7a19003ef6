"""The search of one group in cells."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import (
    CodecFile,
    IdRanges,
    Keys,
    Metric,
    Neighbors,
    ProductCodec,
    Segment,
    StoredFile,
    Visits,
)
from knnstore_cells.device import DeviceKeys, Visitors
from knnstore_cells.index import ArrangedSegment, SegmentCells
from knnstore_cells.kept import Cell, KeptCells
from knnstore_cells.partition import NearestCenter, arranged, fit_centers
from knnstore_cells.policy import Policy
from knnstore_cells.scanning import CodedCell, CodeScanner, can_scan
from knnstore_cells.visiting import DISTANCES_AT_ONCE, Cells, visit

_SMALL = 4096  # with at most so many matching records, a query is compared with all of them
_MOST_GROWTH = 4  # new centers are fitted if the number of cells should change by more than this factor


class _Part(NamedTuple):
    """The cells of one segment."""

    segment: Segment
    cells: SegmentCells
    alive: NDArray[np.bool_] | None
    """True for a live row, shape (rows,); None if all rows are live."""

    on_device: DeviceKeys | None
    """Its keys on the device; None without a device."""


class CellGroup:
    """The search of one group, whose records lie in cells.

    Args:
        dim: number of components of a key.
        metric: metric of the distances.
        policy: numbers of cells and probes.
        opens: opens the index of a segment; returns None if it has none that can be used.
        count_replacements: returns how many additions have replaced records so far. While this number stays
            the same, a record that was in a cell at the last update has the same key now.
        kept: cache of cells; not used with a device.
        device: device that holds all keys; None reads cells one by one.
    """

    def __init__(
        self,
        dim: int,
        metric: Metric,
        policy: Policy,
        opens: Callable[[Segment], SegmentCells | None],
        count_replacements: Callable[[], int],
        kept: KeptCells,
        device: torch.device | None = None,
    ) -> None:
        self._dim = dim
        self.metric = metric
        self._policy = policy
        self._opens = opens
        self._count_replacements = count_replacements
        self._replacements = 0
        self._nearest = NearestCenter(torch.empty(0, dim))
        self._kept = kept
        self.device = device
        self._version = object()
        self._segments: Sequence[Segment] = ()
        self._parts: list[_Part] = []
        self._matching: tuple[IdRanges | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
        self._with_records: tuple[NDArray[np.int64], Cells] | None = None
        self._codec_file: CodecFile | None = None
        self._rotation: Tensor | None = None
        self._scanner: tuple[object, CodeScanner | None] = (None, None)
        self.room = kept.size
        """Maximum number of bytes of decoded keys in memory, of all groups together."""
        self.rows = 0
        """Number of live records."""
        self.centers = torch.empty(0, dim)
        """Centers of the cells, float32, shape (cells, dim)."""
        self.origins = self.centers
        """The centers, rotated by the codec."""
        self.middle = self._middle()
        """Origin of the keys in `Cell`: their mean, rotated. With it distances lose the fewest digits."""
        self.counts = np.zeros(0, np.int64)
        """Number of live records of each cell, shape (cells,)."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Check whether these are the segments of the last `update`, by identity."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments to search. No search may run meanwhile.

        Only records that are new since the last update are compared with the centers. Records that were
        moved to another segment, as from memory to disk, stay in their cells.

        Raises:
            FileNotFoundError: the file of an index is missing. Raised once for each file.
        """
        self._segments = ()
        moved = self._moved_since_update(segments)
        known = {_name(part.segment): part for part in self._parts}
        self.rows = sum(segment.live for segment in segments)
        former = [known.get(_name(segment)) for segment in segments]
        found = [part.cells if part else self._opens(one) for part, one in zip(former, segments, strict=True)]
        nearest = self._nearest_center(self._common_centers(segments, found))
        centers = nearest.centers.numpy()
        codec_file = self._codec_file
        self._set_rotation(segments)
        # Stored by columns: one query finds the nearest of 16,384 centers in a third of the time.
        self.centers = nearest.centers.to(self.device).T.contiguous().T
        self.origins = self.turned(self.centers)
        self.middle = self._middle()
        self._parts = []
        for segment, cells, part in zip(segments, found, former, strict=True):
            fits = cells is not None and np.array_equal(cells.centers, centers)
            own = cells if cells is not None and fits else arranged(segment, nearest, moved)
            alive = _mask(segment.live_rows(), segment.rows) if segment.dead else None
            same = part is not None and part.cells is own and codec_file is self._codec_file
            on_device = part.on_device if part is not None and same else None
            if self.device is not None and on_device is None:
                on_device = DeviceKeys(segment, own, self._codec_file, self.turned, self.origins)
            self._parts.append(_Part(segment, own, alive, on_device))
        self.counts = self._count(lambda part: part.alive)
        self._matching = (None, self.counts)
        self._version = object()
        self._segments = segments

    def _moved_since_update(self, segments: Sequence[Segment]) -> list[ArrangedSegment]:
        """Return the former segments that are not among `segments`; none if records were replaced."""
        former, self._replacements = self._replacements, self._count_replacements()
        if self._replacements != former:
            return []
        names = {_name(segment) for segment in segments}
        return [
            ArrangedSegment(part.segment, part.cells)
            for part in self._parts
            if _name(part.segment) not in names
        ]

    def turned(self, vectors: Tensor) -> Tensor:
        """Rotate vectors, shape (n, dim), as the codec rotates keys. Distances stay the same."""
        return vectors if self._rotation is None else vectors @ self._rotation

    def _middle(self) -> Tensor:
        """Compute the origin of the keys: the mean center for L2, else 0."""
        some = self.metric is Metric.L2 and len(self.origins)
        return self.origins.mean(0) if some else self.origins.new_zeros(self.origins.shape[1])

    def matching(self, ids: IdRanges | None) -> NDArray[np.int64]:
        """Count the live records with these ids in each cell, shape (cells,); None for all ids."""
        if ids is None:
            return self.counts
        last, counts = self._matching
        if last is not ids:
            counts = self._count(lambda part: _mask(part.segment.live_rows(ids), part.segment.rows))
            self._matching = (ids, counts)
        return counts

    def cells_with(self, ids: IdRanges | None) -> Cells:
        """Return the cells that have live records with these ids; None for all ids."""
        counts, last = self.matching(ids), self._with_records
        if last is None or last[0] is not counts:
            last = self._with_records = counts, Cells.of(self.centers, counts)
        return last[1]

    def cell(self, number: int) -> Cell:
        """Return the live records of a cell."""
        return self._kept.get(self._version, number, self._read)

    def scanner(self) -> CodeScanner | None:
        """Return the scanner of the codes; None if some keys are not codes that it can read."""
        version, scanner = self._scanner
        if version is not self._version:
            file, scanner = self._codec_file, None
            all_coded = all(part.segment.columns.codec_file is file for part in self._parts)
            if file and all_coded and self.device is None and can_scan():
                codec, cells = file.codec, len(self.centers)
                if isinstance(codec, ProductCodec):
                    scanner = CodeScanner(codec, cells, self.metric, self._kept)
            self._scanner = self._version, scanner
        return scanner

    def codes(self, numbers: Sequence[int]) -> list[CodedCell]:
        """Return the live records of some different cells as codes. All keys must be codes of one codec."""
        file = self._codec_file
        assert file is not None
        found: list[list[CodedCell]] = [[] for _ in numbers]
        for segment, rows in self._rows_of(numbers):
            together, ends = np.concatenate(rows), np.cumsum([len(some) for some in rows])[:-1]
            ids = np.split(segment.columns.ids_at(together), ends)
            codes = np.split(segment.columns.codes_at(together, file), ends)
            for cell, some_ids, some_codes in zip(found, ids, codes, strict=True):
                cell.append(CodedCell(some_ids, some_codes))
        nothing = CodedCell(np.empty(0, np.int64), np.empty((0, file.codec.size), np.uint8))
        return [CodedCell.joined(cell or [nothing]) for cell in found]

    def visit_on_device(self, visitors: Visitors, queries: Tensor, ids: IdRanges | None) -> Iterator[Visits]:
        """Compare queries with the records of their cells on the device; see `DeviceKeys.visit`."""
        turned = self.turned(queries)
        for _, _, alive, keys in self._parts:
            assert keys is not None
            yield from keys.visit(visitors, keys.chosen(alive, ids), turned, self.metric)

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find about the k nearest records of each query. Returns k records if there are k."""
        counts = self.matching(ids)
        total, cells = int(counts.sum()), int((counts > 0).sum())
        if total == 0 or not len(queries):
            return Neighbors.nothing(len(queries), k)
        probes = cells if total <= max(_SMALL, 4 * k) else self._policy.probes_for(k, cells, total)
        found = self._search_cells(queries, k, ids, probes)
        short = np.flatnonzero(found.ids[:, min(k, total) - 1] < 0)
        if len(short):  # the visited cells hold fewer than k matching records
            found.put(short, self._search_cells(queries[short], k, ids, cells))
        return found

    def _search_cells(self, queries: Keys, k: int, ids: IdRanges | None, probes: int) -> Neighbors:
        """Find the k nearest records of each query in its nearest cells."""
        largest = np.sort(self.matching(ids))[-probes:].sum()
        step = max(1, DISTANCES_AT_ONCE // int(largest))
        parts = []
        for start in range(0, len(queries), step):
            some = queries[start : start + step]
            visits = visit([self], some, probes, ids)
            parts.append(Neighbors.visited(visits, len(some)).nearest(k))
        return Neighbors.joined(parts, axis=0)

    def _common_centers(self, segments: Sequence[Segment], found: Sequence[SegmentCells | None]) -> Keys:
        """Return the centers for all segments, shape (cells, dim).

        These are the centers of the largest segment with an index or with cells of the last update. Without
        one, as while a new group is filled, the centers of the last update stay until the group has
        outgrown them. Then new centers are fitted.
        """
        wanted = self._policy.cells_for(self.rows)
        known = [
            (segment.rows, cells.centers)
            for segment, cells in zip(segments, found, strict=True)
            if cells and (len(cells.centers) > 1 or wanted == 1)
        ]
        if known:
            return max(known, key=lambda one: one[0])[1]
        former: Keys = self._nearest.centers.numpy()
        if 1 < len(former) <= wanted * _MOST_GROWTH and wanted <= len(former) * _MOST_GROWTH:
            return former
        return fit_centers(list(segments), wanted)

    def _nearest_center(self, centers: Keys) -> NearestCenter:
        """Return what finds the nearest of `centers`. It is kept while the centers stay the same."""
        if not np.array_equal(self._nearest.centers.numpy(), centers):
            self._nearest = NearestCenter(torch.from_numpy(centers))
        return self._nearest

    def _set_rotation(self, segments: Sequence[Segment]) -> None:
        """Set the codec and the rotation to those of the largest coded segment."""
        coded = [segment for segment in segments if segment.columns.codec_file]
        columns = max(coded, key=lambda one: one.rows).columns if coded else None
        self._codec_file = columns.codec_file if columns else None
        rotation = columns.codec.rotation if columns and columns.codec else None
        self._rotation = None if rotation is None else torch.from_numpy(rotation).to(self.device)

    def _count(self, rows: Callable[[_Part], NDArray[np.bool_] | None]) -> NDArray[np.int64]:
        """Count the rows of each cell for which the mask of a segment is True; None for all rows."""
        counts = np.zeros(len(self.centers), np.int64)
        for part in self._parts:
            chosen = rows(part)
            if chosen is None:
                counts += part.cells.counts
            else:
                counts += np.bincount(part.cells.owners[chosen], minlength=len(counts))
        return counts

    def _read(self, number: int) -> Cell:
        """Read the live records of a cell from all segments."""
        ids, keys = [], []
        for segment, (rows,) in self._rows_of([number]):
            ids.append(segment.columns.ids_at(rows))
            keys.append(self._keys_of(segment, rows))
        read = torch.cat([self.origins[:0], *keys]) - self.middle
        # Stored by columns: a product with few queries takes two thirds of the time.
        in_columns = read.T.contiguous().T
        return Cell(np.concatenate([np.empty(0, np.int64), *ids]), in_columns, (read * read).sum(1))

    def _rows_of(self, numbers: Sequence[int]) -> Iterator[tuple[Segment, list[NDArray[np.int64]]]]:
        """Yield each segment that has live rows in the cells, with these rows for each cell."""
        for segment, cells, alive, _ in self._parts:
            found = cells.rows_in(numbers)
            if alive is not None:
                found = [rows[alive[rows]] for rows in found]
            if any(len(rows) for rows in found):
                yield segment, found

    def _keys_of(self, segment: Segment, rows: NDArray[np.int64]) -> Tensor:
        """Read the keys of some rows, rotated."""
        columns, file = segment.columns, self._codec_file
        if file is not None and columns.codec_file is file:
            return torch.from_numpy(file.codec.turned(columns.codes_at(rows, file)))
        return self.turned(torch.from_numpy(columns.keys_at(rows).astype(np.float32)))


def _name(segment: Segment) -> tuple[int, StoredFile | None]:
    """Return a name of a segment that is the same while its rows and its index are."""
    return id(segment.columns), segment.index.file if segment.index else None


def _mask(rows: IdRanges, count: int) -> NDArray[np.bool_]:
    """Return a mask of `count` rows that is True for `rows`."""
    mask = np.zeros(count, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return mask
