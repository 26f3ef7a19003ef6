"""Search of groups: large segments by their indexes, all other records exactly.

`GroupSearches` keeps one `GroupSearch` for each group and updates it when the segments change. `GroupIndex`
is the `GroupSearch` of engines with an index for each segment.
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
from knnstore.datastore.neighbors import Neighbors, merge
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import CorruptDatastoreError

_log = logging.getLogger(__name__)

_MARGIN = 1.25  # a segment is asked for this multiple of its share of the neighbors ...
_LEAST = 64  # ... and for this many more

Found = TypeVar("Found")


class SegmentIndex(Protocol):
    """Searches the rows of one segment through the index file that its entry names."""

    file: StoredFile

    def update(self, segment: Segment) -> None:
        """Set the version of the segment, which says which rows are live. No search may run meanwhile."""

    def matching(self, ids: IdRanges | None) -> Any:
        """Return the live rows, of all records or of those with `ids`, and their number as `size`."""

    def search(self, queries: Keys, k: int, matching: Any) -> Neighbors:
        """Find about the k nearest of some rows of each query. Returns k rows if there are k.

        Args:
            queries: float32, shape (q, dim), q >= 1.
            k: number of neighbors, >= 1.
            matching: a result of `matching` that is not empty.
        """


class GroupSearch(Protocol):
    """Searches the records of one group."""

    rows: int
    """Number of live records."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Check whether these are the segments of the last `update`, by identity."""

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments to search. No search may run meanwhile.

        Raises:
            FileNotFoundError: the file of an index is missing. Raised once for each file: a newer manifest
                may have replaced it.
        """

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query, among all records or those with `ids`."""


class GroupIndex:
    """Search of one group through an index for each of its larger segments.

    Args:
        exact: an empty exact index. It searches the rows without an index.
        opens: see `EmbeddedDatastore._open_index`.
        is_indexed: see `EmbeddedDatastore._is_indexed`.
        damaged: files of indexes that are damaged or missing. This class adds the files that it finds.
    """

    def __init__(
        self,
        exact: ExactIndex,
        opens: Callable[[Segment, dict[str, Any]], SegmentIndex | None],
        is_indexed: Callable[[int], bool],
        damaged: set[StoredFile],
    ) -> None:
        self._exact = exact
        self._opens = opens
        self._is_indexed = is_indexed
        self._damaged = damaged
        self._missing: set[StoredFile] = set()
        self._indexes: list[SegmentIndex] = []
        self._segments: Sequence[Segment] = ()
        self.rows = 0
        """Number of live records."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Check whether these are the segments of the last `update`, by identity."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Set the segments to search. No search may run meanwhile.

        A segment whose index is damaged or missing is searched exactly until `optimize` builds the index
        again.

        Raises:
            FileNotFoundError: the file of an index is missing. Raised once for each file: a newer manifest
                may have replaced it.
        """
        self._segments = ()
        known = {index.file: index for index in self._indexes}
        self.rows = sum(segment.live for segment in segments)
        indexed = self._is_indexed(self.rows)
        pairs = [(segment, self._index_of(segment, known) if indexed else None) for segment in segments]
        self._exact.update([segment for segment, index in pairs if index is None])
        self._indexes = [index for _, index in pairs if index is not None]
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query, among all records or those with `ids`."""
        searched = [(index, rows) for index in self._indexes if (rows := index.matching(ids)).size]
        if not searched or len(queries) == 0:
            return self._exact.search(queries, k, ids)
        exact = self._exact.count(ids)
        total = exact + sum(matching.size for _, matching in searched)
        others = [self._exact.search(queries, k, ids)] if exact else []
        # 1) Ask each segment for its share of the neighbors.
        parts, unsure = [], np.zeros(len(queries), bool)
        for index, matching in searched:
            share = min(k, math.ceil(_MARGIN * k * matching.size / total) + _LEAST)
            parts.append(index.search(queries, share, matching))
        # 2) A segment whose last neighbor is among the k nearest may hold more: ask it again for k.
        found = merge([*others, *parts], len(queries), k)
        for (_, matching), part in zip(searched, parts, strict=True):
            if part.ids.shape[1] < min(k, matching.size):
                unsure |= part.distances[:, -1] <= found.distances[:, -1]
        again = np.flatnonzero(unsure)
        if len(again):
            parts = [part.rows(again) for part in others]
            parts += [index.search(queries[again], k, matching) for index, matching in searched]
            found.put(again, merge(parts, len(again), k))
        return found

    def _index_of(self, segment: Segment, known: dict[StoredFile, SegmentIndex]) -> SegmentIndex | None:
        if segment.index is None or segment.index.file in self._damaged:
            return None
        file = segment.index.file
        if file in known:
            known[file].update(segment)
            return known[file]
        try:
            return self._opens(segment, segment.index.parameters)
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
        _log.warning("%s (its keys are searched exactly until optimize builds it again)", problem)
        return None


class GroupSearches:
    """The searches of all groups. Each is created at its first use and updated to the newest records.

    Any number of threads may search at the same time.

    Args:
        segments: the open directory.
    """

    def __init__(self, segments: KeySegments) -> None:
        self._segments = segments
        self._lock = ReadersWriterLock()
        self._held: Mapping[int, Sequence[Segment]] = {}
        self._searches: dict[int, GroupSearch] = {}

    def look(
        self,
        groups: frozenset[int] | None,
        look: Callable[[Sequence[GroupSearch]], Found],
        new: Callable[[], GroupSearch],
    ) -> Found:
        """Search the newest records of some groups and return the result of `look`.

        Damaged segments are left out: when `look` finds one, it is called again without it.

        Args:
            groups: group numbers; None for all groups. A group without records is left out.
            look: is called with the searches of the groups.
            new: creates an empty search of one group. It is an argument and no attribute, because a reference
                cycle between a datastore and its searches would hold the writer's lock after an error, until
                the garbage is collected.

        Raises:
            CorruptDatastoreError: a file is damaged that cannot be left out.
        """
        known = 0
        while True:
            try:
                return self._look(groups, look, new)
            except CorruptDatastoreError:
                damaged = len(self._segments.damaged())
                if damaged == known:
                    raise
                known = damaged

    def close(self) -> None:
        """Close the directory and drop all searches."""
        with self._lock.writing():
            self._searches, self._held = {}, {}
            self._segments.close()

    def _look(
        self,
        groups: frozenset[int] | None,
        look: Callable[[Sequence[GroupSearch]], Found],
        new: Callable[[], GroupSearch],
    ) -> Found:
        updated = False
        while True:
            with self._lock.reading():
                # Update at most once: a busy writer must not delay a search for ever.
                if (updated or self._segments.by_group() is self._held) and self._ready(groups):
                    return look([self._searches[group] for group in self._chosen(groups)])
            with self._lock.writing():
                self._update(groups, new)
            updated = True

    def _chosen(self, groups: frozenset[int] | None) -> list[int]:
        """Return the groups to search that have records."""
        if groups is None:
            return list(self._held)
        return [group for group in sorted(groups) if group in self._held]

    def _ready(self, groups: frozenset[int] | None) -> bool:
        return all(
            group in self._searches and self._searches[group].holds(self._held[group])
            for group in self._chosen(groups)
        )

    def _update(self, groups: frozenset[int] | None, new: Callable[[], GroupSearch]) -> None:
        """Update the searches of some groups to the newest records. The caller holds the lock for writing."""
        while True:
            # Read the newest segments again: another thread may have updated meanwhile.
            self._held = self._segments.by_group()
            for group in self._searches.keys() - self._held.keys():
                del self._searches[group]
            with suppress(FileNotFoundError):  # a writer replaced an index while a reader opened it
                for group in self._chosen(groups):
                    if group not in self._searches:
                        self._searches[group] = new()
                    if not self._searches[group].holds(self._held[group]):
                        self._searches[group].update(self._held[group])
                return


class ReadersWriterLock:
    """A lock for many readers or one writer. A waiting writer goes before readers that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._written = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Share the lock with other readers."""
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
    def writing(self) -> Iterator[None]:
        """Hold the lock exclusively."""
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
