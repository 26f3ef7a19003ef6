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
    """One immutable segment: records of one group by ascending id."""

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
    """A file that lists some segments."""

    file: StoredFile
    segments: tuple[SegmentEntry, ...]
    names: frozenset[str]
    """Names of the segments."""

    @classmethod
    def write(cls, segments: Sequence[SegmentEntry], write: Callable[[bytes], StoredFile]) -> Self:
        """Write a new part. `write` makes its content durable and returns the file."""
        text = _canonical(segments)
        return cls(write(text.encode()), tuple(segments), frozenset(entry.name for entry in segments))

    @classmethod
    def read(cls, root: Path, file: StoredFile, dim: int) -> Self:
        """Read and check a part of a datastore of vectors of `dim` components.

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
            segments = tuple(_segment(entry, dim) for entry in json.loads(mapped.bytes.tobytes()))
        except _SENSELESS as error:
            raise _no_sense(root / file.name) from error
        return cls(file, segments, frozenset(entry.name for entry in segments))


@dataclass(frozen=True, slots=True)
class Manifest:
    """All information about a datastore besides the rows of its segments."""

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
        """Return the manifest without some segments and with others. Writes new parts.

        The cost depends on the number of changed segments, and hardly on the number of all segments.

        Args:
            gone: names of segments to leave out.
            fresh: segments to add.
            write: see `ManifestPart.write`.
        """
        kept = tuple(part for part in self.parts if part.names.isdisjoint(gone))
        opened = (part.segments for part in self.parts if not part.names.isdisjoint(gone))
        listed = [entry for entry in chain(*opened, self.listed) if entry.name not in gone]
        listed = sorted([*listed, *fresh], key=attrgetter("name"))
        parts = []
        while len(listed) >= 2 * PART_SIZE:
            parts.append(ManifestPart.write(listed[:PART_SIZE], write))
            del listed[:PART_SIZE]
        return replace(self, listed=tuple(listed), parts=(*kept, *parts))

    def write(self, root: Path) -> None:
        """Publish the manifest, atomically and durably. Readers see the old manifest or this one."""
        content = {
            "format": FORMAT,
            "dim": self.dim,
            "metric": self.metric,
            "next_number": self.next_number,
            "segments": self.listed,
            "parts": [part.file for part in self.parts],
        }
        text = _canonical(content)
        publish(root / NAME, f'{{"sha256":"{_digest(text)}","content":{text}}}'.encode(), "manifest")

    @classmethod
    def read(cls, root: Path, known: Iterable[ManifestPart] = ()) -> "Manifest":
        """Read and check the manifest.

        Args:
            root: the datastore's directory.
            known: parts that were read before; they are not read again.

        Raises:
            DatastoreNotFoundError: there is neither a manifest nor a folder of segments.
            CorruptDatastoreError: the manifest is missing, damaged, or of a newer version of knnstore.
        """
        path = root / NAME
        try:
            outer = json.loads(read_file(path))
            content = outer["content"]
            intact = _digest(_canonical(content)) == outer["sha256"]
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
            _check(_are_numbers(dim, content["next_number"]) and dim > 0 and content["next_number"] > 0)
            listed = tuple(_segment(entry, dim) for entry in content.pop("segments"))
            files = [StoredFile(**file) for file in content.pop("parts", [])]
            _check(all(_PART.fullmatch(file.name) and _is_sound(file) for file in files))
            there = {part.file: part for part in known}
            parts = tuple(there.get(file) or ManifestPart.read(root, file, dim) for file in files)
            return cls(metric=Metric(content.pop("metric")), listed=listed, parts=parts, **content)
        except _SENSELESS as error:
            raise _no_sense(path) from error


def signature(root: Path) -> tuple[int, int, int]:
    """Return inode, time in ns and size of the manifest: they change with every manifest.

    This costs one system call.
    """
    status = os.stat(f"{root}/{NAME}")  # called for every search; creating a Path would take longer
    return status.st_ino, status.st_mtime_ns, status.st_size


def _segment(entry: dict[str, Any], dim: int) -> SegmentEntry:
    index, codes = entry.pop("index"), entry.pop("codes", None)
    read = SegmentEntry(
        keys=StoredFile(**entry.pop("keys")),
        ids=StoredFile(**entry.pop("ids")),
        dead=tuple((start, stop) for start, stop in entry.pop("dead")),
        index=index and IndexEntry(StoredFile(**index["file"]), index["parameters"]),
        codes=codes and CodesEntry(checked_kind(codes["kind"]), StoredFile(**codes["file"])),
        **entry,
    )
    # No name may lead out of the folder, and no value of a wrong type may be used later.
    _check(_NAME.fullmatch(read.name) and all(_FILE.fullmatch(name) for name in read.file_names()))
    borders = [0, *(row for rows in read.dead for row in rows), read.rows]
    _check(_are_numbers(*borders, read.first_id, read.last_id, read.group))
    _check(all(first <= second for first, second in pairwise(borders)))
    _check(0 <= read.first_id <= read.last_id < ID_LIMIT and 0 <= read.group < 1 << 31)
    _check(read.dtype == "uint8" if read.codes else read.dtype in _KEY_SIZES)
    _check(0 < read.rows <= 1 << 40 and read.keys.size == read.rows * read.row_size(dim))
    _check(read.ids.size in _sizes_of_ids(read))
    files = read.needed + ([read.index.file] if read.index else [])
    _check(all(_is_sound(file) for file in files))
    _check(read.index is None or isinstance(read.index.parameters, dict))
    return read


def _sizes_of_ids(entry: SegmentEntry) -> list[int]:
    """Return the sizes that the file of ids may have, in bytes."""
    if entry.runs is None:
        return [8 * entry.rows]
    _check(_are_numbers(entry.runs) and 0 < entry.runs <= entry.rows)
    return [packed_size(entry.rows, entry.runs, wide=wide) for wide in (False, True)]


def _is_sound(file: StoredFile) -> bool:
    return _are_numbers(file.size) and 0 <= file.size < 1 << 60 and _SHA256.fullmatch(file.sha256) is not None


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int) for value in values)


def _check(sound: object) -> None:
    if not sound:
        raise ValueError


def _no_sense(path: Path) -> CorruptDatastoreError:
    return CorruptDatastoreError(f"{path} makes no sense: restore it from a backup")


def _fields(entry: SegmentEntry | IndexEntry | CodesEntry | StoredFile) -> dict[str, Any]:
    """Return the fields as `dataclasses.asdict` does, ten times as fast."""
    return {name: getattr(entry, name) for name in entry.__slots__}


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=_fields)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
