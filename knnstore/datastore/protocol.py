"""The contract between knnstore and a vector engine: the `Datastore` protocol."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from knnstore.datastore.arrays import Capabilities, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.ranges import IdRanges

Mode = Literal["r", "a", "x"]

BATCH_SIZE = 8192
"""Default number of records in a batch of `Datastore.iterate`."""


@runtime_checkable
class Datastore(Protocol):
    """A set of records: vectors under int64 ids, each in one group, searched for the nearest neighbors.

    Several threads may share one handle: searches run in parallel with each other and with one thread that
    adds or deletes. Exceptions of the engine are chained to a `KnnstoreError`. A connection problem raises
    `StoreUnavailableError`; the call may be retried.
    """

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore.

        Args:
            location: a directory that the adapter owns, or the URL of a server.
            dim: number of components of a vector, >= 1.
            metric: metric of the distances.
            mode: ``"r"`` reads an existing datastore and sees the changes that a writer flushes without
                reopening; ``"a"`` opens for writing, or creates; ``"x"`` creates.
            **params: the adapter's parameters, which each adapter documents. Parameters about the storage of
                records are fixed when the datastore is created. Parameters about building an index apply when
                an index is built. Parameters about searching or about reaching an engine apply to this
                handle.

        Raises:
            DatastoreNotFoundError: mode ``"r"`` and no datastore exists.
            DatastoreExistsError: mode ``"x"`` and a datastore exists.
            DatastoreMismatchError: the datastore has another dim or metric; the message names both.
            LockedError: another process writes to the datastore and the engine allows only one writer.
            ConfigError: a parameter is unknown (the message names the accepted ones) or has a bad value.
        """

    @property
    def dim(self) -> int:
        """Number of components of a vector."""

    @property
    def metric(self) -> Metric:
        """Metric of the distances."""

    @property
    def capabilities(self) -> Capabilities:
        """The features of this engine."""

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records; a record replaces an older record with the same id, including its group.

        When the call returns, `search` of this handle finds the records; they are durable after `flush`. The
        arrays are neither kept nor changed. An empty call does nothing. A call with refused arguments stores
        nothing. If an engine fails halfway (disk full, connection lost), any of the records may have been
        stored or replaced, each of them completely; calling again completes the rest.

        Args:
            ids: int64, shape (n,), >= 0, without duplicates.
            keys: shape (n, dim), finite; other float types and layouts are cast.
            groups: int32, shape (n,), >= 0.

        Raises:
            DimensionMismatchError: the keys have another dimension.
            InvalidVectorError: a key contains NaN or infinity.
            ValueError: shapes do not match, an id or a group is negative, or an id occurs twice.
            ReadOnlyError: the handle was opened with mode ``"r"``.
        """

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query.

        Args:
            queries: float32, shape (q, dim), finite; q may be 0.
            k: number of neighbors, >= 1. If fewer records match, rows are padded with id -1 at +inf. Among
                equally near records at the k-th place the engine may choose; it should choose the smallest
                ids.
            where: filter that records must match; None matches all. The engine always respects the filter: an
                empty filter matches no record, and a filter may have any number of ranges.

        Returns:
            ids and distances, each of shape (q, k), nearest first.

        Raises:
            DimensionMismatchError: the queries have another dimension.
            InvalidVectorError: a query contains NaN or infinity.
            ValueError: k < 1.
        """

    def delete(self, ids: IdRanges) -> None:
        """Delete every record whose id is in the ranges; ids without a record are ignored.

        When the call returns, no search of this handle finds the records; the deletion is durable after
        `flush`.
        """

    def count(self) -> int:
        """Return the exact number of live records."""

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id, in batches of at most `batch_size`.

        Args:
            ids: ranges of ids to which the result is restricted; None yields all records.
            batch_size: largest number of records in a batch, >= 1.
        """

    def flush(self) -> None:
        """Make everything added or deleted so far durable: it survives `kill -9` and a power loss."""

    def close(self) -> None:
        """Flush, if the handle was opened for writing, and release all resources.

        A second call does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
