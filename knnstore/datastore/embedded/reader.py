"""Reading the segments of a datastore directory while another process may write to the directory.

A segment is a set of immutable files with records of one group. A segment with damaged keys or ids is marked
as damaged: it is reported, and its records are left out of all results. Damage is found when the manifest
(the list of all files) is read, when the segment is used, or by `verify`, always with the same consequences.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.codecs import CodecFile
from knnstore.datastore.embedded.manifest import Manifest, ManifestPart, SegmentEntry, read_signature
from knnstore.datastore.embedded.mapped import MappedFile, read_digests
from knnstore.datastore.embedded.merging import merge_records
from knnstore.datastore.embedded.segment import MappedColumns, Segment, describe_damage
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import (
    CorruptDatastoreError,
    DatastoreClosedError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)

_log = logging.getLogger(__name__)

_DERIVED = "it is derived from the keys: the next `knnstore add`, `optimize` or `repair` builds it again"
_NO_ROWS = IdRanges()

Group = tuple[Segment, ...]
"""The segments of one group that have records, in the order in which they were created."""


class SegmentReader:
    """Reads the segments of a datastore directory. A segment is a set of immutable files with records.

    This is the base class of `KeySegments`, whose constructor reads or creates the directory.

    Args:
        root: the datastore's directory.
    """

    _manifest: Manifest

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mutex = threading.RLock()
        self._closed = False
        self._follows = True  # reads the manifests of other processes
        self._signature = (0, 0, 0)
        self._parts: tuple[ManifestPart, ...] = ()
        self._groups: Mapping[int, Group] = {}
        self._damaged_segments: dict[StoredFile, int] = {}  # damaged segments; see `MappedColumns`
        # The last result of `segments_by_group`, after the groups and the damage that it was made for.
        self._sound: tuple[Mapping[int, Group], dict[StoredFile, int], Mapping[int, Group]] = ({}, {}, {})
        self._hashed: set[StoredFile] = set()
        self._logged_problems: set[str] = set()  # problems that were logged

    def segments_by_group(self) -> Mapping[int, Group]:
        """Return the segments of each group by group number, without segments that are known to be damaged.

        A segment is a set of immutable files with records of one group. If the directory is open for reading
        only, changes of the writer are read first. Each damaged segment is logged once. The returned mapping
        is never modified. After a change or new damage, the next call returns a new mapping. In the new
        mapping, a group that did not change has the same tuple object as before.
        """
        groups, damage = self._get_current_groups(), self._damaged_segments.copy()
        if not damage:
            return groups
        cached_groups, cached_damage, sound = self._sound
        if (
            cached_groups is not groups or cached_damage != damage
        ):  # a count would not do, because damage can be forgotten
            sound = self._leave_out_damaged(groups, sound)
            self._sound = groups, damage, sound
        return sound

    def list_readable_segments(self) -> Group:
        """Return the segments (immutable sets of records) of all groups, without known damaged segments."""
        return tuple(chain.from_iterable(self.segments_by_group().values()))

    def snapshot(self) -> Group:
        """Return the segments (immutable sets of records) of all groups, damaged segments included."""
        return tuple(chain.from_iterable(self._get_current_groups().values()))

    def list_damaged_parts(self) -> list[DamagedPart]:
        """Return a report on each segment that is known to be damaged; empty if no segment is.

        The files are not read to look for damage; `verify` does that.
        """
        groups = self._get_current_groups()
        return [
            DamagedPart(
                segment.entry.name,
                segment.columns.problem,
                segment.group,
                IdRanges([(segment.first_id, segment.last_id + 1)]),
            )
            for segment in chain.from_iterable(groups.get(group, ()) for group in self._list_damaged_groups())
            if segment.columns.problem is not None and segment.entry
        ]

    def count(self) -> int:
        """Return the number of records, including the records of damaged segments.

        Deleted and replaced records do not count.
        """
        return sum(segment.live for segment in self.snapshot())

    def iterate(self, *, ids: IdRanges | None, batch_size: int) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every record once by ascending id, as batches (ids, keys, groups).

        Deleted and replaced records, and records of segments (immutable sets of records) that are known to be
        damaged, are left out.

        Args:
            ids: ids of the records to yield; None yields all records.
            batch_size: largest number of records in a batch.

        Yields:
            Record ids int64 (n,), keys float32 (n, dim), and group numbers int32 (n,).

        Raises:
            CorruptDatastoreError: a segment turns out to be damaged. The next call leaves this segment out.
        """
        for batch_ids, keys, groups in merge_records(
            self.list_readable_segments(), ids=ids, batch_size=batch_size
        ):
            yield np.array(batch_ids), keys.astype(np.float32, copy=False), groups

    def is_intact(self, file: StoredFile) -> bool:
        """Check whether a file of the datastore exists and has the right size and SHA-256.

        If this object wrote the file, or found it intact before, only the size is checked.

        Args:
            file: path relative to the directory, expected size and expected hash of the file.

        Returns:
            True if the file is intact; False if it is missing, or if its size or hash is wrong.
        """
        try:
            MappedFile(self.root, file, trusted=file in self._hashed).check()
        except (CorruptDatastoreError, FileNotFoundError):
            return False
        self._hashed.add(file)
        return True

    def verify(self) -> list[str]:
        """Check the size and the SHA-256 of every file that is in use.

        Segments that turn out to be damaged are left out of later results.

        Returns:
            One line of text for each problem; empty if no problem is found.
        """
        while True:
            first_signature = self._read_manifest_signature()
            try:
                manifest = Manifest.read(self.root)
            except (CorruptDatastoreError, DatastoreNotFoundError) as error:
                problems = [str(error)]
            else:
                problems = [problem for entry in manifest.segments for problem in self._find_problems(entry)]
            if (
                not problems or self._read_manifest_signature() == first_signature
            ):  # otherwise a writer has replaced the files
                return problems

    def _find_problems(self, entry: SegmentEntry) -> list[str]:
        """Check all files of a segment (a set of files with records), and return one line for each problem.

        If the file of keys, the file of ids or the file of the codec (compressor of keys) is missing or
        damaged, the segment is marked as damaged. In this case its other files are not checked.

        Args:
            entry: the segment's entry in the manifest (the list of all files in use).
        """
        problems = [
            describe_damage(problem) for file in entry.needed if (problem := self._find_problem(file))
        ]
        if problems:
            for segment in self._get_current_groups().get(entry.group, ()):
                if segment.entry and segment.entry.keys == entry.keys:
                    segment.columns.mark_damaged(problems[0])
            return problems
        if read_digests(self.root / entry.digests, entry.keys) is None:
            problems.append(f"{self.root / entry.digests} is missing or damaged; {_DERIVED}")
        if entry.index and (problem := self._find_problem(entry.index.file)):
            problems.append(f"{problem}; {_DERIVED}; until then its keys are searched exactly")
        return problems

    def _find_problem(self, file: StoredFile) -> str | None:
        """Check the size and the SHA-256 of a file.

        Args:
            file: path relative to the directory, expected size and expected hash of the file.

        Returns:
            One line that describes the problem, such as a missing file; None if the file is intact.
        """
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

    def _check_compatible(self, dim: int, metric: Metric) -> None:
        """Raise DatastoreMismatchError if the manifest has another dimension or metric than the arguments.

        The manifest is the list of all files in use.
        """
        manifest = self._manifest
        if (dim, metric) != (manifest.dim, manifest.metric):
            actual = f"dim {manifest.dim} and metric {manifest.metric.value}"
            raise DatastoreMismatchError(f"{self.root} has {actual}, not dim {dim} and metric {metric.value}")

    def _load_manifest(self) -> Manifest:
        """Read the manifest, map the files of its segments into memory, and return the manifest.

        The manifest is the list of all files in use, and a segment is a set of files with records. If a
        writer replaces the manifest during the call, manifest and files are read again.

        Raises:
            DatastoreNotFoundError: the directory has no datastore.
            CorruptDatastoreError: the manifest is missing or damaged.
        """
        while True:
            first_signature = self._read_manifest_signature()
            try:
                manifest = Manifest.read(self.root, self._parts)
            except CorruptDatastoreError:
                if self._read_manifest_signature() == first_signature:
                    raise
                continue
            groups = self._map_segments(manifest)
            is_sound = all(s.columns.problem is None for s in chain.from_iterable(groups.values()))
            if is_sound or self._read_manifest_signature() == first_signature:
                self._groups, self._parts, self._signature = groups, manifest.parts, first_signature
                self._forget_old_damage()
                return manifest

    def _read_manifest_signature(self) -> tuple[int, int, int]:
        """Return (inode, modification time in ns, size) of the manifest's file; zeros if there is no file.

        The manifest is the list of all files in use. The values change whenever a manifest is published.
        """
        try:
            return read_signature(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return 0, 0, 0

    def _refresh_manifest(self) -> None:
        """Read the manifest again if its file has changed since the last read.

        The manifest is the list of all files in use.

        Raises:
            DatastoreNotFoundError: the manifest was removed.
            CorruptDatastoreError: the new manifest is damaged.
        """
        try:
            current = read_signature(self.root)
        except (FileNotFoundError, NotADirectoryError):
            raise DatastoreNotFoundError(f"the datastore at {self.root} was removed") from None
        if current != self._signature:
            with self._mutex:
                if current != self._signature:
                    self._manifest = self._load_manifest()

    def _get_current_groups(self) -> Mapping[int, Group]:
        """Return the current segments of each group by group number, damaged segments included.

        A segment is an immutable set of records. If the directory is open for reading only, changes of the
        writer are read first. Raises DatastoreClosedError after `close`.
        """
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._follows:
            self._refresh_manifest()
        return self._groups

    def _forget_old_damage(self) -> None:
        """Remove segments that do not exist any more from the list of known damaged segments.

        A segment is a set of files with records. No file is removed.
        """
        for file, group in list(self._damaged_segments.items()):
            if all(
                segment.entry is None or segment.entry.keys != file for segment in self._groups.get(group, ())
            ):
                self._damaged_segments.pop(file, None)

    def _list_damaged_groups(self) -> list[int]:
        """Return the sorted numbers of the groups with a segment that is known to be damaged."""
        return sorted(set(self._damaged_segments.values()))

    def _leave_out_damaged(
        self, groups: Mapping[int, Group], former: Mapping[int, Group]
    ) -> Mapping[int, Group]:
        """Return the segments of each group, without segments that are known to be damaged.

        A segment is a set of files with records. Each damaged segment is logged once. A group whose segments
        are all damaged is left out.

        Args:
            groups: all segments of each group, by group number; not changed.
            former: the last result of this method. If the undamaged segments of a group with damage are those
                in `former`, the tuple object of `former` is used again.
        """
        sound = dict(groups)
        for group in self._list_damaged_groups():
            segments = groups.get(group, ())
            for segment in segments:
                problem = segment.columns.problem
                if problem is not None and problem not in self._logged_problems:
                    self._logged_problems.add(problem)
                    _log.warning("%s (until then %s records are left out)", problem, f"{segment.live:,}")
            remaining = tuple(segment for segment in segments if segment.columns.problem is None)
            if remaining:
                sound[group] = former[group] if former.get(group) == remaining else remaining
            else:
                sound.pop(group, None)
        return sound

    def _map_segments(self, manifest: Manifest) -> dict[int, Group]:
        """Map the files of all segments (immutable sets of records) of a manifest into memory.

        Files that are mapped already are not mapped again. A missing or damaged file raises no error; its
        segment is marked as damaged.

        Args:
            manifest: list of all segments.

        Returns:
            The segments of each group, by group number. A segment whose records are all deleted or replaced
            is left out.
        """
        known_segments = {s.entry.keys: s for group in self._groups.values() for s in group if s.entry}
        files = (s.columns.codec_file for s in known_segments.values())
        codecs = {file.entry: file for file in files if file is not None}
        groups: dict[int, list[Segment]] = {}
        for entry in manifest.segments:
            segment = known_segments.get(entry.keys)
            if segment is None or segment.entry != entry:
                codes = entry.codes
                if codes is not None and codes not in codecs:
                    codecs[codes] = CodecFile(self.root, codes, manifest.dim)
                segment = self._make_segment(
                    entry, segment, manifest.dim, codecs.get(codes) if codes else None
                )
            if segment.live:
                groups.setdefault(entry.group, []).append(segment)
        current = {group: tuple(segments) for group, segments in groups.items()}
        unchanged = {group: former for group, former in self._groups.items() if current.get(group) == former}
        return current | unchanged

    def _make_segment(
        self, entry: SegmentEntry, former: Segment | None, dim: int, codec: CodecFile | None
    ) -> Segment:
        """Create the object of a segment (a set of files with records) from its entry in the manifest.

        The manifest is the list of all files in use.

        Args:
            entry: the segment's entry.
            former: former version of the segment, whose mapped files are used again. None maps the files.
            dim: number of components of a key.
            codec: codec that compressed the keys; None if the keys are not compressed.
        """
        dead = IdRanges(entry.dead) if entry.dead else _NO_ROWS
        columns = (
            former.columns
            if former
            else MappedColumns(self.root, entry, dim, self._damaged_segments, codec_file=codec)
        )
        return Segment(entry.group, entry.rows, entry.first_id, entry.last_id, columns, dead, entry)
