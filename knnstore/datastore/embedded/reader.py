"""Reading the segments of a datastore directory while another process may write them."""

import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from knnstore.datastore.arrays import Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.manifest import Manifest, ManifestPart, SegmentEntry, signature
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

_NO_ROWS = IdRanges()

Group = tuple[Segment, ...]
"""The segments of a group that have live records, in the order in which they were made."""


class SegmentReader:
    """What can be read of the segments in a directory; see `KeySegments`."""

    _manifest: Manifest

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mutex = threading.RLock()
        self._closed = False
        self._follows = True  # other processes' manifests
        self._signature = (0, 0, 0)
        self._parts: tuple[ManifestPart, ...] = ()
        self._groups: Mapping[int, Group] = {}
        self._hashed: set[StoredFile] = set()

    def by_group(self) -> Mapping[int, Group]:
        """The segments of each group that has live records, as of now; for a reader, of the newest manifest.

        What is returned never changes: a later version is another mapping, and has the same tuple for a group
        that did not change.
        """
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._follows:
            self._refresh()
        return self._groups

    def snapshot(self) -> tuple[Segment, ...]:
        """The segments of every group, as `by_group` gives them."""
        return tuple(chain.from_iterable(self.by_group().values()))

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
            before = self._present_signature()
            try:
                manifest = Manifest.read(self.root, self._parts)
                self._groups, self._signature = self._mapped(manifest), before
                self._parts = manifest.parts
                return manifest
            except CorruptDatastoreError:
                if self._present_signature() == before:
                    raise

    def _present_signature(self) -> tuple[int, int, int]:
        try:
            return signature(self.root)
        except FileNotFoundError:
            return 0, 0, 0

    def _refresh(self) -> None:
        try:
            current = signature(self.root)
        except FileNotFoundError:
            raise DatastoreNotFoundError(f"the datastore at {self.root} was removed") from None
        if current != self._signature:
            with self._mutex:
                if current != self._signature:
                    self._manifest = self._load()

    def _mapped(self, manifest: Manifest) -> dict[int, Group]:
        """Map the segments of a manifest, keeping the maps of those that are mapped already."""
        known = {s.entry.keys: s for group in self._groups.values() for s in group if s.entry}
        groups: dict[int, list[Segment]] = {}
        for entry in manifest.segments:
            segment = known.get(entry.keys)
            if segment is None or segment.entry != entry:
                segment = self._segment(entry, segment, manifest.dim)
            if segment.live:
                groups.setdefault(entry.group, []).append(segment)
        now = {group: tuple(found) for group, found in groups.items()}
        unchanged = {group: former for group, former in self._groups.items() if now.get(group) == former}
        return now | unchanged

    def _segment(self, entry: SegmentEntry, former: Segment | None, dim: int) -> Segment:
        """What an entry of the manifest says, with the maps of a former version of the segment."""
        try:
            dead = IdRanges(entry.dead) if entry.dead else _NO_ROWS
            columns = former.columns if former else MappedColumns(self.root, entry, dim)
        except FileNotFoundError as error:
            raise CorruptDatastoreError(
                f"{error.filename} is missing: restore it from a backup, or remove its documents and "
                "add them again"
            ) from None
        return Segment(entry.group, entry.rows, entry.first_id, entry.last_id, columns, dead, entry)
