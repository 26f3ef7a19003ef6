"""Segments: immutable sets of records of one group, in memory or in files that are mapped into memory."""

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
"""Keys in their stored precision, shape (n, dim).

The dtype is float16; it is float32 if a component exceeds the range of float16, or if the keys were decoded
from codes (compressed keys).
"""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryColumns:
    """Ids and keys of a segment (a set of records) that is not on disk yet, by ascending id."""

    ids: Ids
    """Record ids, int64, ascending, shape (n,)."""

    keys: StoredKeys
    """Keys, float16 or float32, shape (n, dim)."""

    problem: ClassVar[str | None] = None
    """None, because records in memory have no file that could be damaged."""

    codec_file: ClassVar[CodecFile | None] = None
    """None, because keys in memory are not compressed."""

    codec: ClassVar[Codec | None] = None
    """None, because keys in memory are not compressed."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the keys, float16 or float32."""
        return self.keys.dtype

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Return a copy of the keys of some records, shape (n, dim).

        Args:
            rows: row numbers of the records, int64, shape (n,); 0 is the segment's first record.
        """
        return self.keys[rows]

    def ids_at(self, rows: NDArray[np.int64]) -> Ids:
        """Return a copy of the ids of some records, int64, shape (n,).

        Args:
            rows: row numbers of the records, int64, shape (n,); 0 is the segment's first record.
        """
        return self.ids[rows]

    def codes_at(self, rows: NDArray[np.int64], codec_file: CodecFile) -> Codes:
        """Compress the keys of some records with a codec, and return the codes (compressed keys).

        Args:
            rows: row numbers of the records, int64, shape (n,); 0 is the segment's first record.
            codec_file: the codec (compressor of keys).

        Returns:
            Codes, uint8, shape (n, size).
        """
        return codec_file.codec.encode(self.keys[rows].astype(np.float32))

    def mark_damaged(self, problem: str) -> None:
        """Do nothing, because records in memory have no file that could be damaged."""


class MappedColumns:
    """Ids and keys of a segment (a set of records) in files on disk.

    The constructor maps the files into memory, so that they stay readable when another process removes them.
    The constructor raises no error for a missing or damaged file. Reading from such a file later raises
    CorruptDatastoreError. The segment's other files can still be read.

    Args:
        root: the datastore's directory.
        entry: the segment's entry in the manifest (the list of all files in use).
        dim: number of components of a key.
        damaged_segments: group number of each damaged segment of the datastore, by the file of its keys. This
            class adds its segment when a file turns out to be missing or damaged.
        trusted: True if this process wrote the files itself, so that their content is not checked.
        codec_file: the codec (compressor) with which the keys were compressed; None if the keys are not
            compressed.
    """

    problem: str | None
    """One line that says which file is damaged and what to do; None if no damage is known."""

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
        """All record ids, int64, ascending, shape (n,). Packed ids are unpacked once, and kept in memory."""
        if self._all_ids is None:
            packed = self._read_packed_ids()
            self._all_ids = self.ids_file.bytes.view(np.int64) if packed is None else packed.decode_all()
        return self._all_ids

    @property
    def codec(self) -> Codec | None:
        """The codec (compressor) with which the keys were compressed; None if the keys are not compressed."""
        if self.codec_file is None:
            return None
        with self._note_damage():
            return self.codec_file.codec

    @property
    def keys(self) -> StoredKeys:
        """All keys, shape (n, dim); compressed keys are decoded. The whole file is checked first.

        Raises CorruptDatastoreError if the file is missing or damaged.
        """
        file = self.keys_file
        with self._note_damage():
            file.check()
        return self._decode_keys(self._stored_values)

    def keys_at(self, rows: NDArray[np.int64]) -> StoredKeys:
        """Return a copy of the keys of some records, shape (n, dim); compressed keys are decoded.

        Only the blocks of the file that contain these keys are checked.

        Args:
            rows: row numbers of the records, int64, shape (n,); 0 is the segment's first record.

        Raises:
            CorruptDatastoreError: the file is missing, or a checked block is damaged.
        """
        return self._decode_keys(self._read_stored_rows(rows))

    def ids_at(self, rows: NDArray[np.int64]) -> Ids:
        """Return a copy of the ids of some records, int64, in the shape of `rows`.

        Args:
            rows: row numbers of the records, int64; 0 is the segment's first record.
        """
        packed = self._read_packed_ids()
        return self.ids[rows] if packed is None else packed.decode_rows(rows)

    def codes_at(self, rows: NDArray[np.int64], codec_file: CodecFile) -> Codes:
        """Return the keys of some records as codes (compressed keys) of a codec.

        If the keys are stored as codes of this codec, the stored codes are returned. Otherwise the keys are
        compressed now.

        Args:
            rows: row numbers of the records, int64, shape (n,); 0 is the segment's first record.
            codec_file: the codec (compressor of keys).

        Returns:
            Codes, uint8, shape (n, size).
        """
        if self.codec_file is not None and self.codec_file.entry == codec_file.entry:
            return self._read_stored_rows(rows)
        return codec_file.codec.encode(self.keys_at(rows).astype(np.float32))

    def compute_block_digests(self) -> bytes:
        """Return the SHA-256 digest of each block of the file of keys, after checking the file's SHA-256.

        The digests have 32 bytes each and follow one another. Raises CorruptDatastoreError if the file is
        missing or damaged.
        """
        file = self.keys_file
        with self._note_damage():
            return file.compute_block_digests()

    def mark_damaged(self, problem: str) -> None:
        """Mark the segment as damaged, so that later searches leave its records out.

        Args:
            problem: one line that says what is damaged. It is ignored if a problem is known already.
        """
        self._record_problem(self.problem or problem)

    @property
    def ids_file(self) -> MappedFile:
        """The mapped file of the ids. Raises CorruptDatastoreError if it is missing or has a wrong size."""
        return self._require_file(self._ids_file)

    @property
    def keys_file(self) -> MappedFile:
        """The mapped file of the keys. Raises CorruptDatastoreError if it is missing or has a wrong size."""
        return self._require_file(self._keys_file)

    def _map_file(
        self, root: Path, file: StoredFile, digests: str | None, trusted: bool
    ) -> MappedFile | CorruptDatastoreError:
        """Map a file of the segment (an immutable set of records) into memory.

        If the file is missing or has a wrong size, the segment is marked as damaged, and the error is
        returned, not raised.

        Args:
            root: the datastore's directory.
            file: name, size and hash of the file.
            digests: name of the file with the digests of the file's blocks; None if there is no such file.
            trusted: True if this process wrote the file, so that its content is not checked.

        Returns:
            The mapped file, or the error.
        """
        try:
            with self._note_damage():
                return MappedFile(root, file, digests=digests, trusted=trusted)
        except CorruptDatastoreError as error:
            return error

    @staticmethod
    def _require_file(file: MappedFile | CorruptDatastoreError) -> MappedFile:
        """Return a result of `_map_file` if it is a file; raise CorruptDatastoreError if it is an error."""
        if isinstance(file, CorruptDatastoreError):
            raise CorruptDatastoreError(str(file))
        return file

    @contextmanager
    def _note_damage(self) -> Iterator[None]:
        """Mark the segment as damaged if the ``with`` block finds that a file is missing or damaged.

        Raises:
            CorruptDatastoreError: the block raised FileNotFoundError or CorruptDatastoreError. The message
                also says what the user can do.
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
        """Set the attribute `problem`, and add the segment to the damaged segments of the datastore."""
        self.problem = problem
        self._damaged_segments[self._entry.keys] = (
            self._entry.group
        )  # after `problem`: a thread that sees this entry must find the problem

    @property
    def _stored_values(self) -> NDArray[Any]:
        """The rows of the file of keys: keys, shape (n, dim), or codes (compressed keys), shape (n, size).

        The content is not compared with its checksum.
        """
        return self.keys_file.bytes.view(self._entry.dtype).reshape(self._entry.rows, -1)

    def _read_stored_rows(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Check the blocks of the file of keys that contain the given rows, and return a copy of the rows.

        Args:
            rows: row numbers of records, int64, shape (n,).

        Returns:
            Keys, shape (n, dim), or codes (compressed keys), shape (n, size), as they are stored.
        """
        file = self.keys_file
        with self._note_damage():
            file.check_rows(rows, self._row_size)
        return np.asarray(self._stored_values[rows])

    def _decode_keys(self, stored: NDArray[Any]) -> StoredKeys:
        """Decode rows of the file of keys to keys, shape (n, dim).

        Args:
            stored: codes (compressed keys), shape (n, size), which are decoded; or uncompressed keys, shape
                (n, dim), which are returned unchanged.
        """
        codec = self.codec
        return stored if codec is None else codec.decode(stored)

    def _read_packed_ids(self) -> PackedIds | None:
        """Check the file of ids, and return the object that reads its packed ids.

        Returns None if the ids are not packed. The object is created only once. Raises CorruptDatastoreError
        if the file is missing or damaged.
        """
        file = self.ids_file
        with self._note_damage():
            file.check()
        if self._packed_ids is None and self._entry.runs is not None:
            self._packed_ids = PackedIds(file.bytes, self._entry.rows, self._entry.runs)
        return self._packed_ids


def describe_damage(problem: str) -> str:
    """Return a message about damaged keys or ids: the problem, then what the user can do.

    Args:
        problem: one line that says which file is damaged.
    """
    return (
        f"{problem}: restore it from a backup, or remove the documents that `knnstore verify` names and add "
        "them again"
    )


Columns = MemoryColumns | MappedColumns
"""The ids and keys of a segment. Versions of a segment that differ in deleted records share this object."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """An immutable set of records of one group, by ascending id.

    A group is a numbered set of records, such as a domain. Row i is the i-th record. A row is *dead* if its
    record was deleted, or replaced by a record in another segment; else it is *live*. Marking rows as dead
    creates a new version of the segment, which shares the ids and keys.
    """

    group: int
    """Group number of the records."""

    rows: int
    """Number of rows, dead rows included."""

    first_id: int
    """Smallest record id."""

    last_id: int
    """Largest record id."""

    columns: Columns
    """Ids and keys of all rows."""

    dead: IdRanges = field(default_factory=IdRanges)
    """Numbers of the dead rows, as ranges."""

    entry: SegmentEntry | None = None
    """The segment's entry in the manifest, with its files; None while the segment is in memory only."""

    @classmethod
    def from_arrays(cls, group: int, ids: Ids, keys: StoredKeys) -> "Segment":
        """Create a segment in memory from arrays, which the caller must not change afterwards.

        A segment is an immutable set of records.

        Args:
            group: group number of the records.
            ids: record ids, int64, shape (n,), ascending, n >= 1.
            keys: keys in the precision in which they will be stored, float16 or float32, shape (n, dim).
        """
        return cls(group, len(ids), int(ids[0]), int(ids[-1]), MemoryColumns(ids, keys))

    @property
    def index(self) -> IndexEntry | None:
        """Entry of the segment's index file; None if the segment has no index or is in memory only.

        A segment is an immutable set of records.
        """
        return self.entry.index if self.entry else None

    @property
    def live(self) -> int:
        """Number of live rows: rows whose records are neither deleted nor replaced."""
        return self.rows - self.dead.size if self.dead else self.rows

    def mark_dead(self, rows: IdRanges) -> "Segment":
        """Return a version of the segment (an immutable set of records) in which more records are dead.

        A record is dead if it was deleted or replaced. The segment itself is not changed.

        Args:
            rows: row numbers of the additional dead records, as ranges. If there are none, the segment itself
                is returned.
        """
        return replace(self, dead=self.dead | rows) if rows else self

    def live_rows(self, ids: IdRanges | None = None) -> IdRanges:
        """Return the row numbers, as ranges, of the records that are neither deleted nor replaced.

        Args:
            ids: ids of the records to return; None returns all records that are not deleted or replaced.
        """
        return self.find_rows_in_ranges(ids) - self.dead

    def find_rows_in_ranges(self, ids: IdRanges | None) -> IdRanges:
        """Return the row numbers, as ranges, of the records whose id is in `ids`, including deleted records.

        The file of ids is not read if the first and the last id of the segment (an immutable set of records)
        show already that all records or no records are selected.

        Args:
            ids: record ids; ids without a record are ignored. None returns all rows.

        Raises:
            CorruptDatastoreError: the file of ids is damaged.
        """
        if ids is None:
            return IdRanges([(0, self.rows)])
        if not ids or ids.starts[0] > self.last_id or ids.stops[-1] <= self.first_id:
            return IdRanges()
        range_index = int(np.searchsorted(ids.starts, self.first_id, side="right")) - 1
        if range_index >= 0 and ids.stops[range_index] > self.last_id:
            return IdRanges([(0, self.rows)])
        return IdRanges(ids.find_slices(self.columns.ids))

    def find_rows_if_readable(self, ids: IdRanges) -> IdRanges:
        """Return the row numbers, as ranges, of the records whose id is in `ids`, including deleted records.

        If the file of ids is damaged, the result is empty and no error is raised.

        Args:
            ids: record ids; ids without a record are ignored.
        """
        try:
            return self.find_rows_in_ranges(ids)
        except CorruptDatastoreError:
            return IdRanges()

    def find_rows_of_ids(self, ids: Ids) -> IdRanges:
        """Return the row numbers, as ranges, of the records whose id is in `ids`, including deleted records.

        Args:
            ids: record ids, int64, shape (n,), ascending; ids without a record are ignored. n may be 0.

        Raises:
            CorruptDatastoreError: the file of ids is damaged.
        """
        if not len(ids) or ids[0] > self.last_id or ids[-1] < self.first_id:
            return IdRanges()
        segment_ids = self.columns.ids
        positions = np.minimum(np.searchsorted(segment_ids, ids), self.rows - 1)
        return IdRanges.from_ids(positions[segment_ids[positions] == ids])
