"""Durable key segments: the log-structured storage of the embedded engines.

A directory holds immutable *segments* and one *manifest*, a small file that lists them. A segment holds
records of one group (a numbered set of records, such as a domain) by ascending id: a file `.keys` (keys in
half precision, or compressed to codes) and a file `.ids`. Adding records appends segments. Deleting records
marks rows of a segment as dead in the manifest. Merging rewrites segments. Another process sees a change when
the next manifest is published, atomically.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.codecs import Coding
from knnstore.datastore.embedded.directory import FOLDERS
from knnstore.datastore.embedded.files import SegmentFiles, translate_write_errors, write_digests
from knnstore.datastore.embedded.manifest import IndexEntry, Manifest
from knnstore.datastore.embedded.merging import (
    add_buffered,
    convert_to_stored_precision,
    estimate_size,
    mark_rows_dead,
    plan_merges,
)
from knnstore.datastore.embedded.reader import SegmentReader
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import WriterLock, sync_directory
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreClosedError, ReadOnlyError
from knnstore.space import check_space

BUFFER_SIZE = 16 << 20
"""Bytes of keys that `append` buffers in memory before it writes them as segments."""

_MANY_SEGMENTS = 32  # flush merges the small segments of a group that has more
_MANY_FILES = (
    30_000  # a process may have 65,530 maps, and a segment takes two: with more files than this, ...
)
_FEW_SEGMENTS = 4  # ... flush merges as soon as a group has more segments than this
_SPARSE = 0.25  # `compact` rewrites a segment with a larger share of dead rows


class KeySegments(SegmentReader):
    """The records of one datastore directory, as segments that can be read and changed.

    A segment is an immutable set of files with records of one group (a numbered set of records, such as a
    domain). Only one thread may make changes. At the same time any number of threads may read the segments
    that `segments_by_group` and `snapshot` return. A failed operation can be repeated. The files that a
    failed operation leaves behind are removed by the next successful change, or when the directory is next
    opened for writing.

    Args:
        root: a directory that only this datastore uses; created unless mode is ``"r"``.
        dim: number of components of a key.
        metric: metric of the distances; only saved, and compared with the saved metric.
        mode: ``"r"`` reads an existing directory, ``"a"`` opens for writing or creates, ``"x"`` creates.
        coding: rules for compressing the keys of large groups to codes. With None, no further group is
            compressed; new keys of a group that is compressed already are still compressed.

    Raises:
        ConfigError: dim is below 1.
        DatastoreNotFoundError: mode ``"r"`` and no datastore exists.
        DatastoreExistsError: mode ``"x"`` and a datastore exists.
        DatastoreMismatchError: the datastore has another dim or metric.
        LockedError: another process has the directory open for writing.
        CorruptDatastoreError: the manifest (the file that lists the segments) is damaged.
    """

    def __init__(
        self,
        root: Path,
        dim: int,
        metric: Metric,
        mode: Literal["r", "a", "x"],
        coding: Coding | None = None,
    ) -> None:
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        super().__init__(root)
        self._lock: WriterLock | None = None
        self._changed: set[int] = set()  # groups that changed since the last manifest
        self._buffered: set[int] = set()  # groups with segments in memory
        self.replacements = 0
        """Number of calls of `append` that have replaced records."""
        if mode == "r":
            self._manifest = self._load_manifest()
            self._check_compatible(dim, metric)
        else:
            self._follows = False
            with translate_write_errors(self.root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = WriterLock(root)
            try:
                self._manifest = self._open_for_writing(dim, metric, coding, create_only=mode == "x")
                self._check_compatible(dim, metric)
            except BaseException:
                self._lock.release()
                raise
        self._highest_id = max((entry.last_id for entry in self._manifest.segments), default=-1)  # on disk

    # -- changing

    def append(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Add records. A new record replaces an older record with the same id.

        Searches in this process find the records at once. The records are buffered in memory. When the buffer
        exceeds 16 MiB, its records are written to files. `flush` makes the records durable. The arguments
        must be valid, as `validate_records` returns them.

        Args:
            ids: record ids, int64, shape (n,), without duplicates, in any order; n may be 0.
            keys: float32, shape (n, dim).
            groups: group number of each record, int32, shape (n,).

        Raises:
            ReadOnlyError, DatastoreClosedError: the directory is not open for writing.
        """
        self._check_writable()
        if not len(ids):
            return
        with self._mutex:
            buffered = [s for group in self._buffered for s in self._groups[group] if s.entry is None]
            if sum(s.columns.keys.nbytes for s in buffered) + keys.nbytes // 2 > BUFFER_SIZE:
                self._write_buffered()
            order = np.argsort(ids, kind="stable")
            ids, groups = ids[order], groups[order]
            # A store's ids ascend: then no record on disk can be replaced.
            searched_groups = self._buffered if ids[0] > self._highest_id else self._groups
            changed = mark_rows_dead(
                self._groups,
                searched_groups,
                int(ids[0]),
                int(ids[-1]),
                lambda segment: segment.find_rows_of_ids(ids),
            )
            if changed:
                self.replacements += 1
            for group in np.unique(groups).tolist():
                in_group = groups == group
                new_segment = Segment.from_arrays(
                    group, ids[in_group], convert_to_stored_precision(keys[order[in_group]])
                )
                changed[group] = add_buffered(changed.get(group, self._groups.get(group, ())), new_segment)
            self._set_segments(changed)

    def delete(self, ids: IdRanges) -> None:
        """Delete every record whose id is in the ranges; ids without a record are ignored.

        Searches in this process leave the deleted records out at once. `flush` makes the deletion durable.

        Raises:
            ReadOnlyError, DatastoreClosedError: the directory is not open for writing.
        """
        self._check_writable()
        if not ids:
            return
        with self._mutex:
            first, last = int(ids.starts[0]), int(ids.stops[-1]) - 1
            self._set_segments(
                mark_rows_dead(
                    self._groups,
                    self._groups,
                    first,
                    last,
                    lambda segment: segment.find_rows_if_readable(ids),
                )
            )

    def remove_damaged_part(self, part: DamagedPart) -> None:
        """Remove a damaged segment (a set of files with records) from the datastore, durably.

        The records of the segment are lost, and its files are removed. Changes that were not flushed become
        durable too.

        Args:
            part: the damaged segment, a result of `list_damaged_parts`.
        """
        self._check_writable()
        with self._mutex:
            segments = self._groups.get(part.group, ())
            self._set_segments(
                {part.group: [s for s in segments if not s.entry or s.entry.name != part.name]}
            )
            self._publish_manifest()

    def flush(self) -> None:
        """Make all changes durable: write buffered records to files, and publish a new manifest.

        The manifest is the list of all files in use. Then, if a group that changed has very many segments
        (sets of files with records), its small segments without an index are merged.

        Raises:
            DiskFullError, DatastoreError: the disk is full or failed; nothing that was flushed before is
                lost.
            ReadOnlyError, DatastoreClosedError: the directory is not open for writing.
        """
        self._check_writable()
        with self._mutex:
            changed = sorted(self._changed)
            if changed:
                self._publish_manifest()
            max_segments = _MANY_SEGMENTS if len(self._files.on_disk) <= _MANY_FILES else _FEW_SEGMENTS
            for group in changed:
                if len(self._groups.get(group, ())) > max_segments:
                    self._merge_segments(group, ratio=2, indexed=False)

    def compact(self, *, ratio: int) -> None:
        """Merge the segments of each group, and reclaim the space of deleted records.

        A segment is a set of files with records of one group. First, changes that were made before are
        flushed. Then segments are rewritten without their deleted and replaced records if more than a quarter
        of the records are deleted or replaced. In groups that are large enough, segments with uncompressed
        keys are also rewritten, with keys compressed to codes. Finally the segments of each group are merged.
        Damaged segments are not changed.

        Args:
            ratio: afterwards a segment of a group has at least this many times the records of the group's
                next segment.
        """
        self.flush()
        with self._mutex:
            for group, segments in self.segments_by_group().items():
                is_coded = self._files.are_coded(segments)
                for segment in segments:
                    lacks_codes = is_coded and segment.columns.codec_file is None
                    if lacks_codes or segment.rows - segment.live > _SPARSE * segment.rows:
                        self._rewrite_and_publish([segment])
                self._merge_segments(group, ratio=ratio, indexed=True)

    def write_digests(self, segment: Segment) -> None:
        """Write the file with the SHA-256 digests of a segment's keys, if the file is missing or damaged.

        Args:
            segment: segment (set of files with records). For a segment in memory, nothing is written.

        Raises:
            CorruptDatastoreError: the keys of the segment are damaged.
            DiskFullError, DatastoreError: the disk is full or failed.
        """
        with self._mutex, translate_write_errors(self.root):
            write_digests(self.root, segment)

    def vacuum(self) -> None:
        """Rewrite every segment that holds deleted or replaced records, without these records.

        A segment is a set of files with records. Afterwards only damaged segments, which are not changed, may
        still hold a deleted record.

        Raises:
            DiskFullError: the disk has too little free space; nothing is rewritten.
        """
        self.flush()
        with self._mutex, translate_write_errors(self.root):
            sparse = [segment for segment in self.list_readable_segments() if segment.dead]
            needed = sum(estimate_size([segment], self._manifest.dim) for segment in sparse)
            check_space(self.root, needed, "erasing")
            for segment in sparse:
                self._rewrite_segments([segment])
            if self._changed:
                self._publish_manifest()
            for folder in FOLDERS:  # otherwise a power loss brings removed files back
                sync_directory(self.root / folder)

    def write_index(
        self, segment: Segment, write: Callable[[Path], None], parameters: dict[str, Any]
    ) -> None:
        """Create the index file of a segment, and publish a manifest that names the file, durably.

        The manifest is the list of all files in use. All changes that were made before become durable too.

        Args:
            segment: a segment (set of files with records) on disk.
            write: function that is called with a path, and must create the index file at this path.
            parameters: parameters of the index, JSON values by name; saved in the manifest.
        """
        self._check_writable()
        with self._mutex, translate_write_errors(self.root):
            assert segment.entry is not None, "flush first"
            stored = self._files.write_index(write)
            self._hashed.add(stored)
            entry = replace(segment.entry, index=IndexEntry(stored, parameters))
            segments = self._groups.get(segment.group, ())
            indexed = [replace(s, entry=entry) if s.columns is segment.columns else s for s in segments]
            self._set_segments({segment.group: indexed})
            self._publish_manifest()

    def close(self) -> None:
        """Close the directory. If it is open for writing, flush first, and release the writer's lock.

        The lock is also released if flushing fails. A second call does nothing.
        """
        if self._closed:
            return
        try:
            if self._lock is not None:
                self.flush()
        finally:
            self._closed = True
            if self._lock is not None:
                self._lock.release()
            self._groups, self._sound = {}, ({}, {}, {})

    # -- inside

    def _open_for_writing(
        self, dim: int, metric: Metric, coding: Coding | None, *, create_only: bool
    ) -> Manifest:
        """Read or create the manifest, map its segments, and remove files that a crash left behind.

        The manifest is the list of all files in use, and a segment is a set of files with records. The files
        are mapped into memory. The caller holds the writer's lock.

        Args:
            dim: number of components of a key; used only in a new manifest.
            metric: metric of the distances; used only in a new manifest.
            coding: rules for compressing the keys of large groups; None compresses no further group.
            create_only: True to raise DatastoreExistsError if a manifest exists.

        Returns:
            The manifest.
        """
        with translate_write_errors(self.root):
            self._files = SegmentFiles.open(self.root, dim, metric, coding, create_only=create_only)
            self._groups = self._map_segments(self._files.manifest)
            self._files.prepare_folders()
        return self._files.manifest

    def _write_buffered(self) -> None:
        """Write the records in the buffer to files, as one new segment for each group, and empty the buffer.

        The manifest does not list the new segments yet.
        """
        for group in sorted(self._buffered):
            buffered = [segment for segment in self._groups[group] if segment.entry is None]
            with translate_write_errors(self.root):
                self._swap_segments(buffered, self._write_segment(buffered))

    def _merge_segments(self, group: int, *, ratio: int, indexed: bool) -> None:
        """Merge successive segments of a group until each segment has `ratio` times the records of the next.

        A segment is a set of files with records. The new files become durable.

        Args:
            group: number of the group.
            ratio: smallest ratio of the numbers of records of a segment and the next segment.
            indexed: True to merge all segments; the index of a merged segment is lost and must be built
                again. False to merge only segments without an index.
        """
        segments = [
            segment for segment in self.segments_by_group().get(group, ()) if indexed or segment.index is None
        ]
        for run in plan_merges(segments, ratio):
            self._rewrite_and_publish(run)

    def _rewrite_and_publish(self, segments: Sequence[Segment]) -> None:
        """Replace some segments of a group by one new segment with their live records, durably.

        A segment is a set of files with records. Live records are the records that are neither deleted nor
        replaced. The old files are removed. If a segment is damaged, no segment is replaced, and no error is
        raised.

        Args:
            segments: the segments to replace, all of one group.
        """
        with translate_write_errors(self.root):
            self._rewrite_segments(segments)
            self._publish_manifest()

    def _rewrite_segments(self, segments: Sequence[Segment]) -> None:
        """Write the live records of some segments as one new segment, and use it in place of these segments.

        A segment is a set of files with records. Live records are the records that are neither deleted nor
        replaced. The change becomes durable when the next manifest (the list of all files in use) is
        published. If a segment is damaged, nothing changes, and no error is raised.

        Args:
            segments: the segments to replace, all of one group.
        """
        try:
            self._swap_segments(segments, self._write_segment(segments))
        except CorruptDatastoreError:
            if all(segment.columns.problem is None for segment in segments):
                raise

    def _swap_segments(self, old: Sequence[Segment], new: Segment) -> None:
        """Replace some segments of a group by a new segment in this object's list of segments.

        The new segment becomes the last of its group. Nothing is written to disk.

        Args:
            old: the segments to replace; all belong to the group of `new`.
            new: the segment that replaces them.
        """
        old_columns = {id(segment.columns) for segment in old}
        remaining = [segment for segment in self._groups[new.group] if id(segment.columns) not in old_columns]
        self._set_segments({new.group: [*remaining, new]})

    def _set_segments(self, changed: Mapping[int, Sequence[Segment]]) -> None:
        """Set the segments of some groups in this object. Nothing is written to disk yet.

        A segment is a set of records, and a group has one or more segments. The next manifest (the list of
        all files in use) that is published makes the change durable. A segment whose records are all deleted
        or replaced is left out. A group without segments is removed.

        Args:
            changed: all segments of each changed group, by group number.
        """
        groups = dict(self._groups)
        for group, segments in changed.items():
            groups[group] = tuple(segment for segment in segments if segment.live)
            in_memory = any(segment.entry is None for segment in groups[group])
            (self._buffered.add if in_memory else self._buffered.discard)(group)
            if not groups[group]:
                del groups[group]
        self._groups = groups
        self._changed |= changed.keys()

    def _write_segment(self, segments: Sequence[Segment]) -> Segment:
        """Write the live records of some segments of one group as a new segment on disk, and return it.

        Live records are the records that are neither deleted nor replaced. The manifest (the list of all
        files in use) does not list the new segment yet.

        Args:
            segments: segments (sets of records) of one group; they are not changed.
        """
        group_segments = self._groups[segments[0].group]
        written = self._files.write_segment(
            segments, group_segments, self._manifest.dim, self._damaged_segments
        )
        self._highest_id = max(self._highest_id, written.last_id)
        return written

    def _publish_manifest(self) -> None:
        """Publish a manifest with the current segments, durably, then remove files that it does not list.

        The manifest is the list of all files in use. Records in the buffer are written to files first.
        """
        # Rows that were replaced are marked dead, so their replacements must be in the same manifest.
        self._write_buffered()
        with translate_write_errors(self.root):
            published = {
                group: tuple(
                    replace(segment, entry=replace(segment.entry, dead=tuple(segment.dead)))
                    for segment in self._groups.get(group, ())
                    if segment.entry
                )
                for group in sorted(self._changed)
            }
            self._manifest = self._files.publish(
                {group: [s.entry for s in segments if s.entry] for group, segments in published.items()}
            )
            self._groups = {
                **self._groups,
                **{group: segments for group, segments in published.items() if segments},
            }
            self._changed.clear()
            self._forget_old_damage()
            self._files.remove_unnamed()

    def _check_writable(self) -> None:
        """Raise an error unless the directory is open for writing.

        Raises:
            DatastoreClosedError: `close` was called.
            ReadOnlyError: the directory was opened with mode ``"r"``.
        """
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._lock is None:
            raise ReadOnlyError(f"{self.root} was opened with mode 'r'")
