"""Immutable runs of records, in memory or mapped from disk."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Ids
from knnstore.datastore.embedded.manifest import IndexEntry, SegmentEntry
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.ranges import IdRanges

StoredKeys = NDArray[Any]
"""Keys as they are stored: shape (n, dim), float16, or float32 where one exceeds the range of float16."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryColumns:
    """Rows that are not on disk yet; ids ascend."""

    ids: Ids
    keys: StoredKeys

    @property
    def dtype(self) -> np.dtype[Any]:
        """The keys' type, float16 or float32."""
        return self.keys.dtype

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Copy some keys, shape (len(rows), dim)."""
        return self.keys[rows]


class MappedColumns:
    """Rows in files, mapped at once, so that they stay readable when a newer manifest drops the files.

    Args:
        root: the datastore's directory.
        entry: the segment in the manifest.
        dim: number of components of a key.
        trusted: this process wrote the files itself.

    Raises:
        FileNotFoundError: a file is not there.
        CorruptDatastoreError: a file has a wrong size.
    """

    def __init__(self, root: Path, entry: SegmentEntry, dim: int, *, trusted: bool = False) -> None:
        self.dtype = np.dtype(entry.dtype)
        self._shape = (entry.rows, dim)
        self.ids_file = MappedFile(root, entry.ids, trusted=trusted)
        self.keys_file = MappedFile(root, entry.keys, digests=entry.digests, trusted=trusted)

    @property
    def ids(self) -> Ids:
        """Ascending, shape (n,)."""
        self.ids_file.check()
        return self.ids_file.bytes.view(np.int64)

    @property
    def keys(self) -> StoredKeys:
        """All keys, shape (n, dim), checked as a whole."""
        self.keys_file.check()
        return self._keys

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Copy some keys, shape (len(rows), dim); only the blocks that hold them are checked."""
        self.keys_file.check_rows(rows, self.dtype.itemsize * self._shape[1])
        return np.asarray(self._keys[rows])

    @property
    def _keys(self) -> StoredKeys:
        return self.keys_file.bytes.view(self.dtype).reshape(self._shape)


Columns = MemoryColumns | MappedColumns
"""The ids and keys of a segment; its identity is the identity of the rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Records of one group by ascending id, some of them dead.

    Versions of a segment that differ in what is dead share their `columns`.
    """

    group: int
    rows: int
    first_id: int
    last_id: int
    columns: Columns
    dead: IdRanges = field(default_factory=IdRanges)
    """Ranges of row numbers."""

    entry: SegmentEntry | None = None
    """The segment's files; None while it is in memory only."""

    @classmethod
    def in_memory(cls, group: int, ids: Ids, keys: StoredKeys) -> "Segment":
        """Make a segment of arrays that nobody else changes; ids ascend and there is at least one."""
        return cls(group, len(ids), int(ids[0]), int(ids[-1]), MemoryColumns(ids, keys))

    @property
    def index(self) -> IndexEntry | None:
        """The index over its rows, if there is one."""
        return self.entry.index if self.entry else None

    @property
    def live(self) -> int:
        """How many rows are not dead."""
        return self.rows - self.dead.size if self.dead else self.rows

    def live_rows(self, ids: IdRanges | None = None) -> IdRanges:
        """The row numbers that are not dead, of all records or of those with some ids."""
        return self.rows_of(ids) - self.dead

    def rows_of(self, ids: IdRanges | None) -> IdRanges:
        """The row numbers of some records, dead or not; opens no file where the id range tells."""
        if ids is None:
            return IdRanges([(0, self.rows)])
        if not ids or ids.starts[0] > self.last_id or ids.stops[-1] <= self.first_id:
            return IdRanges()
        around = int(np.searchsorted(ids.starts, self.first_id, side="right")) - 1
        if around >= 0 and ids.stops[around] > self.last_id:
            return IdRanges([(0, self.rows)])
        return IdRanges(ids.rows_in(self.columns.ids))

    def rows_with(self, ids: Ids) -> IdRanges:
        """The row numbers of the records with these ids, which ascend."""
        if not len(ids) or ids[0] > self.last_id or ids[-1] < self.first_id:
            return IdRanges()
        mine = self.columns.ids
        at = np.minimum(np.searchsorted(mine, ids), self.rows - 1)
        return IdRanges.of_ids(at[mine[at] == ids])
