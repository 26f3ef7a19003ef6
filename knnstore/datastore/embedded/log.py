"""Durable key segments: the log-structured storage of the embedded engines.

A directory holds immutable segments and one manifest that names them. A segment holds records of one group by
ascending id: a file `.keys` (half precision or codes) and a file `.ids`. Adding appends segments. Deleting
marks ranges of rows dead in the manifest. Merging rewrites segments. Each change becomes visible when the
next manifest is published, atomically.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.codecs import Coding
from knnstore.datastore.embedded.directory import FOLDERS
from knnstore.datastore.embedded.files import SegmentFiles, write_digests, writing
from knnstore.datastore.embedded.manifest import IndexEntry, Manifest
from knnstore.datastore.embedded.merging import (
    merge_plan,
    size_of,
    stored_keys,
    with_buffered,
    without_rows,
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
    """The records of one datastore directory.

    One thread changes it. Any number of threads may read the segments of `by_group` and `snapshot` meanwhile.
    A failed operation can be repeated. The files that it leaves are removed by the next successful change or
    by the next writer.

    Args:
        root: a directory that only this datastore uses.
        dim: number of components of a key.
        metric: the distance; saved for the adapter.
        mode: ``"r"``, ``"a"`` or ``"x"`` as in `Datastore.open`.
        coding: how large groups are coded; None codes no further group.

    Raises:
        ConfigError: dim is below 1.
        DatastoreNotFoundError, DatastoreExistsError, DatastoreMismatchError, LockedError: see
            `Datastore.open`.
        CorruptDatastoreError: the manifest is damaged.
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
            self._manifest = self._load()
            self._check_same(dim, metric)
        else:
            self._follows = False
            with writing(self.root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = WriterLock(root)
            try:
                self._manifest = self._open_for_writing(dim, metric, coding, create_only=mode == "x")
                self._check_same(dim, metric)
            except BaseException:
                self._lock.release()
                raise
        self._highest_id = max((entry.last_id for entry in self._manifest.segments), default=-1)  # on disk

    # -- changing

    def append(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Add records. Records with the same ids are replaced.

        Args:
            ids: int64, shape (n,), different ones in any order.
            keys: float32, shape (n, dim).
            groups: group of each record, shape (n,). All three were checked by `checked_records`.
        """
        self._check_writable()
        if not len(ids):
            return
        with self._mutex:
            buffered = [s for group in self._buffered for s in self._groups[group] if s.entry is None]
            if sum(s.columns.keys.nbytes for s in buffered) + keys.nbytes // 2 > BUFFER_SIZE:
                self._spill()
            order = np.argsort(ids, kind="stable")
            ids, groups = ids[order], groups[order]
            # A store's ids ascend: then no record on disk can be replaced.
            among = self._buffered if ids[0] > self._highest_id else self._groups
            changed = without_rows(
                self._groups, among, int(ids[0]), int(ids[-1]), lambda segment: segment.rows_with(ids)
            )
            if changed:
                self.replacements += 1
            for group in np.unique(groups).tolist():
                mine = groups == group
                fresh = Segment.in_memory(group, ids[mine], stored_keys(keys[order[mine]]))
                changed[group] = with_buffered(changed.get(group, self._groups.get(group, ())), fresh)
            self._put(changed)

    def delete(self, ids: IdRanges) -> None:
        """Remove the records in some id ranges. Ids without a record are ignored."""
        self._check_writable()
        if not ids:
            return
        with self._mutex:
            first, last = int(ids.starts[0]), int(ids.stops[-1]) - 1
            self._put(
                without_rows(self._groups, self._groups, first, last, lambda segment: segment.rows_known(ids))
            )

    def abandon(self, part: DamagedPart) -> None:
        """Remove a damaged segment from the manifest, durably. Its records are lost."""
        self._check_writable()
        with self._mutex:
            found = self._groups.get(part.group, ())
            self._put({part.group: [s for s in found if not s.entry or s.entry.name != part.name]})
            self._publish()

    def flush(self) -> None:
        """Make all changes durable. Also merges the small segments of a group with very many."""
        self._check_writable()
        with self._mutex:
            changed = sorted(self._changed)
            if changed:
                self._publish()
            many = _MANY_SEGMENTS if len(self._files.on_disk) <= _MANY_FILES else _FEW_SEGMENTS
            for group in changed:
                if len(self._groups.get(group, ())) > many:
                    self._merge(group, ratio=2, indexed=False)

    def compact(self, *, ratio: int) -> None:
        """Reclaim the space of dead rows and merge each group's segments.

        Afterwards each segment of a group has at least `ratio` times the rows of the next, and groups that
        are large enough are coded.
        """
        self.flush()
        with self._mutex:
            for group, found in self.by_group().items():
                coded = self._files.are_coded(found)
                for segment in found:
                    lacks_codes = coded and segment.columns.codec_file is None
                    if lacks_codes or segment.rows - segment.live > _SPARSE * segment.rows:
                        self._replace([segment])
                self._merge(group, ratio=ratio, indexed=True)

    def write_digests(self, segment: Segment) -> None:
        """Write the digests of a segment's keys again, durably, if they are missing."""
        with self._mutex, writing(self.root):
            write_digests(self.root, segment)

    def vacuum(self) -> None:
        """Rewrite every segment with dead rows, so that no file holds any of them."""
        self.flush()
        with self._mutex, writing(self.root):
            sparse = [segment for segment in self.readable() if segment.dead]
            needed = sum(size_of([segment], self._manifest.dim) for segment in sparse)
            check_space(self.root, needed, "erasing")
            for segment in sparse:
                self._rewrite([segment])
            if self._changed:
                self._publish()
            for folder in FOLDERS:  # otherwise a power loss brings removed files back
                sync_directory(self.root / folder)

    def write_index(
        self, segment: Segment, write: Callable[[Path], None], parameters: dict[str, Any]
    ) -> None:
        """Attach an index to a segment, durably.

        Args:
            segment: a segment on disk.
            write: called with the path at which it must create the file of the index.
            parameters: saved with the index; JSON values.
        """
        self._check_writable()
        with self._mutex, writing(self.root):
            assert segment.entry is not None, "flush first"
            stored = self._files.write_index(write)
            self._hashed.add(stored)
            entry = replace(segment.entry, index=IndexEntry(stored, parameters))
            found = self._groups.get(segment.group, ())
            indexed = [replace(s, entry=entry) if s.columns is segment.columns else s for s in found]
            self._put({segment.group: indexed})
            self._publish()

    def close(self) -> None:
        """Flush, if opened for writing, and release the writer's lock."""
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
        with writing(self.root):
            self._files = SegmentFiles.open(self.root, dim, metric, coding, create_only=create_only)
            self._groups = self._mapped(self._files.manifest)
            self._files.settle()
        return self._files.manifest

    def _spill(self) -> None:
        """Write the buffered records as segments that no manifest names yet."""
        for group in sorted(self._buffered):
            buffered = [segment for segment in self._groups[group] if segment.entry is None]
            with writing(self.root):
                self._swap(buffered, self._write(buffered))

    def _merge(self, group: int, *, ratio: int, indexed: bool) -> None:
        """Merge neighboring segments of a group until each is `ratio` times as large as the next.

        Args:
            group: the group.
            ratio: see `merge_plan`.
            indexed: True to merge segments with an index too. Their indexes must be built again.
        """
        found = [segment for segment in self.by_group().get(group, ()) if indexed or segment.index is None]
        for run in merge_plan(found, ratio):
            self._replace(run)

    def _replace(self, segments: Sequence[Segment]) -> None:
        """Rewrite the live rows of some segments as one segment, durably, and remove the old files."""
        with writing(self.root):
            self._rewrite(segments)
            self._publish()

    def _rewrite(self, segments: Sequence[Segment]) -> None:
        """Replace some segments by one with their live rows. If one is damaged, nothing changes."""
        try:
            self._swap(segments, self._write(segments))
        except CorruptDatastoreError:
            if all(segment.columns.problem is None for segment in segments):
                raise

    def _swap(self, old: Sequence[Segment], new: Segment) -> None:
        gone = {id(segment.columns) for segment in old}
        kept = [segment for segment in self._groups[new.group] if id(segment.columns) not in gone]
        self._put({new.group: [*kept, new]})

    def _put(self, changed: Mapping[int, Sequence[Segment]]) -> None:
        """Set the segments of some groups. Segments without live rows are left out.

        The next manifest makes this durable.
        """
        groups = dict(self._groups)
        for group, found in changed.items():
            groups[group] = tuple(segment for segment in found if segment.live)
            in_memory = any(segment.entry is None for segment in groups[group])
            (self._buffered.add if in_memory else self._buffered.discard)(group)
            if not groups[group]:
                del groups[group]
        self._groups = groups
        self._changed |= changed.keys()

    def _write(self, segments: Sequence[Segment]) -> Segment:
        """Write the live rows of segments of one group as a new segment that no manifest names yet."""
        among = self._groups[segments[0].group]
        written = self._files.write_segment(segments, among, self._manifest.dim, self._aside)
        self._highest_id = max(self._highest_id, written.last_id)
        return written

    def _publish(self) -> None:
        """Publish a manifest with the current segments, durably; then remove the files of former segments."""
        self._spill()  # replaced rows are marked dead: their replacements must be in the same manifest
        with writing(self.root):
            now = {
                group: tuple(
                    replace(segment, entry=replace(segment.entry, dead=tuple(segment.dead)))
                    for segment in self._groups.get(group, ())
                    if segment.entry
                )
                for group in sorted(self._changed)
            }
            self._manifest = self._files.publish(
                {group: [s.entry for s in found if s.entry] for group, found in now.items()}
            )
            self._groups = {**self._groups, **{group: found for group, found in now.items() if found}}
            self._changed.clear()
            self._forget_former()
            self._files.remove_unnamed()

    def _check_writable(self) -> None:
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._lock is None:
            raise ReadOnlyError(f"{self.root} was opened with mode 'r'")
