"""The Qdrant adapter: one collection for a store."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from knnstore.datastore import (
    BATCH_SIZE,
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
    read_keys,
    read_owner,
    write_owner,
)
from knnstore.errors import ConfigError, DatastoreClosedError, ReadOnlyError
from knnstore_qdrant.conditions import Condition, condition_of_filter, condition_of_ranges
from knnstore_qdrant.options import Options, is_server
from knnstore_qdrant.points import Points, check_range, ids_where, in_range, rows_at_once, scrolled

_NEIGHBORS_AT_ONCE = 1 << 14  # in one answer: each is a Python object for a moment


class QdrantDatastore:
    """Vectors in Qdrant: a server, or its engine in this process.

    A point's id is the record's; its payload holds the group and the position, both indexed. A search
    whose graph gives fewer than k neighbors is repeated exactly.

    Args:
        points: the open collection.
        dim: number of components of a vector.
        metric: how distances are measured.
        mode: as in `Datastore.open`.
        options: the adapter's parameters.
    """

    def __init__(self, points: Points, dim: int, metric: Metric, mode: Mode, options: Options) -> None:
        self._dim, self._metric, self._mode, self._options = dim, metric, mode, options
        self._opened = points
        self._closed = False
        self._closing = threading.Lock()

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a collection; see `Datastore.open`.

        Args:
            location: ``http://HOST:PORT`` or ``https://…`` for a server, or a directory, which Qdrant's
                engine then opens in this process.
            dim: number of components of a vector, 1 to 65536.
            metric: how distances are measured.
            mode: as in `Datastore.open`.
            **params: see `Options`.

        Raises:
            StoreUnavailableError: the server cannot be reached.
            AdapterLoadError: the package that this location needs is not installed.
        """
        if not 1 <= dim <= 65536:
            raise ConfigError(f"dim must be between 1 and 65536, got {dim}")
        metric = Metric(metric)
        options = Options.of(params)
        points: Points
        if is_server(location):
            from knnstore_qdrant.connecting import open_server

            points = open_server(str(location), dim, metric, mode, options)
        else:
            from knnstore_qdrant.embedded import EmbeddedPoints

            points = EmbeddedPoints(Path(location), dim, metric, mode, options)
        return cls(points, dim, metric, mode, options)

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove the collection at a location; see `SupportsErase.erase`."""
        options = Options.of(params)
        if is_server(location):
            from knnstore_qdrant.connecting import erase_server

            erase_server(str(location), options)
        else:
            from knnstore_qdrant.embedded import erase_directory

            erase_directory(Path(location))

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Bytes of a point on the disk; see `SupportsSize.record_size`."""
        return Options.of(params).point_size(dim)

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Who claimed the collection at a location; see `SupportsOwner.owner`."""
        options = Options.of(params)
        if not is_server(location):
            return read_owner(Path(location))
        from knnstore_qdrant.connecting import owner_on_server

        return owner_on_server(str(location), options)

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Remember a new owner; see `SupportsOwner.claim`."""
        options = Options.of(params)
        if not is_server(location):
            return write_owner(Path(location), owner)
        from knnstore_qdrant.connecting import claim_on_server

        return claim_on_server(str(location), owner, options)

    @classmethod
    def beside(cls, location: str | Path, **params: Any) -> dict[str, Any]:
        """Choose a name for a copy of a server's collection; see `SupportsBeside.beside`."""
        from knnstore_qdrant.connecting import free_name

        return {"collection": free_name(str(location), Options.of(params))}

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
        """What holds for this way of reaching Qdrant."""
        points = self._opened
        return Capabilities(
            exact_search=points.exact_search,
            exact_keys=points.exact_keys,
            persistent=True,
            shared_writers=points.shared_writers,
        )

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records, replacing those whose id is present; see `Datastore.add`.

        If a server fails in the middle, some of the records may be stored: adding again completes them.
        """
        points = self._writable()
        ids, keys, groups = checked_records(ids, keys, groups, self._dim)
        check_range(points, keys)
        if len(ids):
            points.upsert(ids, keys, groups)

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query; see `Datastore.search`."""
        points, k = self._points(), checked_k(k)
        queries = in_range(points, checked_keys(queries, self._dim, what="queries"))
        condition = None if where is None else condition_of_filter(where, self._ids_where)
        if not len(queries) or (condition is not None and not condition):
            return Neighbors.nothing(len(queries), k)
        size = max(1, _NEIGHBORS_AT_ONCE // k)
        parts = [
            self._nearest(points, queries[start : start + size], k, condition)
            for start in range(0, len(queries), size)
        ]
        return Neighbors.joined(parts, axis=0)

    def delete(self, ids: IdRanges) -> None:
        """Remove every record in the ranges; see `Datastore.delete`."""
        points = self._writable()
        condition = condition_of_ranges(ids, self._ids_where)
        if condition:
            points.delete(condition)

    def count(self) -> int:
        """How many records are live."""
        return self._points().count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id; see `Datastore.iterate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        condition = None if ids is None else condition_of_ranges(ids, self._ids_where)
        if condition is not None and not condition:
            return
        yield from scrolled(self._points, min(batch_size, rows_at_once(self._dim)), condition)

    def get(self, ids: Ids) -> Keys:
        """Read the keys of some records; see `SupportsGet.get`."""
        return read_keys(self, ids)

    def verify(self) -> list[str]:
        """In this process, compare the payload's indexes with all points; see `SupportsVerify.verify`."""
        return self._points().verify()

    def flush(self) -> None:
        """Return when everything so far is durable; indexing goes on. See `Datastore.flush`."""
        self._points().flush()

    def optimize(self) -> None:
        """Wait until all records are indexed and the space of removed ones is reclaimed.

        Until then they are found too, by comparing with each. Call it after adding many.
        """
        self._writable().optimize()

    def close(self) -> None:
        """Flush, if opened for writing, and release everything."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            if self._mode != "r":
                self._opened.flush()
        finally:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _points(self) -> Points:
        if self._closed:
            raise DatastoreClosedError("this Qdrant store was closed; open it again")
        return self._opened

    def _writable(self) -> Points:
        points = self._points()
        if self._mode == "r":
            raise ReadOnlyError("this Qdrant store was opened for reading; open it with mode 'a' to write")
        return points

    @staticmethod
    def _nearest(points: Points, queries: Keys, k: int, condition: Condition | None) -> Neighbors:
        found = points.query(queries, k, condition, exact=points.exact_search)
        short = np.flatnonzero(found.ids[:, -1] < 0)
        if len(short) and not points.exact_search:
            # Few match, or the graph of those that match is not connected.
            found.put(short, points.query(queries[short], k, condition, exact=True))
        return found

    def _ids_where(self, condition: Condition) -> Ids:
        return ids_where(self._points, condition)


_conforms: type[Datastore] = QdrantDatastore  # here a type checker compares every signature
