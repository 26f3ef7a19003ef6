"""One group (a numbered set of records, such as a domain) that is divided into cells.

A cell is a cluster of records whose keys are near each other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import (
    CodecFile,
    IdRanges,
    Keys,
    Metric,
    ProductCodec,
    Segment,
    StoredFile,
    Visits,
)
from knnstore_cells.cell_cache import Cell, CellCache
from knnstore_cells.device import DeviceKeys, QueriesByCell, RowsByCell
from knnstore_cells.device_records import Found, Probed
from knnstore_cells.index import ArrangedSegment, SegmentCells
from knnstore_cells.partition import NearestCenter, assign_cells, fit_centers
from knnstore_cells.policy import Policy
from knnstore_cells.scanning import CodedCell, CodeScanner, can_scan

_MOST_GROWTH = 4  # new centers are fitted if the number of cells should change by more than this factor


class _SegmentInGroup(NamedTuple):
    """A segment (a set of files with records of one group), with the cell of each of its records.

    A cell is a cluster of records with near keys.
    """

    segment: Segment
    cells: SegmentCells
    """The cell of each record of the segment."""
    alive: NDArray[np.bool_] | None
    """Mask, shape (rows,): False for deleted and replaced records, True for all other records.

    None if no record of the segment is deleted or replaced.
    """

    on_device: DeviceKeys | None
    """The segment's keys in the memory of the device; None if no device is used."""


class Cells(NamedTuple):
    """The cells (clusters of near keys) of a group that have a record that matches a filter."""

    numbers: NDArray[np.int64]
    """Numbers of these cells in the group, int64, ascending, shape (cells,)."""

    centers: Tensor
    """Centers of these cells, float32, shape (cells, dim), stored by columns."""

    half_norms: Tensor
    """|center|²/2 of each center, float32, shape (cells,)."""

    numbers_on_device: Tensor
    """`numbers` on the device of the centers."""

    counts_on_device: Tensor
    """Number of matching records of each cell, on the device of the centers, int64, shape (cells,)."""

    descending_counts: NDArray[np.int64]
    """Number of matching records of each cell, in descending order, shape (cells,)."""

    @classmethod
    def select_nonempty(cls, centers: Tensor, counts: NDArray[np.int64]) -> Self:
        """Select the cells (clusters of near keys) of a group that have a matching record.

        Args:
            centers: centers of all cells of the group, float32, shape (n, dim).
            counts: number of matching records of each cell, shape (n,).

        Returns:
            Numbers, centers and half squared norms of the cells whose count is not 0.
        """
        numbers = np.flatnonzero(counts)
        occupied_centers = (
            centers if len(numbers) == len(centers) else centers.T[:, torch.from_numpy(numbers)].T
        )
        half_norms = (occupied_centers * occupied_centers).sum(1) / 2
        occupied = counts[numbers]
        return cls(
            numbers,
            occupied_centers,
            half_norms,
            torch.from_numpy(numbers).to(centers.device),
            torch.from_numpy(occupied).to(centers.device),
            np.sort(occupied)[::-1],
        )


class CellGroup:
    """One group of records that is divided into cells (clusters of near keys). `CellSearch` searches it.

    A group is a numbered set of records, such as a domain. The records of a group are in segments; a segment
    is a set of records in files or in memory.

    Args:
        dim: number of components of a key.
        metric: metric of the distances.
        policy: parameters of the adapter, such as the number of cells.
        load_cells: function that reads the cells of a segment's records from the index file of the segment.
            It returns None if the segment has no usable index file.
        count_replacements: function that returns how many additions have replaced records so far. While this
            number stays the same, no record has got another key.
        cell_cache: cache of cells in memory; not used with a device.
        device: device (such as a GPU) in whose memory all keys are kept; None reads cells from files when
            needed.
    """

    def __init__(
        self,
        dim: int,
        metric: Metric,
        policy: Policy,
        load_cells: Callable[[Segment], SegmentCells | None],
        count_replacements: Callable[[], int],
        cell_cache: CellCache,
        device: torch.device | None = None,
    ) -> None:
        self._dim = dim
        self.metric = metric
        self._policy = policy
        self._load_cells = load_cells
        self._count_replacements = count_replacements
        self._replacements = 0
        self._nearest = NearestCenter(torch.empty(0, dim))
        self._cell_cache = cell_cache
        self.device = device
        self._version = object()
        self._segments: Sequence[Segment] = ()
        self._parts: list[_SegmentInGroup] = []
        self._matching: tuple[IdRanges | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
        self._with_records: tuple[NDArray[np.int64], Cells] | None = None
        self._codec_file: CodecFile | None = None
        self._rotation: Tensor | None = None
        self._scanner: tuple[object, CodeScanner | None] = (None, None)
        self.room = cell_cache.size
        """Largest number of bytes of decoded keys in memory, for all groups together."""
        self.rows = 0
        """Number of records of the group; deleted and replaced records do not count."""
        self.centers = torch.empty(0, dim)
        """Centers of the cells, float32, shape (cells, dim)."""
        self.origins = self.centers
        """The centers, rotated by the group's codec (compressor of keys), shape (cells, width)."""
        self.middle = self._compute_middle()
        """Vector that is subtracted from rotated keys and queries to reduce rounding errors, shape (width,).

        It is the mean of `origins` for L2, else 0.
        """
        self.counts = np.zeros(0, np.int64)
        """Number of records of each cell, shape (cells,); deleted and replaced records do not count."""

    def holds_segments(self, segments: Sequence[Segment]) -> bool:
        """Check whether `segments` is the object of the last successful `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments (sets of records) to search, and assign their new records to cells.

        No search may run during the call. A record that was moved from one segment to another, for example
        from memory to disk, stays in its cell (a cluster of near keys). Records that are new since the last
        call are assigned to the cell with the nearest center. If new centers are fitted, all records are
        assigned again.

        Args:
            segments: all segments of the group.

        Raises:
            FileNotFoundError: an index file is missing for the first time; a writer may have replaced it. A
                second call treats the missing file as damaged, and raises no error.
        """
        self._segments = ()
        former_segments = self._find_former_segments(segments)
        known_parts = {_identify_segment(part.segment): part for part in self._parts}
        self.rows = sum(segment.live for segment in segments)
        former_parts = [known_parts.get(_identify_segment(segment)) for segment in segments]
        found_cells = [
            part.cells if part else self._load_cells(segment)
            for part, segment in zip(former_parts, segments, strict=True)
        ]
        nearest = self._get_nearest_center(self._choose_centers(segments, found_cells))
        centers = nearest.centers.numpy()
        codec_file = self._codec_file
        self._set_rotation(segments)
        # Stored by columns: one query finds the nearest of 16,384 centers in a third of the time.
        self.centers = nearest.centers.to(self.device).T.contiguous().T
        self.origins = self.rotate(self.centers)
        self.middle = self._compute_middle()
        self._parts = []
        for segment, cells, part in zip(segments, found_cells, former_parts, strict=True):
            fits = cells is not None and np.array_equal(cells.centers, centers)
            segment_cells = (
                cells if cells is not None and fits else assign_cells(segment, nearest, former_segments)
            )
            alive = _make_mask(segment.live_rows(), segment.rows) if segment.dead else None
            is_unchanged = part is not None and part.cells is segment_cells and codec_file is self._codec_file
            on_device = part.on_device if part is not None and is_unchanged else None
            if self.device is not None and on_device is None:
                on_device = DeviceKeys(segment, segment_cells, self._codec_file, self.rotate, self.origins)
            self._parts.append(_SegmentInGroup(segment, segment_cells, alive, on_device))
        self.counts = self._count_rows(lambda part: part.alive)
        self._matching = (None, self.counts)
        self._version = object()
        self._segments = segments

    def _find_former_segments(self, segments: Sequence[Segment]) -> list[ArrangedSegment]:
        """Return the segments of the last update that are not used any more, with their cells.

        A segment is a set of records, and a cell is a cluster of records with near keys. If a record was
        moved from an old segment to a new segment, its cell is known from the old segment. The list is empty
        if a record was replaced since the last update, because the key of this record may have changed.

        Args:
            segments: the segments that are searched from now on; they are not in the result.
        """
        former, self._replacements = self._replacements, self._count_replacements()
        if self._replacements != former:
            return []
        names = {_identify_segment(segment) for segment in segments}
        return [
            ArrangedSegment(part.segment, part.cells)
            for part in self._parts
            if _identify_segment(part.segment) not in names
        ]

    def rotate(self, vectors: Tensor) -> Tensor:
        """Rotate vectors to the space in which the group's codec (compressor of keys) stores keys.

        Distances between vectors stay the same. If the group has no codec, or the codec does not rotate keys,
        the vectors are returned unchanged.

        Args:
            vectors: float32, shape (n, dim).

        Returns:
            The rotated vectors, float32, shape (n, width). The width is the number of components of a rotated
            key; it is dim if the vectors are unchanged.
        """
        return vectors if self._rotation is None else vectors @ self._rotation

    def _compute_middle(self) -> Tensor:
        """Compute the vector that is subtracted from rotated keys and queries, float32, shape (width,).

        For the metric L2, the vector is the mean of the rotated centers of all cells (clusters of near keys).
        For inner products, and for a group without cells, the vector is 0.
        """
        has_center = self.metric is Metric.L2 and len(self.origins)
        return self.origins.mean(0) if has_center else self.origins.new_zeros(self.origins.shape[1])

    def count_matching(self, ids: IdRanges | None) -> NDArray[np.int64]:
        """Count in each cell (a cluster of near keys) the records that match a filter.

        The result is an array, int64, shape (cells,). Deleted and replaced records do not count. The result
        for the last `ids` object is cached.

        Args:
            ids: ids of the records to count; None counts all records.
        """
        if ids is None:
            return self.counts
        last, counts = self._matching
        if last is not ids:
            counts = self._count_rows(lambda part: _make_mask(part.segment.live_rows(ids), part.segment.rows))
            self._matching = (ids, counts)
        return counts

    def find_cells(self, ids: IdRanges | None) -> Cells:
        """Return the numbers and centers of the cells (clusters of near keys) that have a matching record.

        Args:
            ids: ids of the records that match; None lets all records match. Cells without records are left
                out in any case.
        """
        counts, cached = self.count_matching(ids), self._with_records
        if cached is None or cached[0] is not counts:
            cached = self._with_records = counts, Cells.select_nonempty(self.centers, counts)
        return cached[1]

    def read_cell(self, number: int) -> Cell:
        """Return the records of one cell (a cluster of near keys), from the cache or from their files.

        Deleted and replaced records are left out. A cell that was not in the cache is added to the cache.

        Args:
            number: number of the cell.
        """
        return self._cell_cache.get(self._version, number, self._read_cell)

    def get_scanner(self) -> CodeScanner | None:
        """Return the object that computes distances from codes (compressed keys) without decoding the codes.

        The object is called scanner, and is cached until the next `update`. Returns None if no scanner can be
        used. A scanner can be used if three conditions are met: FAISS is installed, the keys are not in the
        memory of a device, and all keys of the group are codes of one product quantizer.
        """
        version, scanner = self._scanner
        if version is not self._version:
            file, scanner = self._codec_file, None
            all_coded = all(part.segment.columns.codec_file is file for part in self._parts)
            if file and all_coded and self.device is None and can_scan():
                codec, cells = file.codec, len(self.centers)
                if isinstance(codec, ProductCodec):
                    scanner = CodeScanner(codec, cells, self.metric, self._cell_cache)
            self._scanner = self._version, scanner
        return scanner

    def read_codes(self, numbers: Sequence[int]) -> list[CodedCell]:
        """Read the records of several cells (clusters of near keys) as codes (compressed keys).

        All keys of the group must be codes of one codec (compressor of keys). Deleted and replaced records
        are left out.

        Args:
            numbers: numbers of the cells, without duplicates.

        Returns:
            For each cell the ids and codes of its records, in the order of `numbers`.
        """
        file = self._codec_file
        assert file is not None
        cell_parts: list[list[CodedCell]] = [[] for _ in numbers]
        for segment, rows in self._iterate_cell_records(numbers):
            all_rows, ends = np.concatenate(rows), np.cumsum([len(cell_rows) for cell_rows in rows])[:-1]
            ids = np.split(segment.columns.ids_at(all_rows), ends)
            codes = np.split(segment.columns.codes_at(all_rows, file), ends)
            for parts_of_cell, cell_ids, cell_codes in zip(cell_parts, ids, codes, strict=True):
                parts_of_cell.append(CodedCell(cell_ids, cell_codes))
        empty = CodedCell(np.empty(0, np.int64), np.empty((0, file.codec.size), np.uint8))
        return [CodedCell.concatenate(parts_of_cell or [empty]) for parts_of_cell in cell_parts]

    def visit_on_device(
        self, visitors: QueriesByCell, queries: Tensor, ids: IdRanges | None
    ) -> Iterator[Visits]:
        """Compute on the device (such as a GPU) the distances between queries and the records of their cells.

        A cell is a cluster of records with near keys. The keys must be in the memory of the device.

        Args:
            visitors: for each cell the queries that are compared with its records.
            queries: query vectors, float32, shape (q, dim), on the device.
            ids: ids of the records that the queries are compared with; None compares with all records.

        Yields:
            `Visits`: distances between some queries and some records, for several cells.
        """
        rotated = self.rotate(queries)
        for _, _, alive, keys in self._parts:
            assert keys is not None
            yield from keys.visit(visitors, keys.select_rows(alive, ids), rotated, self.metric)

    @property
    def largest_token(self) -> int:
        """Largest token of the records on the device; 0 without records."""
        return max([part.on_device.largest_token for part in self._parts if part.on_device], default=0)

    def measure_distances(self, probed: Probed, queries: Tensor, ids: IdRanges | None, found: Found) -> None:
        """Compute the distances of a few queries to the records of their cells; do not wait for the device.

        A cell is a cluster of records with near keys. The keys must be in the memory of the device.

        Args:
            probed: the cells that each query probes.
            queries: query vectors, float32, shape (q, dim), on the device.
            ids: ids of the records that match; None lets all records match.
            found: filled; a column without a record is not changed.
        """
        cells, columns = probed
        used = cells.clamp(min=0)
        for keys, order in self._select_on_device(ids):
            vectors, middle = (
                (self.rotate(queries), self.middle) if keys.is_coded else (queries, self.centers.mean(0))
            )
            keys.measure_distances(Probed(cells, columns), vectors, order, middle, self.metric, found)
            # The records of the next segment follow those of this one.
            columns = columns + (order.starts[used + 1] - order.starts[used]).where(cells >= 0, 0)

    def _select_on_device(self, ids: IdRanges | None) -> list[tuple[DeviceKeys, RowsByCell]]:
        """Return the keys of each segment on the device, and the rows that match.

        Segments without a matching row are left out.

        Args:
            ids: ids of the records that match; None lets all records match.
        """
        if ids is not None and np.array_equal(self.count_matching(ids), self.counts):
            ids = None  # all records match; choosing rows by ids would take longer
        selected = list[tuple[DeviceKeys, RowsByCell]]()
        for part in self._parts:
            assert part.on_device is not None
            order = part.on_device.select_rows(part.alive, ids)
            if order.largest:
                selected.append((part.on_device, order))
        return selected

    def _choose_centers(
        self, segments: Sequence[Segment], found_cells: Sequence[SegmentCells | None]
    ) -> Keys:
        """Choose the centers of the group's cells, which are clusters of records with near keys.

        The result is one of three sets of centers:

        - If the cells of a segment (a set of records) are known, the centers of this segment are returned. Of
          several such segments, the segment with the most records is used.
        - Otherwise, for example while a new group is filled, the centers of the last update are returned, if
          their number is at most 4 times too large or too small for the number of records.
        - Otherwise, new centers are fitted.

        Args:
            segments: all segments of the group.
            found_cells: for each segment its cells, from its index or from the last update; None if unknown.

        Returns:
            The centers, float32, shape (cells, dim).
        """
        cell_count = self._policy.choose_cell_count(self.rows)
        known_centers = [
            (segment.rows, cells.centers)
            for segment, cells in zip(segments, found_cells, strict=True)
            if cells and (len(cells.centers) > 1 or cell_count == 1)
        ]
        if known_centers:
            return max(known_centers, key=lambda candidate: candidate[0])[1]
        former: Keys = self._nearest.centers.numpy()
        if 1 < len(former) <= cell_count * _MOST_GROWTH and cell_count <= len(former) * _MOST_GROWTH:
            return former
        return fit_centers(list(segments), cell_count)

    def _get_nearest_center(self, centers: Keys) -> NearestCenter:
        """Return an object that finds for a key the nearest of several cell centers.

        If the centers equal the centers of the last call, the object of the last call is returned.

        Args:
            centers: the centers, float32, shape (n, dim).
        """
        if not np.array_equal(self._nearest.centers.numpy(), centers):
            self._nearest = NearestCenter(torch.from_numpy(centers))
        return self._nearest

    def _set_rotation(self, segments: Sequence[Segment]) -> None:
        """Set the attributes with the group's codec (compressor of keys) and the codec's rotation matrix.

        The codec of the largest segment (set of records) with compressed keys is used. If no segment has
        compressed keys, both attributes become None. If the codec does not rotate keys, the rotation matrix
        becomes None.

        Args:
            segments: all segments of the group.
        """
        coded = [segment for segment in segments if segment.columns.codec_file]
        columns = max(coded, key=lambda segment: segment.rows).columns if coded else None
        self._codec_file = columns.codec_file if columns else None
        rotation = columns.codec.rotation if columns and columns.codec else None
        self._rotation = None if rotation is None else torch.from_numpy(rotation).to(self.device)

    def _count_rows(self, rows: Callable[[_SegmentInGroup], NDArray[np.bool_] | None]) -> NDArray[np.int64]:
        """Count the selected records of each cell (a cluster of near keys) in all segments of the group.

        Args:
            rows: function that returns for a segment (a set of records) the mask of the records to count. If
                it returns None, all records of the segment are counted.

        Returns:
            The number of records of each cell, int64, shape (cells,).
        """
        counts = np.zeros(len(self.centers), np.int64)
        for part in self._parts:
            mask = rows(part)
            if mask is None:
                counts += part.cells.counts
            else:
                counts += np.bincount(part.cells.owners[mask], minlength=len(counts))
        return counts

    def _read_cell(self, number: int) -> Cell:
        """Read the records of one cell from all segments (immutable sets of records), without the cache.

        Deleted and replaced records are left out.

        Args:
            number: number of the cell.

        Returns:
            The ids of the records; their keys, rotated and minus the group's center (`middle`); and the
            squared norms of these keys.
        """
        ids, keys = [], []
        for segment, (rows,) in self._iterate_cell_records([number]):
            ids.append(segment.columns.ids_at(rows))
            keys.append(self._read_rotated_keys(segment, rows))
        keys_of_cell = torch.cat([self.origins[:0], *keys]) - self.middle
        # Stored by columns: a product with few queries takes two thirds of the time.
        in_columns = keys_of_cell.T.contiguous().T
        return Cell(
            np.concatenate([np.empty(0, np.int64), *ids]), in_columns, (keys_of_cell * keys_of_cell).sum(1)
        )

    def _iterate_cell_records(
        self, numbers: Sequence[int]
    ) -> Iterator[tuple[Segment, list[NDArray[np.int64]]]]:
        """Find the records of several cells (clusters of near keys) in each segment of the group.

        A segment is an immutable set of records; row i is its i-th record. Deleted and replaced records are
        left out.

        Args:
            numbers: numbers of the cells, without duplicates.

        Yields:
            Each segment that has a record in one of the cells, with a list of arrays: for each cell, in the
            order of `numbers`, the row numbers of the cell's records in the segment.
        """
        for segment, cells, alive, _ in self._parts:
            row_lists = cells.rows_of_cells(numbers)
            if alive is not None:
                row_lists = [rows[alive[rows]] for rows in row_lists]
            if any(len(rows) for rows in row_lists):
                yield segment, row_lists

    def _read_rotated_keys(self, segment: Segment, rows: NDArray[np.int64]) -> Tensor:
        """Read keys of a segment, decoded and rotated to the space of the group's codec.

        A codec compresses keys. A segment is an immutable set of records.

        Args:
            segment: the segment.
            rows: row numbers of the keys in the segment, shape (n,).

        Returns:
            The keys, float32, shape (n, width).
        """
        columns, file = segment.columns, self._codec_file
        if file is not None and columns.codec_file is file:
            return torch.from_numpy(file.codec.decode_rotated(columns.codes_at(rows, file)))
        return self.rotate(torch.from_numpy(columns.keys_at(rows).astype(np.float32)))


def _identify_segment(segment: Segment) -> tuple[int, StoredFile | None]:
    """Return a value that identifies a segment (an immutable set of records) and its index file.

    Two versions of a segment that differ only in their deleted records have the same value.
    """
    return id(segment.columns), segment.index.file if segment.index else None


def _make_mask(rows: IdRanges, count: int) -> NDArray[np.bool_]:
    """Convert ranges of row numbers to a mask, bool, shape (count,), that is True for these rows."""
    mask = np.zeros(count, bool)
    for start, stop in rows:
        mask[start:stop] = True
    return mask
