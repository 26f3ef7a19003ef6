"""The index of a segment: the cell of each row."""

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
    """The rows of a segment by cell.

    The file holds the centers, a byte for each component (see `RoundedCodec`), and the cell of each row
    (uint16, shape (rows,)).

    Args:
        centers: centers, rounded as in the file, float32, shape (cells, dim).
        owners: cell of each row, live or dead, uint16, shape (rows,).
    """

    def __init__(self, centers: Keys, owners: NDArray[np.uint16]) -> None:
        self.centers, self.owners = centers, owners
        self._asked = 0

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of rows of each cell, shape (cells,)."""
        return np.bincount(self.owners, minlength=len(self.centers))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Begin of each cell in `rows`, and the end of the last one, shape (cells + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """Row numbers, sorted by cell and ascending within a cell, shape (rows,)."""
        return np.argsort(self.owners, kind="stable").astype(np.int32)

    def rows_in(self, cells: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return the row numbers of each of some different cells, ascending."""
        self._asked += 1
        if self._asked > _FEW or "rows" in self.__dict__:  # the first queries do not wait for the sort
            starts = self.starts
            return [self.rows[starts[cell] : starts[cell + 1]].astype(np.int64) for cell in cells]
        wanted = np.zeros(len(self.centers), bool)
        wanted[list(cells)] = True
        rows = np.flatnonzero(wanted[self.owners])
        owners = self.owners[rows]
        return [rows[owners == cell] for cell in cells]

    @classmethod
    def read(cls, root: Path, segment: Segment, dim: int, cells: int) -> Self:
        """Read the index of a segment.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptDatastoreError: the file is damaged.
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
        return cls(codec.turned(codes.reshape(cells, -1)), owners)

    def write(self, path: Path) -> None:
        """Write the index to a file."""
        with path.open("wb") as file:
            file.write(RoundedCodec(self.centers.shape[1]).encode(self.centers).data)
            file.write(self.owners.data)


class ArrangedSegment(NamedTuple):
    """A segment with its cells."""

    segment: Segment
    cells: SegmentCells

    def has(self, centers: Keys) -> bool:
        """Check whether its cells have these centers."""
        return self.cells.centers is centers or np.array_equal(self.cells.centers, centers)

    def owners_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the cells of the live records with these ids, shape (n,); -1 if there is no such record."""
        mine = self.segment.columns.ids
        at = np.minimum(np.searchsorted(mine, ids), len(mine) - 1)
        there = mine[at] == ids
        if self.segment.dead:
            there &= ~self.segment.dead.contains(at)
        return np.where(there, self.cells.owners[at].astype(np.int64), -1)


def with_live_centers(former: Sequence[ArrangedSegment]) -> list[ArrangedSegment]:
    """Return the segments with the center of every empty cell replaced by that of the fullest cell.

    The center of a cell without live records may be the key of a deleted record. Segments whose centers
    differ from those of the first are left out.
    """
    centers = former[0].cells.centers
    alike = [one for one in former if one.has(centers)]
    owners = np.concatenate([one.cells.owners[one.segment.live_rows().ids()] for one in alike])
    counts = np.bincount(owners, minlength=len(centers))
    kept = np.where(counts, np.arange(len(centers)), counts.argmax())
    return [ArrangedSegment(one.segment, SegmentCells(centers[kept], one.cells.owners)) for one in alike]
