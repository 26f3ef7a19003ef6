"""The index of a segment: which of its rows are in which cell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, MappedFile, RoundedCodec, Segment
from knnstore.errors import CorruptDatastoreError


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCells:
    """The rows of a segment by cell.

    A file of it holds the centers, a byte for each component (see `RoundedCodec`), and the cell of each row
    (uint16, shape (rows,)).
    """

    centers: Keys
    """Shape (cells, dim), as the file holds them."""

    rows: NDArray[np.int32]
    """Row numbers by cell, ascending within it, shape (rows,)."""

    starts: NDArray[np.int64]
    """Where each cell begins in `rows`, and where the last one ends, shape (cells + 1,)."""

    @classmethod
    def of(cls, centers: Keys, owners: NDArray[np.uint16]) -> Self:
        """Arrange rows, dead or not, whose cells are these, shape (rows,)."""
        rows = np.argsort(owners, kind="stable").astype(np.int32)
        counts = np.bincount(owners, minlength=len(centers))
        return cls(centers, rows, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))

    @classmethod
    def read(cls, root: Path, segment: Segment, dim: int, cells: int) -> Self:
        """Read the index that the segment's entry names.

        Raises:
            FileNotFoundError: its file is gone.
            CorruptDatastoreError: its file is damaged.
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
        return cls.of(codec.turned(codes.reshape(cells, -1)), owners)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        with path.open("wb") as file:
            file.write(RoundedCodec(self.centers.shape[1]).encode(self.centers).data)
            file.write(self.cell_of_rows().astype(np.uint16).data)

    def cell_of_rows(self) -> NDArray[np.int32]:
        """The cell of each row, shape (rows,)."""
        owners = np.empty(len(self.rows), np.int32)
        owners[self.rows] = np.repeat(np.arange(len(self.centers), dtype=np.int32), np.diff(self.starts))
        return owners
