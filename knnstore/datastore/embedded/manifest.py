"""The manifest: one small file that lists all files in use of a datastore.

The files belong to *segments*. A segment is a set of immutable files with records of one group, which is a
numbered set of records such as a domain. If there are many segments, most of them are listed in *parts*:
immutable files that the manifest names. So the manifest stays small. If a segment changes, the part that
lists it is replaced.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded.codecs import CodesEntry, code_size, validate_kind
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.packed_ids import packed_size
from knnstore.datastore.records import ID_LIMIT
from knnstore.durable import NoFileError, StoredFile, read_file, write_atomically
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreNotFoundError

_FILE = re.compile(r"(segments|indexes)/\d{8,}\.(keys|ids|digests|codec|index)")
_PART = re.compile(r"segments/\d{8,}\.part")
_NAME = re.compile(r"\d{8,}")
_SHA256 = re.compile("[0-9a-f]{64}")
_KEY_SIZES = {"float16": 2, "float32": 4}  # bytes of a component by dtype
_SENSELESS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    ConfigError,
)  # of content with a right digest

FORMAT = 3
"""Number of the manifest's format that this version writes.

Format 1 has no parts; formats 1 and 2 have no codes and no packed ids.
"""

NAME = "manifest.json"
"""Name of the manifest's file in the datastore's directory."""

PART_SIZE = 64
"""Number of segments that a part lists. The manifest itself lists fewer than 2 * PART_SIZE segments."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Entry of the index of one segment (a set of files with records).

    If the index is lost, it can be built again from the keys.
    """

    file: StoredFile
    """The index file: its name, size and hash."""

    parameters: dict[str, Any]
    """Parameters that the adapter needs to use the index; JSON values."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Entry of one segment: a set of immutable files with records of one group, by ascending id.

    Row i of the files is the i-th record. Rows of deleted or replaced records are *dead*.
    """

    name: str
    """Unique number of the segment, at least 8 digits."""

    group: int
    """Group number of the segment's records."""

    rows: int
    """Number of records, dead records included."""

    dtype: str
    """numpy's name of the keys' dtype: float16; float32 if a key exceeds the range of float16; uint8 for
    codes (compressed keys)."""

    first_id: int
    """Smallest record id of the segment."""

    last_id: int
    """Largest record id of the segment."""

    keys: StoredFile
    """File of the keys or codes."""

    ids: StoredFile
    """File of the record ids."""

    digests: str
    """Name of the file with the SHA-256 digest of each block of the file of keys. The field `sha256` of
    `keys` is the SHA-256 of all these digests."""

    dead: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop) of the numbers of dead rows.

    If a row is dead because its record was replaced, the new record is in another segment.
    """

    index: IndexEntry | None = None
    """The index of the segment; None if it has none."""

    codes: CodesEntry | None = None
    """Kind and file of the codec (compressor) of the keys; None if the keys are not compressed."""

    runs: int | None = None
    """Number of runs (series of consecutive positions) in the file of packed ids; None if the file holds the
    ids as int64."""

    @property
    def needed(self) -> list[StoredFile]:
        """The files without which the segment cannot be read.

        They are the file of keys, the file of ids and, if the keys are compressed, the file of the codec
        (compressor of keys).
        """
        return [self.keys, self.ids] + ([self.codes.file] if self.codes else [])

    def file_names(self) -> list[str]:
        """Return the paths of all files of the segment, relative to the datastore's directory."""
        derived = [self.digests] + ([self.index.file.name] if self.index else [])
        return [file.name for file in self.needed] + derived

    def row_size(self, dim: int) -> int:
        """Return the number of bytes that one key takes in the file of keys.

        Args:
            dim: number of components of a key.
        """
        return code_size(self.codes.kind, dim) if self.codes else dim * _KEY_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """A part of the manifest: an immutable file that lists some of the segments of a datastore.

    A segment is a set of immutable files with records. Parts keep the file of the manifest itself small.
    """

    file: StoredFile
    """Name, size and hash of the part's file."""

    segments: tuple[SegmentEntry, ...]
    """Entries of the segments that the part lists."""

    names: frozenset[str]
    """Names (unique numbers) of the segments that the part lists."""

    @classmethod
    def write(cls, segments: Sequence[SegmentEntry], write: Callable[[bytes], StoredFile]) -> Self:
        """Write a new file that lists some segments, and return the part of the manifest for this file.

        Args:
            segments: entries of the segments to list.
            write: function that writes bytes to a new file, durably, and returns the file's name, size and
                hash.
        """
        content = _render_canonical(segments)
        return cls(write(content.encode()), tuple(segments), frozenset(entry.name for entry in segments))

    @classmethod
    def read(cls, root: Path, file: StoredFile, dim: int) -> Self:
        """Read a part of the manifest (a file that lists some segments), and check its values.

        Args:
            root: the datastore's directory.
            file: name, size and hash of the part's file.
            dim: number of components of a key; the listed file sizes must fit to this number.

        Raises:
            CorruptDatastoreError: the part is missing or damaged.
        """
        try:
            mapped = MappedFile(root, file)
            mapped.check()
        except (CorruptDatastoreError, FileNotFoundError):
            raise CorruptDatastoreError(
                f"{root / file.name} is missing or damaged: restore it from a backup"
            ) from None
        try:
            segments = tuple(_parse_segment(entry, dim) for entry in json.loads(mapped.bytes.tobytes()))
        except _SENSELESS as error:
            raise _make_invalid_error(root / file.name) from error
        return cls(file, segments, frozenset(entry.name for entry in segments))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of the manifest: dimension, metric, and the entries of all segments of a datastore.

    A segment is a set of immutable files with records of one group (a numbered set of records).
    """

    dim: int
    """Number of components of a key."""

    metric: Metric
    """Metric of the distances."""

    next_number: int = 1
    """Number of the next new file. Numbers are never reused, so a file name always has the same content."""

    listed: tuple[SegmentEntry, ...] = ()
    """Entries of the segments that the manifest's own file lists; the parts list the other segments."""

    parts: tuple[ManifestPart, ...] = ()
    """Further files that list segments."""

    @property
    def segments(self) -> list[SegmentEntry]:
        """Entries of all segments, in the order in which the segments were created."""
        every = chain(self.listed, *(part.segments for part in self.parts))
        return sorted(every, key=attrgetter("name"))

    def file_names(self) -> set[str]:
        """Return the paths of all files in use, relative to the datastore's directory.

        These are the files of all segments, and the parts of the manifest (further files that list segments).
        The manifest's own file is not included.
        """
        names = {name for entry in self.segments for name in entry.file_names()}
        return names.union(part.file.name for part in self.parts)

    def replace_segments(
        self,
        removed_names: Set[str],
        added_entries: Iterable[SegmentEntry],
        write: Callable[[bytes], StoredFile],
    ) -> "Manifest":
        """Return a new manifest in which some segments of this manifest are removed and others are added.

        The method may write new parts (files that list segments), but it does not publish the new manifest.
        The time depends on the number of changed segments, and hardly on the number of all segments.

        Args:
            removed_names: names of the segments to leave out.
            added_entries: entries of the segments to add.
            write: function that writes bytes to a new file, durably, and returns the file's name, size and
                hash; it is called for each new part.
        """
        unchanged_parts = tuple(part for part in self.parts if part.names.isdisjoint(removed_names))
        opened_segments = (part.segments for part in self.parts if not part.names.isdisjoint(removed_names))
        listed_entries = [
            entry for entry in chain(*opened_segments, self.listed) if entry.name not in removed_names
        ]
        listed_entries = sorted([*listed_entries, *added_entries], key=attrgetter("name"))
        parts = []
        while len(listed_entries) >= 2 * PART_SIZE:
            parts.append(ManifestPart.write(listed_entries[:PART_SIZE], write))
            del listed_entries[:PART_SIZE]
        return replace(self, listed=tuple(listed_entries), parts=(*unchanged_parts, *parts))

    def write(self, root: Path) -> None:
        """Replace the manifest file of a directory by this manifest, atomically and durably.

        The manifest is the list of all files in use. A process that reads the file during the call gets
        either the complete old manifest or the complete new manifest.

        Args:
            root: the datastore's directory.
        """
        content = {
            "format": FORMAT,
            "dim": self.dim,
            "metric": self.metric,
            "next_number": self.next_number,
            "segments": self.listed,
            "parts": [part.file for part in self.parts],
        }
        text = _render_canonical(content)
        write_atomically(
            root / NAME, f'{{"sha256":"{_hash_text(text)}","content":{text}}}'.encode(), "manifest"
        )

    @classmethod
    def read(cls, root: Path, known: Iterable[ManifestPart] = ()) -> "Manifest":
        """Read the manifest of a directory with all its parts (files that list segments), and check it.

        Args:
            root: the datastore's directory.
            known: parts that were read before. If the manifest still names their files, the files are not
                read again.

        Raises:
            DatastoreNotFoundError: the directory has neither a manifest nor a folder ``segments``.
            CorruptDatastoreError: the manifest is missing although the folder ``segments`` exists; the
                manifest or a part is damaged; or a newer version of knnstore wrote the manifest.
        """
        path = root / NAME
        try:
            outer = json.loads(read_file(path))
            content = outer["content"]
            intact = _hash_text(_render_canonical(content)) == outer["sha256"]
        except (FileNotFoundError, NotADirectoryError):
            if (root / "segments").exists():
                raise CorruptDatastoreError(f"{path} is missing: restore it from a backup") from None
            raise DatastoreNotFoundError(
                f"no datastore at {root}: check the path, or restore the folder from a backup"
            ) from None
        except (NoFileError, ValueError, KeyError, TypeError, RecursionError):
            intact = False
        if not intact:
            raise CorruptDatastoreError(f"{path} is damaged: restore it from a backup")
        try:
            if content.pop("format") not in range(1, FORMAT + 1):
                raise CorruptDatastoreError(f"{path} was written by a newer knnstore: upgrade the package")
            dim = content["dim"]
            _check_value(
                _are_integers(dim, content["next_number"]) and dim > 0 and content["next_number"] > 0
            )
            listed = tuple(_parse_segment(entry, dim) for entry in content.pop("segments"))
            files = [StoredFile(**file) for file in content.pop("parts", [])]
            _check_value(all(_PART.fullmatch(file.name) and _is_valid_file(file) for file in files))
            known_parts = {part.file: part for part in known}
            parts = tuple(known_parts.get(file) or ManifestPart.read(root, file, dim) for file in files)
            return cls(metric=Metric(content.pop("metric")), listed=listed, parts=parts, **content)
        except _SENSELESS as error:
            raise _make_invalid_error(path) from error


def read_signature(root: Path) -> tuple[int, int, int]:
    """Return (inode, modification time in ns, size) of the manifest's file, to notice that it was replaced.

    The manifest is the list of all files in use. The values change whenever a manifest is published. The
    function makes only one system call.

    Args:
        root: the datastore's directory.

    Raises:
        FileNotFoundError, NotADirectoryError: the directory has no manifest, or is a file.
    """
    status = os.stat(f"{root}/{NAME}")  # called for every search; creating a Path would take longer
    return status.st_ino, status.st_mtime_ns, status.st_size


def _parse_segment(entry: dict[str, Any], dim: int) -> SegmentEntry:
    """Convert the JSON object of a segment in the manifest to a `SegmentEntry`, and check all values.

    The manifest is the list of all files in use.

    Args:
        entry: the JSON object; the function removes keys from this dict.
        dim: number of components of a key; the file sizes in `entry` must fit to this number.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, ConfigError: a value is missing or not valid.
    """
    index, codes = entry.pop("index"), entry.pop("codes", None)
    segment = SegmentEntry(
        keys=StoredFile(**entry.pop("keys")),
        ids=StoredFile(**entry.pop("ids")),
        dead=tuple((start, stop) for start, stop in entry.pop("dead")),
        index=index and IndexEntry(StoredFile(**index["file"]), index["parameters"]),
        codes=codes and CodesEntry(validate_kind(codes["kind"]), StoredFile(**codes["file"])),
        **entry,
    )
    # No name may lead out of the folder, and no value of a wrong type may be used later.
    _check_value(
        _NAME.fullmatch(segment.name) and all(_FILE.fullmatch(name) for name in segment.file_names())
    )
    borders = [0, *(row for rows in segment.dead for row in rows), segment.rows]
    _check_value(_are_integers(*borders, segment.first_id, segment.last_id, segment.group))
    _check_value(all(first <= second for first, second in pairwise(borders)))
    _check_value(0 <= segment.first_id <= segment.last_id < ID_LIMIT and 0 <= segment.group < 1 << 31)
    _check_value(segment.dtype == "uint8" if segment.codes else segment.dtype in _KEY_SIZES)
    _check_value(0 < segment.rows <= 1 << 40 and segment.keys.size == segment.rows * segment.row_size(dim))
    _check_value(segment.ids.size in _list_allowed_id_sizes(segment))
    files = segment.needed + ([segment.index.file] if segment.index else [])
    _check_value(all(_is_valid_file(file) for file in files))
    _check_value(segment.index is None or isinstance(segment.index.parameters, dict))
    return segment


def _list_allowed_id_sizes(entry: SegmentEntry) -> list[int]:
    """Return the sizes in bytes that a segment's file of record ids can have.

    An unpacked file takes 8 bytes for each id. A packed file takes 2 or 3 bytes for the token of each id,
    which gives two possible sizes, and some bytes for each run (a series of consecutive positions).

    Args:
        entry: the segment's entry; `entry.runs` is None if the ids are not packed.

    Raises:
        ValueError: the number of runs is not an integer from 1 to the number of records.
    """
    if entry.runs is None:
        return [8 * entry.rows]
    _check_value(_are_integers(entry.runs) and 0 < entry.runs <= entry.rows)
    return [packed_size(entry.rows, entry.runs, wide=wide) for wide in (False, True)]


def _is_valid_file(file: StoredFile) -> bool:
    """Check whether the size and the SHA-256 in a file's entry are valid values. The file is not read.

    Returns True if the size is an integer from 0 to 2^60 - 1 and the SHA-256 has 64 hexadecimal digits.

    Args:
        file: the entry: name, size and hash of the file.
    """
    return (
        _are_integers(file.size) and 0 <= file.size < 1 << 60 and _SHA256.fullmatch(file.sha256) is not None
    )


def _are_integers(*values: object) -> bool:
    """Check whether all values are integers; also True if there are no values."""
    return all(isinstance(value, int) for value in values)


def _check_value(condition: object) -> None:
    """Raise ValueError if the condition is false."""
    if not condition:
        raise ValueError


def _make_invalid_error(path: Path) -> CorruptDatastoreError:
    """Return, without raising it, the error for a file whose hash is right but whose values are invalid."""
    return CorruptDatastoreError(f"{path} contradicts itself: restore it from a backup")


def _list_fields(entry: SegmentEntry | IndexEntry | CodesEntry | StoredFile) -> dict[str, Any]:
    """Return the fields of an entry of the manifest as a dict by name.

    A field that is itself an entry is not converted. The function is ten times as fast as
    `dataclasses.asdict`.
    """
    return {name: getattr(entry, name) for name in entry.__slots__}


def _render_canonical(content: Any) -> str:
    """Convert content to JSON text, keys sorted and without spaces, so that equal content gives equal text.

    Args:
        content: JSON values and entries of the manifest (the list of all files in use).
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=_list_fields)


def _hash_text(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8 as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
