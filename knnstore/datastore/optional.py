"""What an engine may offer beside the `Datastore` protocol, each by methods of its own."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from knnstore.datastore.arrays import DamagedPart, Filter, Ids, Keys
from knnstore.datastore.visits import Visits


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

    def visit(self, queries: Keys, probes: int, *, where: Filter | None = None) -> list[Visits]:
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
