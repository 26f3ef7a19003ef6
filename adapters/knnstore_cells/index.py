"""The index of a segment: which of its rows are in which cell, by token within a cell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import MappedFile, Segment, tokens_of
from knnstore.errors import CorruptDatastoreError


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCells:
    """The rows of a segment by cell, and by token within a cell.

    A file of it holds the centers (float16, shape (cells, dim)), how many rows each cell has (uint32,
    shape (cells,)) and the rows (uint32, shape (rows,)), one after another.
    """

    centers: NDArray[np.float16]
    """Shape (cells, dim)."""

    rows: NDArray[np.uint32]
    """Shape (rows,)."""

    starts: NDArray[np.int64]
    """Where each cell begins in `rows`, and where the last one ends, shape (cells + 1,)."""

    @classmethod
    def of(cls, segment: Segment, centers: NDArray[np.float16], owners: NDArray[np.int64]) -> Self:
        """Arrange the rows of a segment, dead or not, whose cells are these, shape (rows,)."""
        rows = np.lexsort((tokens_of(segment.columns.ids), owners)).astype(np.uint32)
        return cls(centers, rows, _starts(np.bincount(owners, minlength=len(centers))))

    @classmethod
    def read(cls, root: Path, segment: Segment, dim: int, cells: int) -> Self:
        """Map the index that the segment's entry names.

        Raises:
            FileNotFoundError: its file is gone.
            CorruptDatastoreError: its file is damaged.
        """
        assert segment.index is not None
        file = MappedFile(root, segment.index.file)
        if file.file.size != index_size(segment.rows, dim, cells):
            raise CorruptDatastoreError(f"{file.path} belongs to other keys")
        file.check()
        parts = np.split(file.bytes, np.cumsum([2 * cells * dim, 4 * cells]))
        starts = _starts(parts[1].view(np.uint32))
        if starts[-1] != segment.rows:
            raise CorruptDatastoreError(f"{file.path} belongs to other keys")
        return cls(parts[0].view(np.float16).reshape(cells, dim), parts[2].view(np.uint32), starts)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        with path.open("wb") as file:
            for array in (self.centers, np.diff(self.starts).astype(np.uint32), self.rows):
                file.write(np.ascontiguousarray(array).data)

    def cell_of_rows(self) -> NDArray[np.int32]:
        """The cell of each row, shape (rows,)."""
        owners = np.empty(len(self.rows), np.int32)
        owners[self.rows] = np.repeat(np.arange(len(self.centers), dtype=np.int32), np.diff(self.starts))
        return owners


def index_size(rows: int, dim: int, cells: int) -> int:
    """Bytes of the file of an index."""
    return 2 * cells * dim + 4 * cells + 4 * rows


def _starts(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
