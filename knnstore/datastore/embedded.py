"""What the adapters of libraries that run in the process share: all but the index."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from knnstore.datastore.checks import checked_k, checked_keys, checked_records
from knnstore.datastore.erasing import erase_segments
from knnstore.datastore.locks import ReadersWriterLock
from knnstore.datastore.protocol import Mode
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.results import Found, merge
from knnstore.datastore.rows import Segment
from knnstore.datastore.segments import KeySegments
from knnstore.datastore.types import Capabilities, Filter, Groups, Ids, Keys, Metric, Neighbors


class GroupSearch(Protocol):
    """Searches the records of one group."""

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        ...

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; never runs beside a search.

        Raises:
            FileNotFoundError: the file of an index is gone, the first time that it is: a newer manifest
                may have replaced it.
        """
        ...

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Found:
        """Find the k nearest records of each query, of all or of those with some ids."""
        ...


class EmbeddedDatastore(ABC):
    """Vectors in a local directory, as durable key segments that an index for each group searches.

    The keys are kept in half precision; every index is derived from them. One process may write, any
    number may read what it flushes. Nothing is indexed before the first search of a handle, so
    filling a store costs no memory.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
    """

    def __init__(self, segments: KeySegments, dim: int, metric: Metric) -> None:
        self._segments = segments
        self._dim = dim
        self._metric = metric
        self._lock = ReadersWriterLock()
        self._held: tuple[Segment, ...] | None = None
        self._by_group: dict[int, list[Segment]] = {}
        self._indexes: dict[int, GroupSearch] = {}

    @classmethod
    @abstractmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`."""

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove the datastore in a directory; see `SupportsErase.erase`."""
        erase_segments(Path(location))

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this engine can do."""

    @abstractmethod
    def optimize(self) -> None:
        """Build indexes and reclaim the space of deleted records; see `SupportsOptimize`."""

    @abstractmethod
    def _new_index(self) -> GroupSearch:
        """Make the search of a group; it holds nothing yet."""

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """How distances are measured."""
        return self._metric

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records, replacing those whose id is present; see `Datastore.add`."""
        self._segments.append(*checked_records(ids, keys, groups, self._dim))

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`."""
        queries, k = checked_keys(queries, self._dim, what="queries"), checked_k(k)
        groups = where.groups if where else None
        ids = where.ids if where and groups is None else None
        updated = False
        while True:
            with self._lock.reading():
                # What was newest when this search began is new enough: a busy writer delays no search.
                if (updated or self._segments.snapshot() is self._held) and self._ready(groups):
                    parts = [self._indexes[group].search(queries, k, ids) for group in self._chosen(groups)]
                    found = merge(parts, len(queries), k)
                    return Neighbors(found.ids, found.distances)
            with self._lock.writing():
                self._update(groups)
            updated = True

    def delete(self, ids: IdRanges) -> int:
        """Remove every record in the ranges; see `Datastore.delete`."""
        return self._segments.delete(ids)

    def count(self) -> int:
        """How many records are live."""
        return self._segments.count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = 8192
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id; see `Datastore.iterate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._segments.iterate(ids=ids, batch_size=batch_size)

    def flush(self) -> None:
        """Return when everything so far is durable; see `Datastore.flush`."""
        self._segments.flush()

    def verify(self) -> list[str]:
        """Check the size and the SHA-256 of every file; one line for each problem."""
        return self._segments.verify()

    def close(self) -> None:
        """Flush, if opened for writing, and release everything."""
        with self._lock.writing():
            self._indexes, self._by_group, self._held = {}, {}, None
            self._segments.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chosen(self, groups: frozenset[int] | None) -> list[int]:
        """The groups to search that have records."""
        return [group for group in self._by_group if groups is None or group in groups]

    def _ready(self, groups: frozenset[int] | None) -> bool:
        return all(
            group in self._indexes and self._indexes[group].holds(self._by_group[group])
            for group in self._chosen(groups)
        )

    def _update(self, groups: frozenset[int] | None) -> None:
        """Bring the indexes of some groups to the newest records; runs beside no search."""
        while True:
            # The newest, not those that made the caller come: another thread may have been here meanwhile.
            self._held = self._segments.snapshot()
            self._by_group = self._segments.by_group()
            for group in set(self._indexes) - set(self._by_group):
                del self._indexes[group]
            try:
                for group in self._chosen(groups):
                    if group not in self._indexes:
                        self._indexes[group] = self._new_index()
                    self._indexes[group].update(self._by_group[group])
                return
            except FileNotFoundError:  # a writer replaced an index while a reader opened it
                continue
