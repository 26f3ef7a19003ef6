"""The index of a segment (a set of files with records): the cell of each record.

A cell is a cluster of records whose keys are near each other. Row i of a segment is its i-th record.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Ids, Keys, MappedFile, RoundedCodec, Segment
from knnstore.errors import CorruptDatastoreError

_FEW = 16  # so many searches for the rows of some cells take less time than sorting all rows


class SegmentCells:
    """The cell (cluster of near keys) of each row of a segment; row i is the segment's i-th record.

    The index file holds the centers of the cells, with a byte for each component (see `RoundedCodec`), and
    the number of the cell of each row (uint16, shape (rows,)).

    Args:
        centers: centers of the cells, rounded as in the file, float32, shape (cells, dim).
        owners: number of the cell of each row, also of deleted records, uint16, shape (rows,).
    """

    def __init__(self, centers: Keys, owners: NDArray[np.uint16]) -> None:
        self.centers, self.owners = centers, owners
        self._lookups = 0

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of records of each cell, deleted records included, int64, shape (cells,)."""
        return np.bincount(self.owners, minlength=len(self.centers))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Bounds of each cell in `rows` (the row numbers sorted by cell), int64, shape (cells + 1,).

        The rows of cell i are at the indices starts[i] to starts[i + 1] - 1 of `rows`.
        """
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """All row numbers of the segment, sorted by cell, then by number, int32, shape (rows,)."""
        return np.argsort(self.owners, kind="stable").astype(np.int32)

    def rows_of_cells(self, cells: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return the row numbers of several cells (clusters of near keys): one array for each cell.

        The row numbers of a cell are ascending, int64, and include the rows of deleted records.

        Args:
            cells: numbers of the cells, without duplicates.
        """
        self._lookups += 1
        if self._lookups > _FEW or "rows" in self.__dict__:  # the first queries do not wait for the sort
            starts = self.starts
            return [self.rows[starts[cell] : starts[cell + 1]].astype(np.int64) for cell in cells]
        is_requested = np.zeros(len(self.centers), bool)
        is_requested[list(cells)] = True
        rows = np.flatnonzero(is_requested[self.owners])
        owners = self.owners[rows]
        return [rows[owners == cell] for cell in cells]

    @classmethod
    def read(cls, root: Path, segment: Segment, dim: int, cells: int) -> Self:
        """Read the index file of a segment, and return the cell (a cluster of near keys) of each record.

        Args:
            root: the datastore's directory.
            segment: segment (set of files with records) that has an index.
            dim: number of components of a key.
            cells: number of cells in the file.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptDatastoreError: the file is damaged, or belongs to other keys.
        """
        assert segment.index is not None
        file, codec = MappedFile(root, segment.index.file), RoundedCodec(dim)
        if file.file.size != cells * codec.size + 2 * segment.rows:
            raise CorruptDatastoreError(f"{file.path} belongs to other keys")
        file.check()
        codes, rest = np.split(file.bytes, [cells * codec.size])
        owners = np.frombuffer(rest.tobytes(), np.uint16)
        if owners.max(initial=0) >= cells:
            raise CorruptDatastoreError(f"{file.path} belongs to other keys")
        return cls(codec.decode_rotated(codes.reshape(cells, -1)), owners)

    def write(self, path: Path) -> None:
        """Write the cell centers and the cell of each record to an index file.

        A cell is a cluster of records with near keys.

        Args:
            path: path of the file; an existing file is replaced.
        """
        with path.open("wb") as file:
            file.write(RoundedCodec(self.centers.shape[1]).encode(self.centers).data)
            file.write(self.owners.data)


class ArrangedSegment(NamedTuple):
    """A segment (an immutable set of records) with the cell of each of its records.

    A cell is a cluster of records with near keys.
    """

    segment: Segment
    cells: SegmentCells
    """The cell of each record of the segment."""

    def has_centers(self, centers: Keys) -> bool:
        """Check whether the cells of the segment have exactly the given centers.

        Args:
            centers: cell centers, float32, shape (cells, dim).
        """
        return self.cells.centers is centers or np.array_equal(self.cells.centers, centers)

    def find_cells_of(self, ids: Ids) -> NDArray[np.int64]:
        """Find the cells (clusters of near keys) of records by their ids.

        Args:
            ids: record ids, int64, shape (n,).

        Returns:
            Number of the cell of each record, int64, shape (n,). The number is -1 if the segment has no
            record with the id, or if the record was deleted or replaced.
        """
        segment_ids = self.segment.columns.ids
        positions = np.minimum(np.searchsorted(segment_ids, ids), len(segment_ids) - 1)
        is_found = segment_ids[positions] == ids
        if self.segment.dead:
            is_found &= ~self.segment.dead.contains(positions)
        return np.where(is_found, self.cells.owners[positions].astype(np.int64), -1)


def replace_empty_centers(former: Sequence[ArrangedSegment]) -> list[ArrangedSegment]:
    """Replace the center of every empty cell (a cluster of near keys) by the center of the fullest cell.

    A cell is empty if all its records were deleted or replaced. Its center may be the key of a deleted
    record, which must not be kept.

    Args:
        former: one or more segments (immutable sets of records) with their cells. They are not changed.

    Returns:
        Copies of the segments with the new centers. If a segment has other centers than the first segment, it
        is left out.
    """
    centers = former[0].cells.centers
    segments = [arranged for arranged in former if arranged.has_centers(centers)]
    owners = np.concatenate(
        [arranged.cells.owners[arranged.segment.live_rows().ids()] for arranged in segments]
    )
    counts = np.bincount(owners, minlength=len(centers))
    replacements = np.where(counts, np.arange(len(centers)), counts.argmax())
    return [
        ArrangedSegment(arranged.segment, SegmentCells(centers[replacements], arranged.cells.owners))
        for arranged in segments
    ]
