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
    """Ids and keys of a segment that is not on disk yet, by ascending id."""

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

    def codes_at(self, rows: NDArray[np.int64], codec_file: CodecFile) -> Codes:
        """Return the codes of the keys of some rows, encoded with a codec, uint8, shape (len(rows), size)."""
        return codec_file.codec.encode(self.keys[rows].astype(np.float32))

    def mark_damaged(self, problem: str) -> None:
        """Do nothing: rows in memory have no file that could be damaged."""


class MappedColumns:
    """Ids and keys of a segment on disk.

    The constructor maps the files, so that they stay readable when a newer manifest drops them. It raises no
    error for a missing or damaged file; using this file later raises CorruptDatastoreError. The segment's
    other files can still be read.

    Args:
        root: the datastore's directory.
        entry: the segment's entry in the manifest.
        dim: number of components of a key.
        damaged_segments: groups of the damaged segments of the datastore, by the file of their keys. This
            class adds its segment when a file turns out to be missing or damaged.
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
        damaged_segments: dict[StoredFile, int],
        *,
        trusted: bool = False,
        codec_file: CodecFile | None = None,
    ) -> None:
        self.dtype = np.dtype(np.float32 if codec_file else entry.dtype)
        self.codec_file = codec_file
        self.problem = None
        self._entry = entry
        self._damaged_segments = damaged_segments
        self._row_size = entry.row_size(dim)
        self._all_ids: Ids | None = None
        self._packed_ids: PackedIds | None = None
        self._ids_file = self._map_file(root, entry.ids, None, trusted)
        self._keys_file = self._map_file(root, entry.keys, entry.digests, trusted)
        if codec_file is not None:
            with suppress(CorruptDatastoreError), self._note_damage():
                codec_file.map()

    @property
    def ids(self) -> Ids:
        """All ids, int64, ascending, shape (n,). Packed ids are unpacked at the first use, and kept."""
        if self._all_ids is None:
            packed = self._read_packed_ids()
            self._all_ids = self.ids_file.bytes.view(np.int64) if packed is None else packed.all()
        return self._all_ids

    @property
    def codec(self) -> Codec | None:
        """The codec of the keys; None if they are not coded."""
        if self.codec_file is None:
            return None
        with self._note_damage():
            return self.codec_file.codec

    @property
    def keys(self) -> StoredKeys:
        """All keys, shape (n, dim), decoded if they are coded. The whole file is checked first."""
        file = self.keys_file
        with self._note_damage():
            file.check()
        return self._decode_keys(self._stored_values)

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Return a copy of the keys of some rows, shape (len(rows), dim), decoded if they are coded.

        Only the blocks of the file that hold these rows are checked.
        """
        return self._decode_keys(self._stored_at(rows))

    def ids_at(self, rows: NDArray[np.int64]) -> Ids:
        """Return a copy of the ids of some rows."""
        packed = self._read_packed_ids()
        return self.ids[rows] if packed is None else packed.at(rows)

    def codes_at(self, rows: NDArray[np.int64], codec_file: CodecFile) -> Codes:
        """Return the codes of the keys of some rows with a codec, uint8, shape (len(rows), size).

        The stored codes are returned if they are of this codec; otherwise the keys are encoded.
        """
        if self.codec_file is not None and self.codec_file.entry == codec_file.entry:
            return self._stored_at(rows)
        return codec_file.codec.encode(self.keys_at(rows).astype(np.float32))

    def digests(self) -> bytes:
        """Compute the digests of the blocks of the file of keys, 32 bytes each."""
        file = self.keys_file
        with self._note_damage():
            return file.digests()

    def mark_damaged(self, problem: str) -> None:
        """Mark the segment as damaged; see `reader`. A problem that is known already is not replaced."""
        self._record_problem(self.problem or problem)

    @property
    def ids_file(self) -> MappedFile:
        """The file of the ids. Raises CorruptDatastoreError if it could not be mapped."""
        return self._require_file(self._ids_file)

    @property
    def keys_file(self) -> MappedFile:
        """The file of the keys. Raises CorruptDatastoreError if it could not be mapped."""
        return self._require_file(self._keys_file)

    def _map_file(
        self, root: Path, file: StoredFile, digests: str | None, trusted: bool
    ) -> MappedFile | CorruptDatastoreError:
        """Map a file of the segment; see `MappedFile` for the arguments.

        If the file is missing or damaged, marks the segment as damaged, and returns the error without raising
        it.
        """
        try:
            with self._note_damage():
                return MappedFile(root, file, digests=digests, trusted=trusted)
        except CorruptDatastoreError as error:
            return error

    @staticmethod
    def _require_file(file: MappedFile | CorruptDatastoreError) -> MappedFile:
        """Return the file, or raise a CorruptDatastoreError if the file could not be mapped."""
        if isinstance(file, CorruptDatastoreError):
            raise CorruptDatastoreError(str(file))
        return file

    @contextmanager
    def _note_damage(self) -> Iterator[None]:
        """Mark the segment as damaged if the block finds a file missing or damaged.

        Raises:
            CorruptDatastoreError: in place of the block's FileNotFoundError or CorruptDatastoreError, with
                advice.
        """
        try:
            yield
        except FileNotFoundError as error:
            self._record_problem(describe_damage(f"{error.filename} is missing"))
        except CorruptDatastoreError as error:
            self._record_problem(describe_damage(str(error)))
        else:
            return
        raise CorruptDatastoreError(self.problem) from None

    def _record_problem(self, problem: str) -> None:
        """Set `problem`, and add the segment to the damaged segments of the datastore."""
        self.problem = problem
        self._damaged_segments[self._entry.keys] = (
            self._entry.group
        )  # after `problem`: a thread that sees this entry must find the problem

    @property
    def _stored_values(self) -> NDArray[Any]:
        """All keys or codes as stored, shape (n, components or bytes), not checked."""
        return self.keys_file.bytes.view(self._entry.dtype).reshape(self._entry.rows, -1)

    def _stored_at(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Check the blocks that hold some rows, and return a copy of the keys or codes as stored."""
        file = self.keys_file
        with self._note_damage():
            file.check_rows(rows, self._row_size)
        return np.asarray(self._stored_values[rows])

    def _decode_keys(self, stored: NDArray[Any]) -> StoredKeys:
        """Return stored keys unchanged, or decode stored codes to keys."""
        codec = self.codec
        return stored if codec is None else codec.decode(stored)

    def _read_packed_ids(self) -> PackedIds | None:
        """Check the file of ids, and return its packed ids, cached; None if the ids are not packed."""
        file = self.ids_file
        with self._note_damage():
            file.check()
        if self._packed_ids is None and self._entry.runs is not None:
            self._packed_ids = PackedIds(file.bytes, self._entry.rows, self._entry.runs)
        return self._packed_ids


def describe_damage(problem: str) -> str:
    """Return a message: a problem of keys or ids, and what the user can do about it."""
    return (
        f"{problem}: restore it from a backup, or remove the documents that `knnstore verify` names and add "
        "them again"
    )


Columns = MemoryColumns | MappedColumns
"""The ids and keys of a segment. Segments with the same `Columns` object have the same rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Records of one group by ascending id. Some rows may be dead: deleted, or replaced in another segment.

    A segment is immutable. Marking rows dead makes a new version of the segment, which shares the `columns`.
    """

    group: int
    rows: int
    first_id: int
    last_id: int
    columns: Columns
    dead: IdRanges = field(default_factory=IdRanges)
    """Numbers of the dead rows, as ranges."""

    entry: SegmentEntry | None = None
    """The segment's files; None while it is in memory only."""

    @classmethod
    def in_memory(cls, group: int, ids: Ids, keys: StoredKeys) -> "Segment":
        """Create a segment in memory from arrays, which the caller must not change afterwards.

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
        """Return a version of the segment in which `rows`, ranges of row numbers, are dead too."""
        return replace(self, dead=self.dead | rows) if rows else self

    def live_rows(self, ids: IdRanges | None = None) -> IdRanges:
        """Return the numbers of the live rows as ranges; with `ids` only rows of records with these ids."""
        return self.rows_of(ids) - self.dead

    def rows_of(self, ids: IdRanges | None) -> IdRanges:
        """Return the row numbers, as ranges, of the records with `ids`, live or dead; None gives all rows.

        Reads no file if the first and last id of the segment decide that no row or every row is selected.
        """
        if ids is None:
            return IdRanges([(0, self.rows)])
        if not ids or ids.starts[0] > self.last_id or ids.stops[-1] <= self.first_id:
            return IdRanges()
        range_index = int(np.searchsorted(ids.starts, self.first_id, side="right")) - 1
        if range_index >= 0 and ids.stops[range_index] > self.last_id:
            return IdRanges([(0, self.rows)])
        return IdRanges(ids.rows_in(self.columns.ids))

    def rows_known(self, ids: IdRanges) -> IdRanges:
        """Return `rows_of(ids)`; empty if the ids cannot be read because of damage."""
        try:
            return self.rows_of(ids)
        except CorruptDatastoreError:
            return IdRanges()

    def rows_with(self, ids: Ids) -> IdRanges:
        """Return the row numbers, as ranges, of the records with some ids, live or dead.

        Args:
            ids: int64, shape (n,), ascending; ids without a record are ignored.
        """
        if not len(ids) or ids[0] > self.last_id or ids[-1] < self.first_id:
            return IdRanges()
        segment_ids = self.columns.ids
        positions = np.minimum(np.searchsorted(segment_ids, ids), self.rows - 1)
        return IdRanges.of_ids(positions[segment_ids[positions] == ids])
