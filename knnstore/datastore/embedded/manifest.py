"""The manifest: the one small file that says which files are the datastore."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knnstore.datastore.arrays import Metric
from knnstore.durable import StoredFile, publish
from knnstore.errors import CorruptDatastoreError, DatastoreNotFoundError

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
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise CorruptDatastoreError(f"{path} is damaged: restore it from a backup")
        if content.pop("format") != FORMAT:
            raise CorruptDatastoreError(f"{path} was written by a newer knnstore: upgrade the package")
        segments = tuple(_segment(entry) for entry in content.pop("segments"))
        return cls(metric=Metric(content.pop("metric")), segments=segments, **content)


def signature(root: Path) -> tuple[int, int, int]:
    """What changes with every manifest and costs one system call: inode, time, size."""
    status = os.stat(root / NAME)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _segment(entry: dict[str, Any]) -> SegmentEntry:
    index = entry.pop("index")
    return SegmentEntry(
        keys=StoredFile(**entry.pop("keys")),
        ids=StoredFile(**entry.pop("ids")),
        dead=tuple((start, stop) for start, stop in entry.pop("dead")),
        index=index and IndexEntry(StoredFile(**index["file"]), index["parameters"]),
        **entry,
    )


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
