"""The FAISS adapter: durable key segments, searched by an index for each group."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from knnstore.datastore import (
    Capabilities,
    Datastore,
    Filter,
    Groups,
    IdRanges,
    Ids,
    Keys,
    Metric,
    Mode,
    Neighbors,
    checked_k,
    checked_keys,
    checked_records,
)
from knnstore.datastore.erasing import erase_segments
from knnstore.datastore.locks import ReadersWriterLock
from knnstore.datastore.rows import Segment
from knnstore.datastore.segments import KeySegments
from knnstore.errors import ConfigError, CorruptDatastoreError
from knnstore_faiss.group import GroupIndex
from knnstore_faiss.inverted import build, fits
from knnstore_faiss.policy import Policy
from knnstore_faiss.results import merge


class FaissDatastore:
    """Vectors in a local directory, searched with FAISS.

    The keys are kept in half precision in immutable segments; every index is derived from them.
    One process may write, any number may read what it flushes. Nothing is indexed before the first
    search of a handle, so filling a store costs no memory.

    Args:
        segments: the open directory.
        dim: number of components of a vector.
        metric: how distances are measured.
        policy: which indexes to build and how far to search them.
    """

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        self._dim = dim
        self._metric = metric
        self._policy = policy
        self._segments = segments
        self._lock = ReadersWriterLock()
        self._held: tuple[Segment, ...] | None = None
        self._by_group: dict[int, list[Segment]] = {}
        self._indexes: dict[int, GroupIndex] = {}

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a directory; see `Datastore.open`.

        Args:
            location: the directory.
            dim: number of components of a vector, >= 1.
            metric: how distances are measured.
            mode: as in `Datastore.open`.
            **params: `index`, `nprobe`, `rerank` and `exact_distances`; see `Policy`.
        """
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        metric = Metric(metric)
        policy = Policy.of(params, dim, metric)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove the datastore in a directory; see `SupportsErase.erase`."""
        erase_segments(Path(location))

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """How distances are measured."""
        return self._metric

    @property
    def capabilities(self) -> Capabilities:
        """Durable, in half precision, with one writer."""
        exact = self._policy.index == "exact"
        return Capabilities(exact_search=exact, exact_keys=False, persistent=True, shared_writers=False)

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

    def optimize(self) -> None:
        """Merge segments, reclaim the space of deleted records, and index segments that are large.

        Until then added records are searched exactly, so call it after adding many.
        """
        self._segments.compact()
        for found in self._segments.by_group().values():
            live = sum(segment.live for segment in found)
            for segment in found:
                factory = self._policy.factory(segment.rows, live, self._dim)
                if factory and fits(factory, segment.rows, self._dim, self._metric):
                    self._index(segment, factory)

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

    def _index(self, segment: Segment, factory: str) -> None:
        """Give a segment the index that it should have, unless it has it, undamaged."""
        assert segment.entry is not None
        present = segment.entry.index
        if present and present.parameters == {"faiss": factory} and self._segments.intact(present.file):
            return
        self._segments.write_index(
            segment,
            lambda path: build(segment, factory, self._dim, self._metric, path),
            {"faiss": factory},
        )

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
                        self._indexes[group] = GroupIndex(
                            self._segments.root, self._dim, self._metric, self._policy
                        )
                    self._indexes[group].update(self._by_group[group])
                return
            except FileNotFoundError as error:  # a writer replaced an index while a reader opened it
                if self._segments.snapshot() is self._held:
                    raise CorruptDatastoreError(f"{error.filename} is missing: run optimize") from error


_conforms: type[Datastore] = FaissDatastore  # here a type checker compares every signature
