"""The exact reference datastore: the oracle of the tests, and the shortest complete adapter.

Authors of adapters can start from this file: it implements the whole `Datastore` protocol, and `get`.
Subclassing the protocol is not needed; having its methods is enough.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arguments import validate_k, validate_keys, validate_params, validate_records
from knnstore.datastore.arrays import Capabilities, Distances, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.protocol import BATCH_SIZE, Datastore, Mode, read_keys
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import ConfigError, DatastoreClosedError, DatastoreNotFoundError

_BLOCK_ROWS = 256
"""Number of keys whose differences to a query are in memory at once; they fit into the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records sorted by ascending id, as three arrays of the same length that are never changed."""

    ids: Ids
    keys: Keys
    groups: Groups

    def select_rows(self, rows: NDArray[Any]) -> "_Records":
        """Return a copy of some records.

        Args:
            rows: the records to copy: a mask of all records, or the array indices of records.
        """
        return _Records(self.ids[rows], self.keys[rows], self.groups[rows])


class MemoryDatastore:
    """Keeps float32 keys in memory and compares each query with every key.

    Searches are exact and never wait for a change. Each change copies all records to new arrays; a search
    that is running continues with the old arrays. The records are lost when the object is closed or deleted.
    Two objects never share records, even if they were opened with the same location.

    Args:
        dim: number of components of a vector, >= 1.
        metric: metric of the distances.

    Example:
        >>> store = MemoryDatastore.open("anywhere", dim=2)
        >>> store.add(np.array([7, 9]), np.array([[0, 0], [3, 4]]), np.array([0, 0]))
        >>> store.search(np.array([[0, 1]]), k=3).distances
        array([[ 1., 18., inf]], dtype=float32)
    """

    def __init__(self, dim: int, metric: Metric) -> None:
        self._dim = dim
        self._metric = metric
        self._write_lock = threading.Lock()
        self._records: _Records | None = _Records(
            np.empty(0, np.int64), np.empty((0, dim), np.float32), np.empty(0, np.int32)
        )

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Create an empty datastore in memory.

        Args:
            location: ignored, except in an error message.
            dim: number of components of a vector, >= 1.
            metric: metric of the distances.
            mode: ``"a"`` or ``"x"``; both create an empty datastore.
            **params: must be empty, because this adapter has no parameters.

        Raises:
            DatastoreNotFoundError: mode is ``"r"``: a datastore in memory cannot be read by a second handle.
            ConfigError: dim is below 1, or `params` is not empty.
        """
        validate_params("memory", params, accepted={})
        if dim < 1:
            raise ConfigError(f"dim must be at least 1, got {dim}")
        if mode == "r":
            raise DatastoreNotFoundError(
                f"{location}: a memory store is always empty when it is opened; use mode 'a'"
            )
        return cls(dim, Metric(metric))

    @property
    def dim(self) -> int:
        """Number of components of a vector."""
        return self._dim

    @property
    def metric(self) -> Metric:
        """Metric of the distances."""
        return self._metric

    @property
    def capabilities(self) -> Capabilities:
        """The features of this engine: exact search, exact keys, not persistent, one writer."""
        return Capabilities(exact_search=True, exact_keys=True, persistent=False, shared_writers=False)

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records. A new record replaces an older record with the same id.

        Args:
            ids: record ids, integers, shape (n,), >= 0, without duplicates.
            keys: vectors, shape (n, dim), finite.
            groups: group number of each record, integers, shape (n,), >= 0.

        Raises:
            ValueError, DimensionMismatchError, InvalidVectorError: an argument is invalid; nothing is stored.
        """
        ids, keys, groups = validate_records(ids, keys, groups, self._dim)
        with self._write_lock:
            old = self._get_current_records()
            unchanged = old.select_rows(~np.isin(old.ids, ids))
            merged = _Records(
                np.concatenate([unchanged.ids, ids]),
                np.concatenate([unchanged.keys, keys]),
                np.concatenate([unchanged.groups, groups]),
            )
            self._records = merged.select_rows(np.argsort(merged.ids))

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query exactly, by comparing the query with every record.

        Args:
            queries: query vectors, shape (q, dim), finite.
            k: number of neighbors, >= 1.
            where: records that may be found; None allows all records.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. Equally near records are ordered by
            ascending id. If fewer than k records match, each missing neighbor has id -1 and distance +inf.
        """
        queries, k = validate_keys(queries, self._dim, what="queries"), validate_k(k)
        records = self._get_current_records()
        if where is not None:
            records = records.select_rows(where.ids.contains(records.ids))
        neighbors = Neighbors.all_missing(len(queries), k)
        # One query at a time, so that no result depends on the other queries of the batch.
        for row, query in enumerate(queries):
            distances = _compute_distances(query, records.keys, self._metric)
            nearest = np.argsort(distances, kind="stable")[:k]
            neighbors.ids[row, : len(nearest)] = records.ids[nearest]
            neighbors.distances[row, : len(nearest)] = distances[nearest]
        return neighbors

    def delete(self, ids: IdRanges) -> None:
        """Delete every record whose id is in the ranges; ids without a record are ignored."""
        with self._write_lock:
            old = self._get_current_records()
            self._records = old.select_rows(~ids.contains(old.ids))

    def count(self) -> int:
        """Return the number of records."""
        return len(self._get_current_records().ids)

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield records by ascending id, in batches (ids, keys, groups).

        Changes that are made after the first batch was requested do not affect the iteration.

        Args:
            ids: ids of the records to yield; None yields all records.
            batch_size: largest number of records in a batch, >= 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        records = self._get_current_records()
        rows = np.arange(len(records.ids)) if ids is None else np.flatnonzero(ids.contains(records.ids))
        for start in range(0, len(rows), batch_size):
            batch = records.select_rows(rows[start : start + batch_size])
            yield batch.ids, batch.keys, batch.groups

    def get(self, ids: Ids) -> Keys:
        """Return the keys of records by id, float32, shape (n, dim), in the order of `ids`.

        Raises RecordNotFoundError if an id has no record.
        """
        return read_keys(self, ids)

    def flush(self) -> None:
        """Do nothing, because the store has no files. Raises DatastoreClosedError after `close`."""
        self._get_current_records()

    def close(self) -> None:
        """Drop all records. Later calls of methods that read or change records raise DatastoreClosedError."""
        self._records = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _get_current_records(self) -> _Records:
        """Return the current records. Raises DatastoreClosedError after `close`."""
        records = self._records
        if records is None:
            raise DatastoreClosedError("this memory store was closed; open a new one")
        return records


def _compute_distances(query: Keys, keys: Keys, metric: Metric) -> Distances:
    """Compute the distance of one query, shape (dim,), to keys of shape (n, dim). Returns shape (n,).

    The function shares no code with `knnstore.datastore.distances`, because tests compare that module with
    this function. For L2 it sums the squared differences. The formula |q|² - 2qx + |x|² would be several
    times faster, but loses most digits of the distance between nearly equal vectors.
    """
    distances = np.empty(len(keys), np.float32)
    for start in range(0, len(keys), _BLOCK_ROWS):
        block = keys[start : start + _BLOCK_ROWS]
        if metric is Metric.L2:
            difference = block - query
            result = np.einsum("nd,nd->n", difference, difference)
        else:
            result = -np.einsum("nd,d->n", block, query)
        distances[start : start + _BLOCK_ROWS] = result
    return distances


_conforms: type[Datastore] = MemoryDatastore  # a type checker compares every signature here
