"""The datastore of the cells adapter."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from knnstore.datastore import (
    Capabilities,
    Coding,
    Datastore,
    EmbeddedDatastore,
    Filter,
    GroupSearch,
    Keys,
    KeySegments,
    Metric,
    Neighbors,
    Segment,
    StoredFile,
    Visits,
    code_size,
    validate_k,
    validate_keys,
)
from knnstore.errors import CorruptDatastoreError
from knnstore_cells.cell_cache import CellCache
from knnstore_cells.index import ArrangedSegment, SegmentCells, replace_empty_centers
from knnstore_cells.policy import Policy

_log = logging.getLogger(__name__)

_RECORDS_PER_CENTER = 128  # least number of records for each center
_NOT_CHOSEN = object()


class CellsDatastore(EmbeddedDatastore):
    """A datastore in a local directory that divides its records into cells.

    A cell has a center, and contains the records whose keys are nearer to this center than to other centers.
    A query is compared with all records of its nearest cells. The records of each group (a numbered set of
    records, such as a domain) have their own cells.

    The parameters of `open` are those of `Policy`.
    """

    _policy: Policy

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric, policy)
        self._cell_cache = CellCache(policy.memory << 20)
        self._missing: set[StoredFile] = set()
        self._former_cells: dict[int, list[ArrangedSegment]] | None = None
        self._centers: dict[int, Keys] = {}
        self._device: Any = _NOT_CHOSEN

    @classmethod
    def _make_policy(cls, params: dict[str, Any], dim: int, metric: Metric) -> Policy:
        """Check the parameters that a user gave, and return the policy. Raises ConfigError for bad ones."""
        return Policy.from_params(params)

    @classmethod
    def _choose_coding(cls, policy: Policy, dim: int) -> Coding | None:
        """Return how the policy compresses the keys of large groups to codes; None if it does not."""
        return policy.choose_coding(dim)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return an estimate of the bytes that one record takes on disk, including its part of an index.

        Args:
            dim: number of components of a key.
            **params: parameters of the adapter; `codes` decides the size of a key.
        """
        coding = Policy.from_params(params).choose_coding(dim)
        key = code_size(coding.kind, dim) if coding else 2 * dim
        return key + 8 + 2 + dim // _RECORDS_PER_CENTER + 8

    @property
    def capabilities(self) -> Capabilities:
        """The features of this datastore: approximate search, durable, one writer.

        Keys are stored in half precision; in large groups they are compressed to codes, unless `codes` is
        ``none``.
        """
        coding = self._policy.choose_coding(self._dim)
        return Capabilities(
            exact_search=False,
            exact_keys=False,
            persistent=True,
            shared_writers=False,
            checks_keys=True,
            codes=coding.kind if coding else None,
            coded_from=coding.least if coding else None,
        )

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`. Approximate in large groups.

        Raises CorruptDatastoreError if no query has a neighbor, and records that `where` selects are damaged.
        """
        from knnstore_cells.device import disable_autocast

        with disable_autocast():
            return super().search(queries, k, where=where)

    def visit(self, queries: Keys, probes: int, *, where: Filter | None = None) -> list[Visits]:
        """Compute the distances of each query to all records of its nearest cells; see `SupportsCells.visit`.

        Raises CorruptDatastoreError if no record is found, and records that `where` selects are damaged.
        """
        queries, probes = validate_keys(queries, self._dim, what="queries"), validate_k(probes, what="probes")
        ids = where.ids if where and where.groups is None else None
        from knnstore_cells.device import disable_autocast
        from knnstore_cells.visiting import CellSearch, visit_cells

        def visit_groups(groups: Sequence[GroupSearch]) -> list[Visits]:
            """Compare each query with all records of its nearest cells of all these groups."""
            return visit_cells(
                [group for group in groups if isinstance(group, CellSearch)], queries, probes, ids
            )

        with disable_autocast():
            visits = self._searches.search_groups(
                where.groups if where else None, visit_groups, self._create_group_search
            )
        if len(queries) and not visits:
            self._check_readable(where)
        return visits

    def visit_on_device(self, queries: Any, probes: int, where: Filter) -> Any:
        """Compute what `visit` computes, and leave the results on the device; see `SupportsDeviceVisits`.

        Returns None if `visit` has to be called: the keys are not on the device of the queries, no record
        matches, or there are too many queries or records.
        """
        if self._policy.device == "none" or self._device is None:
            return None
        from knnstore_cells.device import disable_autocast
        from knnstore_cells.visiting import CellSearch, measure_on_device

        def measure_groups(groups: Sequence[GroupSearch]) -> Any:
            """Compare each query with all records of its nearest cells of these groups."""
            return measure_on_device(
                [group for group in groups if isinstance(group, CellSearch)], queries, probes, where.ids
            )

        with disable_autocast():
            return self._searches.search_groups(where.groups, measure_groups, self._create_group_search)

    def optimize(self) -> None:
        """Merge files of records, reclaim the space of deleted records, and save the cells of new records.

        A record stays in its cell as long as its group has the same number of cells. The parameter `cells`
        sets the number of cells; by default, the number grows with the number of records. When the number
        changes, new cells are fitted.
        """
        with self._remember_cells():
            super().optimize()

    def vacuum(self) -> None:
        """Rewrite all files that contain deleted or replaced records, without these records.

        The other records stay in their cells. If a cell has no record left, its center is replaced by the
        center of another cell: the old center can be a copy of a deleted key.
        """
        with self._remember_cells() as former:
            for group, arranged in former.items():
                with_live_centers = replace_empty_centers(arranged) if arranged else []
                if with_live_centers and not with_live_centers[0].has_centers(arranged[0].cells.centers):
                    former[group] = with_live_centers
                    self._damaged |= {
                        arranged_segment.segment.index.file
                        for arranged_segment in arranged
                        if arranged_segment.segment.index
                    }
            super().vacuum()

    def _create_group_search(self) -> GroupSearch:
        """Create and return an object that searches the records of one group.

        The first call chooses the device (GPU or CPU) for all groups.
        """
        # These imports load torch, which listing and removing do not need.
        from knnstore_cells.device import choose_device
        from knnstore_cells.visiting import CellSearch

        if self._device is _NOT_CHOSEN:
            rows = sum(segment.rows for segment in self._segments.snapshot())
            size = rows * self.record_size(self._dim, **asdict(self._policy))
            self._device = choose_device(self._policy.device, size)
        segments = self._segments
        return CellSearch(
            self._dim,
            self._metric,
            self._policy,
            self._read_segment_cells,
            lambda: segments.replacements,
            self._cell_cache,
            self._device,
        )

    def _is_indexed(self, group_rows: int) -> bool:
        """Return True if a group with this number of records has more than one cell."""
        return self._policy.choose_cell_count(group_rows) > 1

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return ``{"centers": NUMBER_OF_CELLS}``; None if the segment needs no index.

        The index has the cell of each record, so the number is that of the cells of the group.
        """
        if not self._policy.has_index(rows, group_rows):
            return None
        return {"centers": self._policy.choose_cell_count(group_rows)}

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Assign the records of a segment to cells, and write the assignment (the index) to a file."""
        from knnstore_cells.device import disable_autocast

        with disable_autocast():
            self._write_cells(segment, parameters["centers"], path)

    def _write_cells(self, segment: Segment, cells: int, path: Path) -> None:
        """Assign the records of a segment to the cells of its group, and write the assignment to a file.

        New cell centers are fitted if the group has no centers yet, or if its number of cells has changed.

        Args:
            segment: the segment.
            cells: number of cells of the group.
            path: file to create.
        """
        from torch import from_numpy

        from knnstore_cells.partition import NearestCenter, assign_cells, fit_centers

        group = segment.group
        former = (self._former_cells or {}).get(group, [])
        centers = self._centers.get(group)
        if centers is None:
            centers = next(
                (arranged.cells.centers for arranged in former if len(arranged.cells.centers) == cells), None
            )
        if centers is None or len(centers) != cells:
            centers = fit_centers(list(self._segments.segments_by_group()[group]), cells)
        self._centers[group] = centers
        assign_cells(segment, NearestCenter(from_numpy(centers)), former).write(path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> None:
        """Return None: `CellSearch` opens the index files of all segments of a group."""

    @contextmanager
    def _remember_cells(self) -> Iterator[dict[int, list[ArrangedSegment]]]:
        """Remember the cells of all records in the ``with`` block, so that rewritten records stay in them.

        Yields:
            The segments of each group whose cells are known, by group number; the largest segment
            comes first. A nested ``with`` block yields the dict of the outer block.
        """
        if self._former_cells is not None:
            yield self._former_cells
            return
        self._former_cells = {}
        for group, segments in self._segments.segments_by_group().items():
            opened = [(segment, self._read_segment_cells(segment, quietly=True)) for segment in segments]
            arranged = [ArrangedSegment(segment, cells) for segment, cells in opened if cells is not None]
            self._former_cells[group] = sorted(
                arranged, key=lambda segment: segment.segment.rows, reverse=True
            )
        try:
            yield self._former_cells
        finally:
            self._former_cells, self._centers = None, {}

    def _read_segment_cells(self, segment: Segment, *, quietly: bool = False) -> SegmentCells | None:
        """Read the cell of each record of a segment from the segment's index file.

        The first time that a file is missing, an error is raised, so that the caller can look for a newer
        version of the segment. A file that is missing for the second time, or is damaged, is remembered as
        damaged and not read again; a warning is logged, and the result is None.

        Args:
            segment: the segment.
            quietly: True logs no warning, and treats a missing file as damaged at the first time.

        Returns:
            The cells of the records; None if the segment has no index, or its index file is damaged or
            missing.

        Raises:
            FileNotFoundError: the file is missing for the first time, and `quietly` is False. A writer may
                have replaced the file.
        """
        entry = segment.index
        cells = entry.parameters.get("centers") if entry else None
        if entry is None or not isinstance(cells, int) or entry.file in self._damaged:
            return None
        try:
            return SegmentCells.read(self._segments.root, segment, self._dim, cells)
        except FileNotFoundError as error:
            if entry.file not in self._missing and not quietly:
                self._missing.add(entry.file)
                raise
            problem = f"{error.filename} is missing"
        except CorruptDatastoreError as error:
            problem = str(error)
        self._damaged.add(entry.file)
        if not quietly:
            _log.warning(
                "%s (cells of its keys are computed in memory until `knnstore optimize` saves them again)",
                problem,
            )
        return None


_conforms: type[Datastore] = CellsDatastore  # the type checker compares every signature here
