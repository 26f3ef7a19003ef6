"""Durable key segments: the log-structured truth under the embedded adapters.

A directory holds immutable segments, each the records of one group by ascending id (`.keys` in half
precision, `.ids`), and one manifest that names them. Adding appends segments, deleting marks row ranges dead
in the manifest, and merging rewrites segments; each becomes real at once when the next manifest is published.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from knnstore.datastore.arrays import Groups, Ids, Keys, Metric
from knnstore.datastore.embedded.derived import write_digests, write_index
from knnstore.datastore.embedded.erasing import FOLDERS, make_folders, remove_strays
from knnstore.datastore.embedded.manifest import IndexEntry, Manifest
from knnstore.datastore.embedded.merging import (
    file_names,
    merge_plan,
    stored_keys,
    with_buffered,
    write_segment,
)
from knnstore.datastore.embedded.reader import SegmentReader
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import WriterLock, remove, sync_directory
from knnstore.errors import (
    ConfigError,
    CorruptDatastoreError,
    DatastoreClosedError,
    DatastoreError,
    DatastoreExistsError,
    DatastoreNotFoundError,
    ReadOnlyError,
)
from knnstore.failpoints import failpoint
from knnstore.space import kind_of

BUFFER_SIZE = 16 << 20
"""Bytes of keys that `append` keeps in memory before it writes them as a segment."""

_MANY_SEGMENTS = 32  # of one group; from here on flush merges the small ones
_SPARSE = 0.25  # share of dead rows from which a segment is rewritten


class KeySegments(SegmentReader):
    """The records of one datastore directory.

    One thread changes it; any number of threads may read `snapshot` and what it holds beside.
    What an operation that failed leaves behind is removed when the next one succeeds or the
    next writer opens; it can always be repeated.

    Args:
        root: a directory that the datastore owns.
        dim: number of components of a key.
        metric: how distances are measured; kept for the adapter.
        mode: ``"r"``, ``"a"`` or ``"x"`` as in `Datastore.open`.

    Raises:
        ConfigError: dim is below 1.
        DatastoreNotFoundError, DatastoreExistsError, DatastoreMismatchError, LockedError: see
            `Datastore.open`.
        CorruptDatastoreError: the manifest is damaged.
    """

    def __init__(self, root: Path, dim: int, metric: Metric, mode: Literal["r", "a", "x"]) -> None:
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        super().__init__(root)
        self._lock: WriterLock | None = None
        self._dirty = False
        if mode == "r":
            self._manifest = self._load()
            self._check_same(dim, metric)
        else:
            self._follows = False
            with self._writing():
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = WriterLock(root)
            try:
                self._manifest = self._open_for_writing(dim, metric, create_only=mode == "x")
                self._check_same(dim, metric)
            except BaseException:
                self._lock.release()
                raise
        self._next_number = self._manifest.next_number

    # -- changing

    def append(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Add records, replacing those with the same id; the arrays went through `checked_records`."""
        self._check_writable()
        if not len(ids):
            return
        with self._mutex:
            buffered_size = sum(s.columns.keys.nbytes for s in self._segments if s.entry is None)
            if buffered_size + keys.nbytes // 2 > BUFFER_SIZE:
                self._spill()
            order = np.argsort(ids, kind="stable")
            ids, groups = ids[order], groups[order]
            segments = [segment.without(segment.rows_with(ids)) for segment in self._segments]
            for group in np.unique(groups).tolist():
                mine = groups == group
                fresh = Segment.in_memory(group, ids[mine], stored_keys(keys[order[mine]]))
                segments = with_buffered(segments, fresh)
            self._segments = tuple(segments)
            self._dirty = True

    def delete(self, ids: IdRanges) -> None:
        """Remove the records in some id ranges."""
        self._check_writable()
        with self._mutex:
            before = self.count()
            self._segments = tuple(s.without(s.rows_known(ids)) for s in self._segments)
            self._dirty |= self.count() < before

    def abandon(self, name: str) -> None:
        """Give up a damaged segment, durably."""
        self._check_writable()
        with self._mutex:
            self._segments = tuple(s for s in self._segments if not s.entry or s.entry.name != name)
            self._publish()

    def flush(self) -> None:
        """Make everything durable; merges small segments where a group has very many."""
        self._check_writable()
        with self._mutex:
            if self._dirty:
                self._publish()
            many = [group for group, found in self.by_group().items() if len(found) > _MANY_SEGMENTS]
            for group in many:
                self._merge(group, ratio=2, indexed=False)

    def compact(self, *, ratio: int) -> None:
        """Reclaim the space of dead rows and merge each group's segments.

        Afterwards each segment of a group has at least `ratio` times the rows of the next.
        """
        self.flush()
        with self._mutex:
            for group, found in self.by_group().items():
                for segment in found:
                    if segment.rows - segment.live > _SPARSE * segment.rows:
                        self._replace([segment])
                self._merge(group, ratio=ratio, indexed=True)

    def write_digests(self, segment: Segment) -> None:
        """Make the digests of a segment's keys anew, durably, if they are lost."""
        with self._mutex, self._writing():
            write_digests(self.root, segment)

    def vacuum(self) -> None:
        """Rewrite every segment that has dead rows, so that no file holds any of them."""
        self.flush()
        with self._mutex, self._writing():
            for segment in [segment for segment in self.readable() if segment.dead]:
                self._rewrite([segment])
            if self._dirty:
                self._publish()
            for folder in FOLDERS:  # else a power loss brings back what was removed, now or earlier
                sync_directory(self.root / folder)

    def write_index(
        self, segment: Segment, write: Callable[[Path], None], parameters: dict[str, Any]
    ) -> None:
        """Attach an index to a segment, durably; `write` must create the file at the path it is given."""
        self._check_writable()
        with self._mutex, self._writing():
            assert segment.entry is not None, "flush first"
            name = f"indexes/{self._number()}.index"
            stored = write_index(self.root, name, write)
            self._on_disk.add(name)
            self._hashed.add(stored)
            entry = replace(segment.entry, index=IndexEntry(stored, parameters))
            self._segments = tuple(
                replace(s, entry=entry) if s.columns is segment.columns else s for s in self._segments
            )
            self._publish()

    def close(self) -> None:
        """Flush, if opened for writing, and let the next writer in."""
        if self._closed:
            return
        try:
            if self._lock is not None:
                self.flush()
        finally:
            self._closed = True
            if self._lock is not None:
                self._lock.release()
            self._segments = ()

    # -- inside

    def _open_for_writing(self, dim: int, metric: Metric, *, create_only: bool) -> Manifest:
        with self._writing():
            try:
                manifest = Manifest.read(self.root)
            except DatastoreNotFoundError:
                manifest = Manifest(dim, metric)
                manifest.write(self.root)
                sync_directory(self.root.parent)
            else:
                if create_only:
                    raise DatastoreExistsError(f"a datastore is already at {self.root}")
            self._segments = self._mapped(manifest)
            self._on_disk = manifest.file_names()
            make_folders(self.root)
            remove_strays(self.root, self._on_disk)
        return manifest

    def _spill(self) -> None:
        """Write what is buffered as segments that no manifest names yet."""
        for found in self.by_group().values():
            buffered = [segment for segment in found if segment.entry is None]
            if buffered:
                with self._writing():
                    self._swap(buffered, self._write(buffered))
        self._segments = tuple(segment for segment in self._segments if segment.entry or segment.live)

    def _merge(self, group: int, *, ratio: int, indexed: bool) -> None:
        """Merge neighbors until each is `ratio` times as large as the next; an index is dear and may stay."""
        found = [segment for segment in self.by_group().get(group, []) if indexed or segment.index is None]
        for run in merge_plan(found, ratio):
            self._replace(run)

    def _replace(self, segments: Sequence[Segment]) -> None:
        """Rewrite the live rows of some segments as one, durably, and remove the old files."""
        with self._writing():
            self._rewrite(segments)
            self._publish()

    def _rewrite(self, segments: Sequence[Segment]) -> None:
        """Put a new segment in place of some; where one turns out to be damaged, all stay as they are."""
        try:
            self._swap(segments, self._write(segments))
        except CorruptDatastoreError:
            if all(segment.columns.problem is None for segment in segments):
                raise

    def _swap(self, old: Sequence[Segment], new: Segment) -> None:
        gone = {id(segment.columns) for segment in old}
        kept = [segment for segment in self._segments if id(segment.columns) not in gone]
        self._segments = (*kept, new)
        self._dirty = True

    def _write(self, segments: Sequence[Segment]) -> Segment:
        """Write the live rows of segments of one group as a new one, without naming it in a manifest."""
        name = self._number()
        self._on_disk.update(file_names(name))  # should this fail, the next success removes them
        return write_segment(self.root, name, segments, self._manifest.dim)

    def _publish(self) -> None:
        """Make the current segments the datastore, durably; then remove the files of former ones."""
        self._spill()  # a manifest that marks rows dead must name those that replace them
        with self._writing():
            named = [
                replace(segment, entry=replace(segment.entry, dead=tuple(segment.dead)))
                for segment in self._segments
                if segment.entry and segment.live
            ]
            manifest = replace(
                self._manifest,
                next_number=self._next_number,
                segments=tuple(segment.entry for segment in named if segment.entry),
            )
            failpoint("segments.publish")
            manifest.write(self.root)
            self._manifest = manifest
            self._segments = tuple(named)
            self._dirty = False
            for name in sorted(self._on_disk - manifest.file_names()):
                remove(self.root / name)
                self._on_disk.discard(name)

    def _number(self) -> str:
        number, self._next_number = self._next_number, self._next_number + 1
        return f"{number:08d}"

    def _check_writable(self) -> None:
        if self._closed:
            raise DatastoreClosedError(f"{self.root} was closed")
        if self._lock is None:
            raise ReadOnlyError(f"{self.root} was opened with mode 'r'")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, DatastoreError):  # some are both
                raise
            raise kind_of(error)(
                f"cannot write {error.filename or self.root}: {error.strerror}; what was flushed is safe: "
                "free space or repair the disk, then flush again"
            ) from error
