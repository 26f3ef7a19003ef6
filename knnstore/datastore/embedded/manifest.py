"""The manifest: one small file that names all files of the datastore.

If there are many segments, most are listed in *parts*: immutable files that the manifest names. So the
manifest stays small. A change writes new parts in place of those that list a changed segment.
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
from knnstore.datastore.embedded.codecs import CodesEntry, checked_kind, code_size
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.packed_ids import packed_size
from knnstore.datastore.records import ID_LIMIT
from knnstore.durable import NoFileError, StoredFile, publish, read_file
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
"""Format of the manifest. Format 1 has no parts; formats 1 and 2 have no codes and no packed ids."""

NAME = "manifest.json"
PART_SIZE = 64
"""Number of segments of a part. The manifest itself lists fewer than twice as many."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An index of one segment's rows, built by an adapter. It can be built again from the keys."""

    file: StoredFile
    parameters: dict[str, Any]
    """Parameters that the adapter needs to use the index; JSON values."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Entry of one immutable segment, which holds records of one group by ascending id."""

    name: str
    group: int
    rows: int
    dtype: str
    """numpy's name of the keys' dtype: float16; float32 if a key exceeds the range of float16; uint8 for
    codes."""

    first_id: int
    last_id: int
    keys: StoredFile
    ids: StoredFile
    digests: str
    """Name of the file with the digests of the keys' blocks. Its SHA-256 is the `sha256` of `keys`."""

    dead: tuple[tuple[int, int], ...] = ()
    """Ranges of rows that were deleted or replaced. The same id may be live in another segment."""

    index: IndexEntry | None = None

    codes: CodesEntry | None = None
    """The coding of the keys; None if they are not coded."""

    runs: int | None = None
    """Number of runs of positions in the file of ids, see `PackedIds`; None if the ids are not packed."""

    @property
    def needed(self) -> list[StoredFile]:
        """The files without which the segment cannot be read."""
        return [self.keys, self.ids] + ([self.codes.file] if self.codes else [])

    def file_names(self) -> list[str]:
        """Return the names of all files of the segment."""
        derived = [self.digests] + ([self.index.file.name] if self.index else [])
        return [file.name for file in self.needed] + derived

    def row_size(self, dim: int) -> int:
        """Return the bytes of a stored key of `dim` components."""
        return code_size(self.codes.kind, dim) if self.codes else dim * _KEY_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """A part of the manifest: an immutable file that lists some segments."""

    file: StoredFile
    segments: tuple[SegmentEntry, ...]
    names: frozenset[str]
    """Names of the segments."""

    @classmethod
    def write(cls, segments: Sequence[SegmentEntry], write: Callable[[bytes], StoredFile]) -> Self:
        """Write a new part that lists some segments.

        Args:
            segments: segments to list.
            write: writes the content to a new file, durably, and returns the file.
        """
        content = _render_canonical(segments)
        return cls(write(content.encode()), tuple(segments), frozenset(entry.name for entry in segments))

    @classmethod
    def read(cls, root: Path, file: StoredFile, dim: int) -> Self:
        """Read a part of the manifest and check it.

        Args:
            root: the datastore's directory.
            file: file of the part.
            dim: number of components of a key; the sizes of the segments' files must fit to it.

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
    """Content of the manifest: dimension, metric, and the files of all segments of a datastore."""

    dim: int
    metric: Metric
    next_number: int = 1
    """Number of the next file. Numbers are never reused, so the content behind a name never changes."""

    listed: tuple[SegmentEntry, ...] = ()
    """The segments that no part lists."""

    parts: tuple[ManifestPart, ...] = ()

    @property
    def segments(self) -> list[SegmentEntry]:
        """All segments in the order in which they were created."""
        every = chain(self.listed, *(part.segments for part in self.parts))
        return sorted(every, key=attrgetter("name"))

    def file_names(self) -> set[str]:
        """Return the names of all files, including the parts."""
        names = {name for entry in self.segments for name in entry.file_names()}
        return names.union(part.file.name for part in self.parts)

    def changed(
        self, gone: Set[str], fresh: Iterable[SegmentEntry], write: Callable[[bytes], StoredFile]
    ) -> "Manifest":
        """Return a copy of the manifest without some segments and with new segments. Writes new parts.

        The copy is not published yet. The cost depends on the number of changed segments, and hardly on the
        number of all segments.

        Args:
            gone: names of the segments to leave out.
            fresh: entries of the segments to add.
            write: see `ManifestPart.write`.
        """
        unchanged_parts = tuple(part for part in self.parts if part.names.isdisjoint(gone))
        opened_segments = (part.segments for part in self.parts if not part.names.isdisjoint(gone))
        listed_entries = [entry for entry in chain(*opened_segments, self.listed) if entry.name not in gone]
        listed_entries = sorted([*listed_entries, *fresh], key=attrgetter("name"))
        parts = []
        while len(listed_entries) >= 2 * PART_SIZE:
            parts.append(ManifestPart.write(listed_entries[:PART_SIZE], write))
            del listed_entries[:PART_SIZE]
        return replace(self, listed=tuple(listed_entries), parts=(*unchanged_parts, *parts))

    def write(self, root: Path) -> None:
        """Publish the manifest in a directory, atomically and durably.

        Readers see the old manifest or this manifest.
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
        publish(root / NAME, f'{{"sha256":"{_hash_text(text)}","content":{text}}}'.encode(), "manifest")

    @classmethod
    def read(cls, root: Path, known: Iterable[ManifestPart] = ()) -> "Manifest":
        """Read the manifest of a directory, with all parts, and check it.

        Args:
            root: the datastore's directory.
            known: parts that were read before; they are not read again.

        Raises:
            DatastoreNotFoundError: the directory has neither a manifest nor a folder of segments.
            CorruptDatastoreError: the manifest is missing, damaged, or of a newer version of knnstore.
        """
        path = root / NAME
        try:
            outer = json.loads(read_file(path))
            content = outer["content"]
            intact = _hash_text(_render_canonical(content)) == outer["sha256"]
        except FileNotFoundError:
            if (root / "segments").exists():
                raise CorruptDatastoreError(f"{path} is missing: restore it from a backup") from None
            raise DatastoreNotFoundError(f"no datastore at {root}") from None
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
    """Return inode, time of change in ns and size of the manifest's file. They change with every manifest.

    This costs one system call. Raises FileNotFoundError if the directory has no manifest.
    """
    status = os.stat(f"{root}/{NAME}")  # called for every search; creating a Path would take longer
    return status.st_ino, status.st_mtime_ns, status.st_size


def _parse_segment(entry: dict[str, Any], dim: int) -> SegmentEntry:
    """Convert the JSON object of a segment to an entry, and check all values. Changes `entry`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, ConfigError: a value is missing or not valid.
    """
    index, codes = entry.pop("index"), entry.pop("codes", None)
    segment = SegmentEntry(
        keys=StoredFile(**entry.pop("keys")),
        ids=StoredFile(**entry.pop("ids")),
        dead=tuple((start, stop) for start, stop in entry.pop("dead")),
        index=index and IndexEntry(StoredFile(**index["file"]), index["parameters"]),
        codes=codes and CodesEntry(checked_kind(codes["kind"]), StoredFile(**codes["file"])),
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
    _check_value(segment.ids.size in _allowed_id_sizes(segment))
    files = segment.needed + ([segment.index.file] if segment.index else [])
    _check_value(all(_is_valid_file(file) for file in files))
    _check_value(segment.index is None or isinstance(segment.index.parameters, dict))
    return segment


def _allowed_id_sizes(entry: SegmentEntry) -> list[int]:
    """Return the sizes in bytes that the file of ids may have; raises ValueError if `runs` is not valid."""
    if entry.runs is None:
        return [8 * entry.rows]
    _check_value(_are_integers(entry.runs) and 0 < entry.runs <= entry.rows)
    return [packed_size(entry.rows, entry.runs, wide=wide) for wide in (False, True)]


def _is_valid_file(file: StoredFile) -> bool:
    """Check whether size and SHA-256 of a file's entry have the right type and form. Reads no file."""
    return (
        _are_integers(file.size) and 0 <= file.size < 1 << 60 and _SHA256.fullmatch(file.sha256) is not None
    )


def _are_integers(*values: object) -> bool:
    """Check whether all values are of type int."""
    return all(isinstance(value, int) for value in values)


def _check_value(condition: object) -> None:
    """Raise ValueError unless the condition is true."""
    if not condition:
        raise ValueError


def _make_invalid_error(path: Path) -> CorruptDatastoreError:
    """Make the error for a file with invalid values in spite of a right digest, without raising it."""
    return CorruptDatastoreError(f"{path} makes no sense: restore it from a backup")


def _list_fields(entry: SegmentEntry | IndexEntry | CodesEntry | StoredFile) -> dict[str, Any]:
    """Return the fields of an entry by name, ten times as fast as `dataclasses.asdict`, not recursively."""
    return {name: getattr(entry, name) for name in entry.__slots__}


def _render_canonical(content: Any) -> str:
    """Render content as JSON with sorted keys and without spaces, so that equal content gives equal text."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=_list_fields)


def _hash_text(text: str) -> str:
    """Return the SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
