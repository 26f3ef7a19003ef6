"""The manifest: the one small file that says which files are the datastore."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from knnstore.datastore.arrays import Metric
from knnstore.datastore.records import ID_LIMIT
from knnstore.durable import StoredFile, publish
from knnstore.errors import CorruptDatastoreError, DatastoreNotFoundError

_FILE = re.compile(r"(segments|indexes)/\d{8,}\.(keys|ids|digests|index)")
_SHA256 = re.compile("[0-9a-f]{64}")

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An index over one segment's rows, built by an adapter; derived, so losing it costs time only."""

    file: StoredFile
    parameters: dict[str, Any]
    """What the adapter must know to use it; JSON values."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One immutable segment: records of one group, by ascending id."""

    name: str
    group: int
    rows: int
    dtype: str
    """numpy's name of the keys' type: float16, or float32 where a key exceeds the range of float16."""

    first_id: int
    last_id: int
    keys: StoredFile
    ids: StoredFile
    digests: str
    """Name of the file with the digests of the keys' blocks; its own SHA-256 is that of the keys."""

    dead: tuple[tuple[int, int], ...] = ()
    """Ranges of rows that were deleted or replaced; of this segment only, so an id may live on in another."""

    index: IndexEntry | None = None

    def file_names(self) -> list[str]:
        """Every file that belongs to the segment."""
        return [self.keys.name, self.ids.name, self.digests] + ([self.index.file.name] if self.index else [])


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a datastore that is not a row."""

    dim: int
    metric: Metric
    next_number: int = 1
    """The number of the next file; never reused, so a name means one content for ever."""

    segments: tuple[SegmentEntry, ...] = ()

    def file_names(self) -> set[str]:
        """Every file that it names."""
        return {name for entry in self.segments for name in entry.file_names()}

    def write(self, root: Path) -> None:
        """Publish atomically and durably; readers see the old manifest or this one."""
        text = _canonical({"format": FORMAT, **asdict(self)})
        publish(root / NAME, f'{{"sha256":"{_digest(text)}","content":{text}}}'.encode(), "manifest")

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """Read and check the manifest.

        Raises:
            DatastoreNotFoundError: there is none and no segment either.
            CorruptDatastoreError: it is lost or damaged, or of a newer version of knnstore.
        """
        path = root / NAME
        try:
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            intact = _digest(_canonical(content)) == outer["sha256"]
        except FileNotFoundError:
            if (root / "segments").exists():
                raise CorruptDatastoreError(f"{path} is missing: restore it from a backup") from None
            raise DatastoreNotFoundError(f"no datastore at {root}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            intact = False
        if not intact:
            raise CorruptDatastoreError(f"{path} is damaged: restore it from a backup")
        try:
            if content.pop("format") != FORMAT:
                raise CorruptDatastoreError(f"{path} was written by a newer knnstore: upgrade the package")
            segments = tuple(_segment(entry) for entry in content.pop("segments"))
            read = cls(metric=Metric(content.pop("metric")), segments=segments, **content)
            _check(read.next_number > 0 and read.dim > 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # it was made so
            raise CorruptDatastoreError(f"{path} makes no sense: restore it from a backup") from error
        return read


def signature(root: Path) -> tuple[int, int, int]:
    """What changes with every manifest and costs one system call: inode, time, size."""
    status = os.stat(root / NAME)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _segment(entry: dict[str, Any]) -> SegmentEntry:
    index = entry.pop("index")
    read = SegmentEntry(
        keys=StoredFile(**entry.pop("keys")),
        ids=StoredFile(**entry.pop("ids")),
        dead=tuple((start, stop) for start, stop in entry.pop("dead")),
        index=index and IndexEntry(StoredFile(**index["file"]), index["parameters"]),
        **entry,
    )
    # Nothing of a name leads out of the folder, and a number that is none ends no process.
    _check(all(_FILE.fullmatch(name) for name in read.file_names()))
    borders = [0, *(row for rows in read.dead for row in rows), read.rows]
    _check(all(first <= second for first, second in pairwise(borders)))
    _check(0 <= read.first_id <= read.last_id < ID_LIMIT and 0 <= read.group < 1 << 31)
    _check(read.dtype in ("float16", "float32") and 0 < read.rows <= 1 << 40)
    files = [read.keys, read.ids] + ([read.index.file] if read.index else [])
    _check(all(0 <= file.size < 1 << 60 and _SHA256.fullmatch(file.sha256) for file in files))
    _check(read.index is None or isinstance(read.index.parameters, dict))
    return read


def _check(sound: object) -> None:
    if not sound:
        raise ValueError


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
