"""Reading the segments of a datastore directory while another process may write them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from knnstore.datastore.arrays import Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.manifest import Manifest, signature
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.merging import merged
from knnstore.datastore.embedded.segment import MappedColumns, Segment
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreClosedError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)


class SegmentReader:
    """What can be read of the segments in a directory; see `KeySegments`."""

    _manifest: Manifest

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mutex = threading.RLock()
        self._closed = False
        self._follows = True  # other processes' manifests
        self._signature = (0, 0, 0)
        self._segments: tuple[Segment, ...] = ()
        self._hashed: set[StoredFile] = set()

    def snapshot(self) -> tuple[Segment, ...]:
        """The segments as of now; for a reader, as of the newest manifest. They never change."""
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._follows:
            self._refresh()
        return self._segments

    def count(self) -> int:
        """How many records are live."""
        return sum(segment.live for segment in self.snapshot())

    def iterate(self, *, ids: IdRanges | None, batch_size: int) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once by ascending id, as `Datastore.iterate` does."""
        for some_ids, keys, groups in merged(self.snapshot(), ids=ids, batch_size=batch_size):
            yield np.array(some_ids), keys.astype(np.float32, copy=False), groups

    def intact(self, file: StoredFile) -> bool:
        """Whether a file is there with the size and the SHA-256 that the manifest says.

        It is read once: a file that this handle wrote or found intact is looked up by its size alone.
        """
        try:
            MappedFile(self.root, file, trusted=file in self._hashed).check()
        except (CorruptDatastoreError, FileNotFoundError):
            return False
        self._hashed.add(file)
        return True

    def by_group(self) -> dict[int, list[Segment]]:
        """The segments of each group that has live records."""
        groups: dict[int, list[Segment]] = {}
        for segment in self.snapshot():
            if segment.live:
                groups.setdefault(segment.group, []).append(segment)
        return groups

    def verify(self) -> list[str]:
        """Check size and SHA-256 of every file that the manifest names; one line for each problem."""
        problems = []
        try:
            manifest = Manifest.read(self.root)
        except (CorruptDatastoreError, DatastoreNotFoundError) as error:
            return [str(error)]
        for entry in manifest.segments:
            index = [entry.index.file] if entry.index else []
            for file in [entry.keys, entry.ids, *index]:
                try:
                    MappedFile(self.root, file).check()
                except (CorruptDatastoreError, OSError) as error:
                    problems.append(str(error))
                    self._hashed.discard(file)
        return problems

    def _check_same(self, dim: int, metric: Metric) -> None:
        """Refuse a datastore of other vectors than the caller's."""
        manifest = self._manifest
        if (dim, metric) != (manifest.dim, manifest.metric):
            found = f"dim {manifest.dim} and metric {manifest.metric.value}"
            raise DatastoreMismatchError(f"{self.root} has {found}, not dim {dim} and metric {metric.value}")

    def _load(self) -> Manifest:
        """Read the manifest and map what it names, together, while a writer may replace both."""
        while True:
            try:
                before = signature(self.root)
            except FileNotFoundError:
                before = (0, 0, 0)
            manifest = Manifest.read(self.root)
            try:
                self._segments, self._signature = self._mapped(manifest), before
                return manifest
            except CorruptDatastoreError:
                if signature(self.root) == before:
                    raise

    def _refresh(self) -> None:
        try:
            current = signature(self.root)
        except FileNotFoundError:
            raise DatastoreNotFoundError(f"the datastore at {self.root} was removed") from None
        if current != self._signature:
            with self._mutex:
                if current != self._signature:
                    self._manifest = self._load()

    def _mapped(self, manifest: Manifest) -> tuple[Segment, ...]:
        """Map the segments of a manifest, keeping the maps of those that are mapped already."""
        known = {segment.entry.keys: segment.columns for segment in self._segments if segment.entry}
        segments = []
        for entry in manifest.segments:
            try:
                columns = known.get(entry.keys) or MappedColumns(self.root, entry, manifest.dim)
            except FileNotFoundError as error:
                raise CorruptDatastoreError(
                    f"{error.filename} is missing: restore it from a backup, or remove its documents and "
                    "add them again"
                ) from None
            dead = IdRanges(entry.dead)
            segments.append(
                Segment(entry.group, entry.rows, entry.first_id, entry.last_id, columns, dead, entry)
            )
        return tuple(segments)
