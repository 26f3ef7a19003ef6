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
    """A set of records in a vector engine. A record is a vector (the key) with an int64 id and a group.

    A group is a set of records with the same group number; a store uses one number for each domain. Several
    threads may share one handle: searches run in parallel with each other and with one thread that adds or
    deletes. If the engine raises an exception, the method raises a `KnnstoreError` from it. A connection
    problem raises `StoreUnavailableError`; the call may be retried.
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
            mode: ``"r"`` opens an existing datastore for reading; later searches of this handle include the
                changes that a writer has flushed. ``"a"`` opens for writing, and creates the datastore if it
                does not exist. ``"x"`` creates a datastore and opens it for writing.
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
        """The features of this vector engine, such as exact search."""

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records; a new record replaces an older record with the same id, including its group.

        When the call returns, `search` of this handle finds the records. The records are durable after
        `flush`. The arrays are neither kept nor changed. With n = 0 the call does nothing. A call with
        invalid arguments stores nothing. If the engine fails during the call (disk full, connection lost),
        some of the records may be stored, each of them completely. The same call can then be repeated, and
        stores all records.

        Args:
            ids: record ids, int64, shape (n,), >= 0, without duplicates.
            keys: vectors, shape (n, dim), finite; other dtypes than float32 and other layouts are cast.
            groups: group number of each record, int32, shape (n,), >= 0.

        Raises:
            DimensionMismatchError: the keys have another dimension.
            InvalidVectorError: a key contains NaN or infinity.
            ValueError: shapes do not match, an id or a group is negative, or an id occurs twice.
            ReadOnlyError: the handle was opened with mode ``"r"``.
        """

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query.

        Args:
            queries: query vectors, float32, shape (q, dim), finite; q may be 0.
            k: number of neighbors, >= 1. If several records compete for the k-th place at the same distance,
                the engine may choose; it should choose the smallest ids.
            where: filter that records must match; None matches all records. The engine never returns a
                record that does not match. An empty filter matches no record. A filter may have any number
                of ranges.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k records match, each
            missing neighbor has id -1 and distance +inf.

        Raises:
            DimensionMismatchError: the queries have another dimension.
            InvalidVectorError: a query contains NaN or infinity.
            ValueError: k < 1.
        """

    def delete(self, ids: IdRanges) -> None:
        """Delete every record whose id is in the ranges; ids without a record are ignored.

        When the call returns, no search of this handle finds the deleted records. The deletion is durable
        after `flush`.
        """

    def count(self) -> int:
        """Return the exact number of records; deleted records and replaced records do not count."""

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every record once, by ascending id, as batches (ids, keys, groups).

        Deleted records and replaced records are not yielded.

        Args:
            ids: ids of the records to yield; None yields all records.
            batch_size: largest number of records in a batch, >= 1.

        Yields:
            Record ids int64 (n,), keys float32 (n, dim), and group numbers int32 (n,) of n records.
        """

    def flush(self) -> None:
        """Write all additions and deletions so far to disk, so that they survive a crash or a power loss."""

    def close(self) -> None:
        """Release all resources. If the handle was opened for writing, the changes so far are flushed first.

        A second call does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
