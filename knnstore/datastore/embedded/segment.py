"""Segments: immutable records of one group, in memory or mapped from disk."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Ids
from knnstore.datastore.embedded.codecs import Codec, CodecFile, Codes
from knnstore.datastore.embedded.manifest import IndexEntry, SegmentEntry
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.packed_ids import PackedIds
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import CorruptDatastoreError

StoredKeys = NDArray[Any]
"""Keys in their stored precision, shape (n, dim): float16; float32 if one exceeds the range of float16 or if
they were decoded from codes."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryColumns:
    """Rows that are not on disk yet, by ascending id."""

    ids: Ids
    keys: StoredKeys
    problem: ClassVar[str | None] = None
    codec_file: ClassVar[CodecFile | None] = None
    codec: ClassVar[Codec | None] = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the keys, float16 or float32."""
        return self.keys.dtype

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Return a copy of the keys of some rows, shape (len(rows), dim)."""
        return self.keys[rows]

    def ids_at(self, rows: NDArray[np.int64]) -> Ids:
        """Return a copy of the ids of some rows."""
        return self.ids[rows]

    def codes_at(self, rows: NDArray[np.int64], by: CodecFile) -> Codes:
        """Return the codes of the keys of some rows by a codec, shape (len(rows), size)."""
        return by.codec.encode(self.keys[rows].astype(np.float32))

    def set_aside(self, problem: str) -> None:
        """Do nothing: rows in memory have no file that could be damaged."""


class MappedColumns:
    """Rows in files. They are mapped at once, so they stay readable when a newer manifest drops the files.

    Using a missing or damaged file raises CorruptDatastoreError. The other file can still be read.

    Args:
        root: the datastore's directory.
        entry: the segment's entry in the manifest.
        dim: number of components of a key.
        aside: the damaged segments of the datastore: the file of the keys and the group of each. This class
            adds its segment when a file is missing or damaged.
        trusted: True if this process wrote the files itself.
        codec_file: the codec of the keys; None if they are not coded.
    """

    problem: str | None
    """One line about a damaged file and what to do; None if no damage is known."""

    def __init__(
        self,
        root: Path,
        entry: SegmentEntry,
        dim: int,
        aside: dict[StoredFile, int],
        *,
        trusted: bool = False,
        codec_file: CodecFile | None = None,
    ) -> None:
        self.dtype = np.dtype(np.float32 if codec_file else entry.dtype)
        self.codec_file = codec_file
        self.problem = None
        self._entry = entry
        self._aside = aside
        self._row_size = entry.row_size(dim)
        self._all_ids: Ids | None = None
        self._packed_ids: PackedIds | None = None
        self._ids_file = self._mapped(root, entry.ids, None, trusted)
        self._keys_file = self._mapped(root, entry.keys, entry.digests, trusted)
        if codec_file is not None:
            with suppress(CorruptDatastoreError), self._noticing():
                codec_file.map()

    @property
    def ids(self) -> Ids:
        """Ascending, shape (n,)."""
        if self._all_ids is None:
            packed = self._packed()
            self._all_ids = self.ids_file.bytes.view(np.int64) if packed is None else packed.all()
        return self._all_ids

    @property
    def codec(self) -> Codec | None:
        """The codec of the keys; None if they are not coded."""
        if self.codec_file is None:
            return None
        with self._noticing():
            return self.codec_file.codec

    @property
    def keys(self) -> StoredKeys:
        """All keys, shape (n, dim). The whole file is checked first."""
        file = self.keys_file
        with self._noticing():
            file.check()
        return self._decoded(self._stored)

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Return a copy of the keys of some rows, shape (len(rows), dim); check only their blocks."""
        return self._decoded(self._stored_at(rows))

    def ids_at(self, rows: NDArray[np.int64]) -> Ids:
        """Return a copy of the ids of some rows."""
        packed = self._packed()
        return self.ids[rows] if packed is None else packed.at(rows)

    def codes_at(self, rows: NDArray[np.int64], by: CodecFile) -> Codes:
        """Return the codes of the keys of some rows by a codec, shape (len(rows), size)."""
        if self.codec_file is not None and self.codec_file.entry == by.entry:
            return self._stored_at(rows)
        return by.codec.encode(self.keys_at(rows).astype(np.float32))

    def digests(self) -> bytes:
        """Compute the digests of the blocks of the file of keys, 32 bytes each."""
        file = self.keys_file
        with self._noticing():
            return file.digests()

    def set_aside(self, problem: str) -> None:
        """Set the segment aside because of a problem. A problem that is known already stays."""
        self._note(self.problem or problem)

    @property
    def ids_file(self) -> MappedFile:
        """The file of the ids. Raises CorruptDatastoreError if it could not be mapped."""
        return self._there(self._ids_file)

    @property
    def keys_file(self) -> MappedFile:
        """The file of the keys. Raises CorruptDatastoreError if it could not be mapped."""
        return self._there(self._keys_file)

    def _mapped(
        self, root: Path, file: StoredFile, digests: str | None, trusted: bool
    ) -> MappedFile | CorruptDatastoreError:
        try:
            with self._noticing():
                return MappedFile(root, file, digests=digests, trusted=trusted)
        except CorruptDatastoreError as error:
            return error

    @staticmethod
    def _there(file: MappedFile | CorruptDatastoreError) -> MappedFile:
        if isinstance(file, CorruptDatastoreError):
            raise CorruptDatastoreError(str(file))
        return file

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Set the segment aside if the block finds a file missing or damaged; raise the error with advice."""
        try:
            yield
        except FileNotFoundError as error:
            self._note(damage(f"{error.filename} is missing"))
        except CorruptDatastoreError as error:
            self._note(damage(str(error)))
        else:
            return
        raise CorruptDatastoreError(self.problem) from None

    def _note(self, problem: str) -> None:
        self.problem = problem
        self._aside[self._entry.keys] = (
            self._entry.group
        )  # after `problem`: a thread that sees this entry must find the problem

    @property
    def _stored(self) -> NDArray[Any]:
        return self.keys_file.bytes.view(self._entry.dtype).reshape(self._entry.rows, -1)

    def _stored_at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        file = self.keys_file
        with self._noticing():
            file.check_rows(rows, self._row_size)
        return np.asarray(self._stored[rows])

    def _decoded(self, stored: NDArray[Any]) -> StoredKeys:
        codec = self.codec
        return stored if codec is None else codec.decode(stored)

    def _packed(self) -> PackedIds | None:
        """Return the packed ids after checking the file; None if the ids are not packed."""
        file = self.ids_file
        with self._noticing():
            file.check()
        if self._packed_ids is None and self._entry.runs is not None:
            self._packed_ids = PackedIds(file.bytes, self._entry.rows, self._entry.runs)
        return self._packed_ids


def damage(problem: str) -> str:
    """Return a problem of keys or ids with the advice what to do."""
    return (
        f"{problem}: restore it from a backup, or remove the documents that `knnstore verify` names and add "
        "them again"
    )


Columns = MemoryColumns | MappedColumns
"""The ids and keys of a segment. Segments with the same `Columns` object have the same rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Records of one group by ascending id. Some may be dead.

    Versions of a segment that differ only in their dead rows share their `columns`.
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
        """Create a segment of arrays that nobody else changes.

        Args:
            group: the group of the records.
            ids: int64, shape (n,), ascending, n >= 1.
            keys: shape (n, dim), see `stored_keys`.
        """
        return cls(group, len(ids), int(ids[0]), int(ids[-1]), MemoryColumns(ids, keys))

    @property
    def index(self) -> IndexEntry | None:
        """The index of the segment; None if it has none."""
        return self.entry.index if self.entry else None

    @property
    def live(self) -> int:
        """Number of live rows."""
        return self.rows - self.dead.size if self.dead else self.rows

    def without(self, rows: IdRanges) -> "Segment":
        """Return a version of the segment with more dead rows."""
        return replace(self, dead=self.dead | rows) if rows else self

    def live_rows(self, ids: IdRanges | None = None) -> IdRanges:
        """Return the numbers of the live rows, of all records or of those with `ids`."""
        return self.rows_of(ids) - self.dead

    def rows_of(self, ids: IdRanges | None) -> IdRanges:
        """Return the row numbers of records with `ids`, live or dead; None gives all rows.

        Reads no file if the first and last id of the segment decide.
        """
        if ids is None:
            return IdRanges([(0, self.rows)])
        if not ids or ids.starts[0] > self.last_id or ids.stops[-1] <= self.first_id:
            return IdRanges()
        around = int(np.searchsorted(ids.starts, self.first_id, side="right")) - 1
        if around >= 0 and ids.stops[around] > self.last_id:
            return IdRanges([(0, self.rows)])
        return IdRanges(ids.rows_in(self.columns.ids))

    def rows_known(self, ids: IdRanges) -> IdRanges:
        """Return `rows_of(ids)`; empty if the ids cannot be read because of damage."""
        try:
            return self.rows_of(ids)
        except CorruptDatastoreError:
            return IdRanges()

    def rows_with(self, ids: Ids) -> IdRanges:
        """Return the row numbers of the records with `ids`, int64, ascending. Other ids are ignored."""
        if not len(ids) or ids[0] > self.last_id or ids[-1] < self.first_id:
            return IdRanges()
        mine = self.columns.ids
        at = np.minimum(np.searchsorted(mine, ids), self.rows - 1)
        return IdRanges.of_ids(at[mine[at] == ids])
