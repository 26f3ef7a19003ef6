"""Search of groups: large segments are searched by their indexes, all other records exactly.

A group is a numbered set of records, such as a domain. Its records are in segments, which are immutable sets
of files. `GroupSearches` keeps one `GroupSearch` for each group and updates it when the segments change.
`GroupIndex` is the `GroupSearch` of engines with an index for each segment.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from knnstore.datastore.arrays import Keys
from knnstore.datastore.embedded.exact import ExactIndex
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import Neighbors, merge_neighbors
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import CorruptDatastoreError

_log = logging.getLogger(__name__)

_MARGIN = 1.25  # a segment is asked for this multiple of its share of the neighbors ...
_LEAST = 64  # ... and for this many more

Found = TypeVar("Found")


class SegmentIndex(Protocol):
    """Searches the records of one segment (a set of files with records) with the segment's index file."""

    file: StoredFile
    """The index file: its name, size and hash."""

    def update(self, segment: Segment) -> None:
        """Set a newer version of the segment, in which more records may be deleted or replaced.

        No search may run during the call.
        """

    def select_records(self, ids: IdRanges | None) -> Any:
        """Select records of the segment for a search. Deleted and replaced records are never selected.

        Args:
            ids: ids of the records to select; None selects all records of the segment.

        Returns:
            An object that stands for the selected records, as the argument `matching` of `search`. Its
            attribute `size` is the number of selected records.
        """

    def search(self, queries: Keys, k: int, matching: Any) -> Neighbors:
        """Find approximately the k nearest of the selected records for each query.

        Args:
            queries: query vectors, float32, shape (q, dim), q >= 1.
            k: number of neighbors, >= 1.
            matching: the selected records, a result of the method `select_records`; at least one record.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k records are
            selected, each missing neighbor has id -1 and distance +inf. Otherwise no neighbor is missing.
        """


class GroupSearch(Protocol):
    """Searches the records of one group (a numbered set of records, such as a domain)."""

    rows: int
    """Number of records of the group; deleted and replaced records do not count."""

    def holds_segments(self, segments: Sequence[Segment]) -> bool:
        """Check whether `segments` is the same object that the last call of `update` received.

        Returns False for another object with equal segments.
        """

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments (sets of files with records) to search. No search may run during the call.

        Args:
            segments: all segments of the group.

        Raises:
            FileNotFoundError: an index file is missing for the first time; a writer may have replaced it. A
                second call treats the missing file as damaged, and raises no error.
        """

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query.

        Args:
            queries: query vectors, float32, shape (q, dim).
            k: number of neighbors, >= 1.
            ids: ids of the records that may be found; None allows all records of the group.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k records may be
            found, each missing neighbor has id -1 and distance +inf.
        """


class GroupIndex:
    """Searches one group of records: segments with an index by the index, all other segments exactly.

    A segment is an immutable set of files with records of the group.

    Args:
        exact: an empty exact index, which will search the records of segments without an index.
        load_index: function that opens the index of a segment. It is called with the segment and the
            parameters that were saved with the index. It returns None if another engine built the index.
        is_indexed: function that is called with the number of records of a group, and returns True if the
            group is searched by indexes.
        damaged: index files that are known to be damaged or missing. The class adds each file that it finds
            damaged or missing.
    """

    def __init__(
        self,
        exact: ExactIndex,
        load_index: Callable[[Segment, dict[str, Any]], SegmentIndex | None],
        is_indexed: Callable[[int], bool],
        damaged: set[StoredFile],
    ) -> None:
        self._exact = exact
        self._load_index = load_index
        self._is_indexed = is_indexed
        self._damaged = damaged
        self._missing: set[StoredFile] = set()
        self._indexes: list[SegmentIndex] = []
        self._segments: Sequence[Segment] = ()
        self.rows = 0
        """Number of records of the group; deleted and replaced records do not count."""

    def holds_segments(self, segments: Sequence[Segment]) -> bool:
        """Check whether `segments` is the object of the last successful `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments to search, and open their indexes; see `GroupSearch.update`.

        A segment whose index is damaged or missing is searched exactly until `optimize` builds the index
        again. If the group is not large enough for indexes, no index is opened.
        """
        self._segments = ()
        known_indexes = {index.file: index for index in self._indexes}
        self.rows = sum(segment.live for segment in segments)
        is_indexed = self._is_indexed(self.rows)
        pairs = [
            (segment, self._open_index(segment, known_indexes) if is_indexed else None)
            for segment in segments
        ]
        self._exact.update([segment for segment, index in pairs if index is None])
        self._indexes = [index for _, index in pairs if index is not None]
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query; see `GroupSearch.search`.

        Segments with an index are searched approximately, all other records exactly.
        """
        indexes_with_rows = [
            (index, rows) for index in self._indexes if (rows := index.select_records(ids)).size
        ]
        if not indexes_with_rows or len(queries) == 0:
            return self._exact.search(queries, k, ids)
        exact_rows = self._exact.count(ids)
        total = exact_rows + sum(matching.size for _, matching in indexes_with_rows)
        exact_parts = [self._exact.search(queries, k, ids)] if exact_rows else []
        # 1) Ask each segment for its share of the neighbors.
        parts, is_incomplete = [], np.zeros(len(queries), bool)
        for index, matching in indexes_with_rows:
            share = min(k, math.ceil(_MARGIN * k * matching.size / total) + _LEAST)
            parts.append(index.search(queries, share, matching))
        # 2) A segment whose last neighbor is among the k nearest may hold more: ask it again for k.
        neighbors = merge_neighbors([*exact_parts, *parts], len(queries), k)
        for (_, matching), part in zip(indexes_with_rows, parts, strict=True):
            if part.ids.shape[1] < min(k, matching.size):
                is_incomplete |= part.distances[:, -1] <= neighbors.distances[:, -1]
        repeated_queries = np.flatnonzero(is_incomplete)
        if len(repeated_queries):
            parts = [part.select_rows(repeated_queries) for part in exact_parts]
            parts += [
                index.search(queries[repeated_queries], k, matching) for index, matching in indexes_with_rows
            ]
            neighbors.replace_rows(repeated_queries, merge_neighbors(parts, len(repeated_queries), k))
        return neighbors

    def _open_index(
        self, segment: Segment, known_indexes: dict[StoredFile, SegmentIndex]
    ) -> SegmentIndex | None:
        """Return the open index of a segment; None if the segment has no usable index.

        The first time that an index file is missing, an error is raised, so that the caller can look for a
        newer version of the segment. If the index file is missing for the second time, or is damaged, a
        warning is logged, the file is added to the damaged files, and None is returned.

        Args:
            segment: the segment.
            known_indexes: indexes that are open already, by file. If the segment's index is open already, it
                is updated with `segment` and returned.

        Raises:
            FileNotFoundError: the index file is missing for the first time.
            CorruptDatastoreError: the segment's keys are damaged.
        """
        if segment.index is None or segment.index.file in self._damaged:
            return None
        file = segment.index.file
        if file in known_indexes:
            known_indexes[file].update(segment)
            return known_indexes[file]
        try:
            return self._load_index(segment, segment.index.parameters)
        except FileNotFoundError as error:
            if file not in self._missing:
                self._missing.add(file)
                raise
            problem = f"{error.filename} is missing"
        except CorruptDatastoreError as error:
            if segment.columns.problem is not None:  # it was not the index
                raise
            problem = str(error)
        self._damaged.add(file)
        _log.warning("%s (its keys are searched exactly until `knnstore optimize` builds it again)", problem)
        return None


class GroupSearches:
    """Keeps one `GroupSearch` (an object that searches one group) for each group of records.

    A group is a numbered set of records, such as a domain. The `GroupSearch` of a group is created when the
    group is first searched. Before each search, it is updated if the group's records have changed. Any number
    of threads may search at the same time.

    Args:
        segments: the open datastore directory.
    """

    def __init__(self, segments: KeySegments) -> None:
        self._segments = segments
        self._lock = ReadersWriterLock()
        self._current_segments: Mapping[int, Sequence[Segment]] = {}
        self._searches: dict[int, GroupSearch] = {}

    def search_groups(
        self,
        groups: frozenset[int] | None,
        search: Callable[[Sequence[GroupSearch]], Found],
        create: Callable[[], GroupSearch],
    ) -> Found:
        """Call a function with the `GroupSearch` objects of some groups, and return the function's result.

        First the objects are updated to the newest records. If the function finds a damaged segment (a set of
        files with records), the objects leave the segment out, and the function is called again.

        Args:
            groups: numbers of the groups to search; None for all groups. A group without records is left out.
            search: function that is called with a list of `GroupSearch`, one for each group.
            create: function that creates an empty `GroupSearch`. It is an argument and not an attribute,
                because a reference cycle between a datastore and its searches would hold the writer's lock
                after an error, until the garbage collector runs.

        Raises:
            CorruptDatastoreError: a file is damaged, and leaving segments out does not help.
        """
        known_damage = 0
        while True:
            try:
                return self._search_once(groups, search, create)
            except CorruptDatastoreError:
                damage = len(self._segments.list_damaged_parts())
                if damage == known_damage:
                    raise
                known_damage = damage

    def close(self) -> None:
        """Close the datastore directory and drop all `GroupSearch` objects. Waits for running searches."""
        with self._lock.write_lock():
            self._searches, self._current_segments = {}, {}
            self._segments.close()

    def _search_once(
        self,
        groups: frozenset[int] | None,
        search: Callable[[Sequence[GroupSearch]], Found],
        create: Callable[[], GroupSearch],
    ) -> Found:
        """Update the `GroupSearch` objects if needed, call `search` with them, and return its result."""
        was_updated = False
        while True:
            with self._lock.read_lock():
                # Update at most once: a busy writer must not delay a search for ever.
                if (
                    was_updated or self._segments.segments_by_group() is self._current_segments
                ) and self._are_current(groups):
                    return search([self._searches[group] for group in self._select_groups(groups)])
            with self._lock.write_lock():
                self._update_searches(groups, create)
            was_updated = True

    def _select_groups(self, groups: frozenset[int] | None) -> list[int]:
        """Return the numbers of the groups to search; groups without records are left out.

        Args:
            groups: numbers of the groups; the result is sorted. None selects all groups with records; then
                the
                result may be in any order.
        """
        if groups is None:
            return list(self._current_segments)
        return [group for group in sorted(groups) if group in self._current_segments]

    def _are_current(self, groups: frozenset[int] | None) -> bool:
        """Check whether the `GroupSearch` of each group exists and has the newest records of the group.

        Returns False if at least one group has no `GroupSearch`, or a `GroupSearch` that must be updated.

        Args:
            groups: numbers of the groups to check; None checks all groups. Groups without records are
                ignored.
        """
        return all(
            group in self._searches and self._searches[group].holds_segments(self._current_segments[group])
            for group in self._select_groups(groups)
        )

    def _update_searches(self, groups: frozenset[int] | None, create: Callable[[], GroupSearch]) -> None:
        """Update the `GroupSearch` objects of some groups to the newest records.

        A missing `GroupSearch` is created. If a group does not exist any more, its `GroupSearch` is dropped.
        If an index file is missing, the update is repeated, because a writer may have replaced the file. The
        caller holds the lock for writing.

        Args:
            groups: numbers of the groups to update; None updates all groups.
            create: function that creates an empty `GroupSearch`.
        """
        while True:
            # Read the newest segments again: another thread may have updated meanwhile.
            self._current_segments = self._segments.segments_by_group()
            for group in self._searches.keys() - self._current_segments.keys():
                del self._searches[group]
            with suppress(FileNotFoundError):  # a writer replaced an index while a reader opened it
                for group in self._select_groups(groups):
                    if group not in self._searches:
                        self._searches[group] = create()
                    if not self._searches[group].holds_segments(self._current_segments[group]):
                        self._searches[group].update(self._current_segments[group])
                return


class ReadersWriterLock:
    """A lock that many reading threads or one writing thread can hold.

    Threads that want to read wait while another thread waits for writing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._written = False

    @contextmanager
    def read_lock(self) -> Iterator[None]:
        """Hold the lock during the ``with`` block, together with other reading threads.

        First waits until no thread holds the lock for writing, and no thread waits to write.
        """
        with self._changed:
            while self._written or self._writers_waiting:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._writers_waiting:
                    self._changed.notify_all()

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Hold the lock during the ``with`` block, while no other thread holds it.

        First waits until no other thread holds the lock for reading or writing.
        """
        with self._changed:
            self._writers_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._written and not self._readers)
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()  # wakes readers that wait for this writer, if it was interrupted
            self._written = True
        try:
            yield
        finally:
            with self._changed:
                self._written = False
                self._changed.notify_all()
