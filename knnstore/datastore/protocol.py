"""The contract between knnstore and a vector engine."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from knnstore.datastore.arrays import Capabilities, DamagedPart, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors, Visit
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


@runtime_checkable
class SupportsGet(Protocol):
    """An engine that can read a few records fast."""

    def get(self, ids: Ids) -> Keys:
        """Read the keys of some records.

        Args:
            ids: int64, shape (n,), in any order; one may stand there several times.

        Returns:
            float32, shape (n, dim), in the order of the ids; as exact as those of `iterate`.

        Raises:
            RecordNotFoundError: there is no record with one of the ids, which it names.
        """


@runtime_checkable
class SupportsCells(Protocol):
    """An engine whose records lie in cells: a sum over all of a few cells needs no k nearest."""

    def visit(self, queries: Keys, probes: int, *, where: Filter | None = None) -> list[Visit]:
        """Measure each query against every record of the cells that are nearest to it.

        Cells without a record that matches are no cells here, so that a query finds something wherever
        there is something; with as many probes as there are cells it is measured against all that matches.

        Args:
            queries: float32, shape (q, dim), finite; q may be 0.
            probes: cells of each query, >= 1.
            where: only these records; see `Datastore.search`.

        Returns:
            Visits in which a query and a record meet once at most. They take q times the records of
            `probes` cells in memory, 4 bytes each.

        Raises:
            DimensionMismatchError, InvalidVectorError: as `Datastore.search`.
            ValueError: probes < 1.
        """


@runtime_checkable
class SupportsOptimize(Protocol):
    """An engine that can rearrange itself for faster search."""

    def optimize(self) -> None:
        """Build or extend indexes and reclaim the space of deleted records; searches stay correct."""


@runtime_checkable
class SupportsSize(Protocol):
    """An engine that knows how much of a local disk it takes."""

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Bytes that a record takes, its share of an index included; rather too many than too few.

        Args:
            dim: number of components of a vector.
            **params: the adapter's own parameters, as for `Datastore.open`.
        """


@runtime_checkable
class SupportsVacuum(Protocol):
    """An engine that can free its files of deleted records, which others only mark."""

    def vacuum(self) -> None:
        """Rewrite what holds deleted or replaced records: no file has their ids or keys afterwards."""


@runtime_checkable
class SupportsBeside(Protocol):
    """A server that can hold a copy of a datastore beside it."""

    @classmethod
    def beside(cls, location: str | Path, **params: Any) -> dict[str, Any]:
        """Choose where at the same location a copy goes.

        Args:
            location: as in `Datastore.open`.
            **params: those of the datastore.

        Returns:
            The parameters in which the copy differs; nothing is there yet.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsVerify(Protocol):
    """An engine that can check its own files."""

    def verify(self) -> list[str]:
        """Check sizes and checksums of everything stored; one line for each problem found."""


@runtime_checkable
class SupportsDamage(Protocol):
    """An engine that goes on without the part of its records that is damaged.

    Searching and iterating leave it out from the moment that it is known; it is logged once.
    """

    def damaged(self) -> list[DamagedPart]:
        """The damage that this handle knows of; `verify` finds the rest."""

    def abandon(self, part: DamagedPart) -> None:
        """Give up the records of a damaged part for good, durably: nobody needs them."""


@runtime_checkable
class SupportsErase(Protocol):
    """An engine that can remove a whole datastore."""

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove everything that the engine keeps at a location, and nothing else.

        It may be damaged, or partly removed by a call that was interrupted; where nothing is, nothing
        happens.

        Args:
            location: as in `Datastore.open`.
            **params: those that it was opened with.

        Raises:
            LockedError: another process writes to it.
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsOwner(Protocol):
    """An engine that remembers beside the keys whose they are.

    The store then writes, moves and erases no keys of another store, or of a home that it is a copy of.
    """

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Who claimed the datastore at a location last; None where nobody did, or nothing is.

        It is known as long as anything of the datastore is there: where its files are damaged, and where
        `erase` was interrupted.

        Args:
            location: as in `Datastore.open`.
            **params: those that it was opened with.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Remember a new owner, durably; records and open handles stay as they are.

        Args:
            location: of a datastore that is there; the caller has it open for writing.
            owner: one line of text.
            **params: those that it was opened with.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """
