"""Reading the segments of a datastore directory while another process may write them.

A segment whose keys or ids are damaged is set aside: everything else is read, and it is named. Whether it is
found so when the manifest is read, when it is used or by `verify` makes no difference afterwards.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.manifest import Manifest, ManifestPart, SegmentEntry, signature
from knnstore.datastore.embedded.mapped import MappedFile, read_digests
from knnstore.datastore.embedded.merging import merged
from knnstore.datastore.embedded.packing import CodecFile
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
_NO_ROWS = IdRanges()

Group = tuple[Segment, ...]
"""Segments of one group that have live records, in the order in which they were made."""


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
        self._aside: dict[StoredFile, int] = {}  # what is known to be damaged; see `MappedColumns`
        # What `by_group` gave last, and for which groups and which damage.
        self._sound: tuple[Mapping[int, Group], dict[StoredFile, int], Mapping[int, Group]] = ({}, {}, {})
        self._hashed: set[StoredFile] = set()
        self._said: set[str] = set()  # problems that were warned of

    def by_group(self) -> Mapping[int, Group]:
        """The segments of each group that are not set aside, as of now; for a reader, of the newest manifest.

        Each that is set aside is warned of once. What is returned never changes: a later version is another
        mapping, and has the same tuple for a group that did not change. Another version there is too when
        damage was noticed.
        """
        groups, damage = self._current(), self._aside.copy()
        if not damage:
            return groups
        for_groups, for_damage, sound = self._sound
        if for_groups is not groups or for_damage != damage:  # how much says too little: some is forgotten
            sound = self._without_damaged(groups, sound)
            self._sound = groups, damage, sound
        return sound

    def readable(self) -> Group:
        """The segments of every group that are not set aside, as `by_group` gives them."""
        return tuple(chain.from_iterable(self.by_group().values()))

    def snapshot(self) -> Group:
        """The segments of every group, those that are set aside included."""
        return tuple(chain.from_iterable(self._current().values()))

    def damaged(self) -> list[DamagedPart]:
        """What is set aside."""
        groups = self._current()
        return [
            DamagedPart(
                segment.entry.name,
                segment.columns.problem,
                segment.group,
                IdRanges([(segment.first_id, segment.last_id + 1)]),
            )
            for segment in chain.from_iterable(groups.get(group, ()) for group in self._damaged_groups())
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
        for some_ids, keys, groups in merged(self.readable(), ids=ids, batch_size=batch_size):
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
        while True:
            before = self._signature_now()
            try:
                manifest = Manifest.read(self.root)
            except (CorruptDatastoreError, DatastoreNotFoundError) as error:
                problems = [str(error)]
            else:
                problems = [problem for entry in manifest.segments for problem in self._problems_of(entry)]
            if not problems or self._signature_now() == before:  # else a writer replaced what is missed
                return problems

    def _problems_of(self, entry: SegmentEntry) -> list[str]:
        """What is wrong with the files of a segment, which is set aside if its keys or ids are."""
        problems = [damage(found) for file in entry.needed if (found := self._problem_of(file))]
        if problems:
            for segment in self._current().get(entry.group, ()):
                if segment.entry and segment.entry.keys == entry.keys:
                    segment.columns.set_aside(problems[0])
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
            try:
                manifest = Manifest.read(self.root, self._parts)
            except CorruptDatastoreError:
                if self._signature_now() == before:
                    raise
                continue
            groups = self._mapped(manifest)
            sound = all(s.columns.problem is None for s in chain.from_iterable(groups.values()))
            if sound or self._signature_now() == before:
                self._groups, self._parts, self._signature = groups, manifest.parts, before
                self._forget_former()
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

    def _current(self) -> Mapping[int, Group]:
        """The segments of each group as of now, those that are set aside included."""
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._follows:
            self._refresh()
        return self._groups

    def _forget_former(self) -> None:
        """Forget the damage of segments that are no more."""
        for file, group in list(self._aside.items()):
            if all(
                segment.entry is None or segment.entry.keys != file for segment in self._groups.get(group, ())
            ):
                self._aside.pop(file, None)

    def _damaged_groups(self) -> list[int]:
        return sorted(set(self._aside.values()))

    def _without_damaged(
        self, groups: Mapping[int, Group], former: Mapping[int, Group]
    ) -> Mapping[int, Group]:
        """Leave out what is set aside, and say so; a group of which the same is left keeps its tuple."""
        sound = dict(groups)
        for group in self._damaged_groups():
            found = groups.get(group, ())
            for segment in found:
                problem = segment.columns.problem
                if problem is not None and problem not in self._said:
                    self._said.add(problem)
                    _log.warning("%s (until then %s records are left out)", problem, f"{segment.live:,}")
            left = tuple(segment for segment in found if segment.columns.problem is None)
            if left:
                sound[group] = former[group] if former.get(group) == left else left
            else:
                sound.pop(group, None)
        return sound

    def _mapped(self, manifest: Manifest) -> dict[int, Group]:
        """Map the segments of a manifest, keeping the maps of those that are mapped already."""
        known = {s.entry.keys: s for group in self._groups.values() for s in group if s.entry}
        files = (s.columns.codec_file for s in known.values())
        codecs = {file.entry: file for file in files if file is not None}
        groups: dict[int, list[Segment]] = {}
        for entry in manifest.segments:
            segment = known.get(entry.keys)
            if segment is None or segment.entry != entry:
                codes = entry.codes
                if codes is not None and codes not in codecs:
                    codecs[codes] = CodecFile(self.root, codes, manifest.dim)
                segment = self._segment(entry, segment, manifest.dim, codecs.get(codes) if codes else None)
            if segment.live:
                groups.setdefault(entry.group, []).append(segment)
        now = {group: tuple(found) for group, found in groups.items()}
        unchanged = {group: former for group, former in self._groups.items() if now.get(group) == former}
        return now | unchanged

    def _segment(
        self, entry: SegmentEntry, former: Segment | None, dim: int, codec: CodecFile | None
    ) -> Segment:
        """What an entry of the manifest says, with the maps of a former version of the segment."""
        dead = IdRanges(entry.dead) if entry.dead else _NO_ROWS
        columns = (
            former.columns if former else MappedColumns(self.root, entry, dim, self._aside, codec_file=codec)
        )
        return Segment(entry.group, entry.rows, entry.first_id, entry.last_id, columns, dead, entry)
