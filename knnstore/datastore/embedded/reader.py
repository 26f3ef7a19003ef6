"""Reading the segments of a datastore directory while another process may write them.

A segment whose keys or ids are damaged is set aside: everything else is read, and it is named. Whether it is
found so when the manifest is read, when it is used or by `verify` makes no difference afterwards.
"""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.manifest import Manifest, SegmentEntry, signature
from knnstore.datastore.embedded.mapped import MappedFile, read_digests
from knnstore.datastore.embedded.merging import merged
from knnstore.datastore.embedded.segment import MappedColumns, Segment, damage
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreClosedError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)

_log = logging.getLogger(__name__)

_DERIVED = "it is derived from the keys: the next `knnstore add`, `optimize` or `repair` makes it anew"


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
        self._said: set[str] = set()  # problems that were warned of

    def snapshot(self) -> tuple[Segment, ...]:
        """The segments as of now; for a reader, as of the newest manifest. They never change."""
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._follows:
            self._refresh()
        return self._segments

    def readable(self) -> list[Segment]:
        """The segments of `snapshot` but for those that are set aside, each of which is warned of once."""
        segments = self.snapshot()
        for segment in segments:
            problem = segment.columns.problem
            if problem is not None and problem not in self._said:
                self._said.add(problem)
                _log.warning("%s (until then %s records are left out)", problem, f"{segment.live:,}")
        return [segment for segment in segments if segment.columns.problem is None]

    def damaged(self) -> list[DamagedPart]:
        """What is set aside."""
        return [
            DamagedPart(
                segment.entry.name,
                segment.columns.problem,
                segment.group,
                IdRanges([(segment.first_id, segment.last_id + 1)]),
            )
            for segment in self.snapshot()
            if segment.columns.problem is not None and segment.entry
        ]

    def count(self) -> int:
        """How many records are live, those that are set aside included."""
        return sum(segment.live for segment in self.snapshot())

    def iterate(self, *, ids: IdRanges | None, batch_size: int) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once by ascending id, as `Datastore.iterate` does.

        Raises:
            CorruptDatastoreError: damage was found on the way; the next call leaves out what is damaged.
        """
        try:
            for some_ids, keys, groups in merged(self.readable(), ids=ids, batch_size=batch_size):
                yield np.array(some_ids), keys.astype(np.float32, copy=False), groups
        except CorruptDatastoreError:
            self.renew()
            raise

    def renew(self) -> None:
        """Make `snapshot` another one of the same segments: what is known of their damage has changed."""
        with self._mutex:
            self._segments = (*self._segments,)

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
        """The readable segments of each group that has live records."""
        groups: dict[int, list[Segment]] = {}
        for segment in self.readable():
            if segment.live:
                groups.setdefault(segment.group, []).append(segment)
        return groups

    def verify(self) -> list[str]:
        """Check size and SHA-256 of every file that the manifest names; one line for each problem."""
        while True:
            before = self._signature_now()
            try:
                manifest = Manifest.read(self.root)
            except (CorruptDatastoreError, DatastoreNotFoundError) as error:
                return [str(error)]
            problems = [problem for entry in manifest.segments for problem in self._problems_of(entry)]
            if not problems or self._signature_now() == before:  # else a writer replaced what is missed
                return problems

    def _problems_of(self, entry: SegmentEntry) -> list[str]:
        """What is wrong with the files of a segment, which is set aside if its keys or ids are."""
        problems = [damage(found) for file in (entry.keys, entry.ids) if (found := self._problem_of(file))]
        if problems:
            for segment in self.snapshot():
                if segment.entry and segment.entry.keys == entry.keys:
                    segment.columns.set_aside(problems[0])
            self.renew()
            return problems
        if read_digests(self.root / entry.digests, entry.keys) is None:
            problems.append(f"{self.root / entry.digests} is missing or damaged; {_DERIVED}")
        if entry.index and (found := self._problem_of(entry.index.file)):
            problems.append(f"{found}; until then they are searched exactly; {_DERIVED}")
        return problems

    def _problem_of(self, file: StoredFile) -> str | None:
        """What is wrong with a file, if anything."""
        try:
            MappedFile(self.root, file).check()
        except FileNotFoundError as error:
            problem = f"{error.filename} is missing"
        except (CorruptDatastoreError, OSError) as error:
            problem = str(error)
        else:
            return None
        self._hashed.discard(file)
        return problem

    def _check_same(self, dim: int, metric: Metric) -> None:
        """Refuse a datastore of other vectors than the caller's."""
        manifest = self._manifest
        if (dim, metric) != (manifest.dim, manifest.metric):
            found = f"dim {manifest.dim} and metric {manifest.metric.value}"
            raise DatastoreMismatchError(f"{self.root} has {found}, not dim {dim} and metric {metric.value}")

    def _load(self) -> Manifest:
        """Read the manifest and map what it names, together, while a writer may replace both."""
        while True:
            before = self._signature_now()
            manifest = Manifest.read(self.root)
            segments = self._mapped(manifest)
            sound = all(segment.columns.problem is None for segment in segments)
            if sound or self._signature_now() == before:
                self._segments, self._signature = segments, before
                return manifest

    def _signature_now(self) -> tuple[int, int, int]:
        """See `signature`; zeros where there is no manifest."""
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

    def _mapped(self, manifest: Manifest) -> tuple[Segment, ...]:
        """Map the segments of a manifest, keeping the maps of those that are mapped already."""
        known = {segment.entry.keys: segment.columns for segment in self._segments if segment.entry}
        segments = []
        for entry in manifest.segments:
            columns = known.get(entry.keys) or MappedColumns(self.root, entry, manifest.dim)
            dead = IdRanges(entry.dead)
            segments.append(
                Segment(entry.group, entry.rows, entry.first_id, entry.last_id, columns, dead, entry)
            )
        return tuple(segments)
