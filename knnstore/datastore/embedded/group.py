"""The search of groups: large segments by their indexes, the rest exactly."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from knnstore.datastore.arrays import Keys
from knnstore.datastore.embedded.exact import ExactIndex
from knnstore.datastore.embedded.locks import ReadersWriterLock
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import Neighbors, merge
from knnstore.datastore.ranges import IdRanges
from knnstore.durable import StoredFile
from knnstore.errors import CorruptDatastoreError

_log = logging.getLogger(__name__)

_MARGIN = 1.25  # what a segment is asked for, as a multiple of its share
_LEAST = 64  # and beside it

Found = TypeVar("Found")


class SegmentIndex(Protocol):
    """Searches the rows of one segment through the index file that its entry names."""

    file: StoredFile

    def update(self, segment: Segment) -> None:
        """Search the rows that are live in this version of the segment; must not run beside a search."""

    def matching(self, ids: IdRanges | None) -> Any:
        """The live rows, of all records or of those with some ids; its `size` says how many."""

    def search(self, queries: Keys, k: int, matching: Any) -> Neighbors:
        """Find about the k nearest of some rows, and k always where there are k.

        Args:
            queries: float32, shape (q, dim), q >= 1.
            k: how many, >= 1.
            matching: from `matching`, not empty.
        """


class GroupSearch(Protocol):
    """Searches the records of one group."""

    rows: int
    """How many are live."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search.

        Raises:
            FileNotFoundError: the file of an index is gone, the first time that it is: a newer manifest
                may have replaced it.
        """

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find the k nearest records of each query, of all or of those with some ids."""


class GroupIndex:
    """The search of one group through an index for each of its larger segments.

    Args:
        exact: searches the rows that no index covers; empty.
        opens: see `EmbeddedDatastore._open_index`.
        is_indexed: see `EmbeddedDatastore._is_indexed`.
        damaged: grows by each file that turns out to be damaged or lost.
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
        """How many are live."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search.

        A segment whose index is damaged or lost is searched exactly until `optimize` builds it again.

        Raises:
            FileNotFoundError: the file of an index is gone, the first time that it is: a newer manifest
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
        """Find the k nearest records of each query, of all or of those with some ids."""
        searched = [(index, rows) for index in self._indexes if (rows := index.matching(ids)).size]
        if not searched or len(queries) == 0:
            return self._exact.search(queries, k, ids)
        exact = self._exact.count(ids)
        total = exact + sum(matching.size for _, matching in searched)
        others = [self._exact.search(queries, k, ids)] if exact else []
        # Each segment is asked for its share of the neighbors, and for all k only where it may hold more.
        parts, unsure = [], np.zeros(len(queries), bool)
        for index, matching in searched:
            share = min(k, math.ceil(_MARGIN * k * matching.size / total) + _LEAST)
            parts.append(index.search(queries, share, matching))
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
    """The search of each group, made when it is first asked for and brought to the newest records.

    Any number of threads may look beside each other.

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
        """Look in the newest records of some groups, or of all; what turns out to be damaged is left out.

        Args:
            groups: those that have no record are no error.
            look: is given their searches, and called again where it met damage.
            new: makes the search of one group, of nothing yet. It is not kept: a cycle of a datastore and its
                searches would hold the writer's lock after an error, until the garbage is collected.

        Raises:
            CorruptDatastoreError: something else is damaged than a segment, which can be left out.
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
        """Release everything, the directory too."""
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
                # What was newest when this search began is new enough: a busy writer delays no search.
                if (updated or self._segments.by_group() is self._held) and self._ready(groups):
                    return look([self._searches[group] for group in self._chosen(groups)])
            with self._lock.writing():
                self._update(groups, new)
            updated = True

    def _chosen(self, groups: frozenset[int] | None) -> list[int]:
        """The groups to search that have records."""
        if groups is None:
            return list(self._held)
        return [group for group in sorted(groups) if group in self._held]

    def _ready(self, groups: frozenset[int] | None) -> bool:
        return all(
            group in self._searches and self._searches[group].holds(self._held[group])
            for group in self._chosen(groups)
        )

    def _update(self, groups: frozenset[int] | None, new: Callable[[], GroupSearch]) -> None:
        """Bring the searches of some groups to the newest records; runs beside no search."""
        while True:
            # The newest, not those that made the caller come: another thread may have been here meanwhile.
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
