"""The contract between knnstore and a vector engine."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from knnstore.datastore.arrays import Capabilities, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.ranges import IdRanges

Mode = Literal["r", "a", "x"]

BATCH_SIZE = 8192
"""Records that `Datastore.iterate` gives at once, if nothing else is asked for."""


@runtime_checkable
class Datastore(Protocol):
    """Vectors under int64 ids, each in one group, searched for the nearest.

    One handle may be used by several threads: searches run beside each other and beside one
    thread that adds or deletes. Engine exceptions are chained to a `KnnstoreError`; trouble with
    a connection is `StoreUnavailableError` and safe to retry.
    """

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore.

        Args:
            location: a directory that the adapter owns, or the URL of a server.
            dim: number of components of a vector, >= 1.
            metric: how distances are measured.
            mode: ``"r"`` reads what exists and sees what a writer flushes without reopening;
                ``"a"`` opens for writing or creates; ``"x"`` creates.
            **params: the adapter's own parameters, which each adapter documents. What says how records are
                kept is fixed when the datastore is made; what says how an index is built counts when one
                is built, and what says how to search or to reach an engine, for this handle.

        Raises:
            DatastoreNotFoundError: mode ``"r"`` and nothing is there.
            DatastoreExistsError: mode ``"x"`` and something is there.
            DatastoreMismatchError: what is there has another dim or metric; both are named.
            LockedError: another process writes to it and the engine allows one writer only.
            ConfigError: a parameter is unknown (the accepted ones are named) or has a bad value.
        """

    @property
    def dim(self) -> int:
        """Number of components of a vector."""

    @property
    def metric(self) -> Metric:
        """How distances are measured."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records; one whose id is present replaces the old one, group and all.

        When it returns, this handle's `search` sees the records; they are durable after `flush`.
        The arrays are neither kept nor changed. An empty call does nothing. Arguments that are refused
        leave nothing behind. An engine that fails half-way (a disk is full, a connection breaks) may leave
        some of the records, each of them whole, in place of old ones too: adding again completes them.

        Args:
            ids: int64, shape (n,), >= 0, each once.
            keys: shape (n, dim), finite; other float types and layouts are cast.
            groups: int32, shape (n,), >= 0.

        Raises:
            DimensionMismatchError: the keys have another dimension.
            InvalidVectorError: a key holds NaN or an infinity.
            ValueError: shapes do not match, an id or a group is negative, an id stands twice.
            ReadOnlyError: the handle was opened with mode ``"r"``.
        """

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query.

        Args:
            queries: float32, shape (q, dim), finite; q may be 0.
            k: how many, >= 1; where fewer match, rows are padded with id -1 at +inf. Which of equally near
                records are found where not all have room is the engine's choice; by the least ids is best.
            where: only these records; None means all. Always honored, an empty one matches none, and so
                is one with any number of ranges.

        Returns:
            ids and distances, each of shape (q, k).

        Raises:
            DimensionMismatchError: the queries have another dimension.
            InvalidVectorError: a query holds NaN or an infinity.
            ValueError: k < 1.
        """

    def delete(self, ids: IdRanges) -> None:
        """Remove every record in the ranges; unknown ids are ignored.

        When it returns, no search of this handle finds them; durable after `flush`.
        """

    def count(self) -> int:
        """How many records are live, exactly."""

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every live record once, by ascending id, in batches of at most `batch_size`.

        Args:
            ids: only records in these ranges; None means all.
            batch_size: records a batch, >= 1.
        """

    def flush(self) -> None:
        """Return when everything added or deleted so far survives `kill -9` and a power loss."""

    def close(self) -> None:
        """Flush, if opened for writing, and release everything; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
