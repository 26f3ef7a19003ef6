"""Optional features of an engine beyond the `Datastore` protocol. Each is a protocol with its methods.

`SupportsGet`, `SupportsCells`, `SupportsOptimize`, `SupportsSize`, `SupportsVacuum`, `SupportsBeside`,
`SupportsVerify`, `SupportsDamage`, `SupportsErase`, `SupportsOwner`.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from knnstore.datastore.arrays import DamagedPart, Filter, Ids, Keys
from knnstore.datastore.protocol import Datastore
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.visits import Visits
from knnstore.errors import RecordNotFoundError


@runtime_checkable
class SupportsGet(Protocol):
    """An engine that reads a few records by id quickly."""

    def get(self, ids: Ids) -> Keys:
        """Return the keys of records.

        Args:
            ids: int64, shape (n,), in any order; an id may occur several times.

        Returns:
            float32, shape (n, dim), in the order of the ids; as exact as the keys from `iterate`.

        Raises:
            RecordNotFoundError: an id has no record; the message names the id.
        """


@runtime_checkable
class SupportsCells(Protocol):
    """An engine that divides its records into cells: clusters of nearby keys.

    A query can be compared with all records of its nearest cells, in place of its k nearest records.
    """

    def visit(self, queries: Keys, probes: int, *, where: Filter | None = None) -> list[Visits]:
        """Compute the distances of each query to every record of its nearest cells.

        Cells without a matching record are skipped and not counted. So each query finds at least one record
        if any record matches. With as many probes as cells, a query is compared with all matching records.

        Args:
            queries: float32, shape (q, dim), finite; q may be 0.
            probes: number of cells of each query, >= 1.
            where: filter that records must match; see `Datastore.search`.

        Returns:
            Stacks of distances, see `Visits`. A query and a record occur together at most once. The result
            takes 4 bytes of memory for each query and each record of its cells. Empty if no record matches or
            q is 0.

        Raises:
            DimensionMismatchError, InvalidVectorError: as `Datastore.search`.
            ValueError: probes < 1.
        """


@runtime_checkable
class SupportsOptimize(Protocol):
    """An engine that can reorganize itself for faster search."""

    def optimize(self) -> None:
        """Build or extend indexes and reclaim the space of deleted records. Search results stay correct."""


@runtime_checkable
class SupportsSize(Protocol):
    """An engine that can estimate its size on a local disk."""

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Estimate the bytes of one record on disk, including its share of an index.

        The estimate is rather too large than too small.

        Args:
            dim: number of components of a vector.
            **params: the adapter's parameters, as for `Datastore.open`.
        """


@runtime_checkable
class SupportsVacuum(Protocol):
    """An engine that only marks records as deleted, and can rewrite its files without them."""

    def vacuum(self) -> None:
        """Rewrite files with deleted or replaced records. Afterwards no file contains their ids or keys."""


@runtime_checkable
class SupportsBeside(Protocol):
    """An engine, usually a server, that can hold a copy of a datastore at the same location."""

    @classmethod
    def beside(cls, location: str | Path, **params: Any) -> dict[str, Any]:
        """Choose parameters under which a copy of the datastore can be created at the same location.

        Creates nothing.

        Args:
            location: as in `Datastore.open`.
            **params: the parameters of the datastore.

        Returns:
            The parameters that must differ for the copy, such as another name. No datastore has them yet.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsVerify(Protocol):
    """An engine that can check its files."""

    def verify(self) -> list[str]:
        """Check sizes and checksums of all stored files.

        Returns one line for each problem, empty if there is none. Changes nothing that is stored.
        """


@runtime_checkable
class SupportsDamage(Protocol):
    """An engine that continues without the damaged part of its records.

    As soon as the damage is known, searching and iterating leave the damaged records out. Each damage is
    logged once.
    """

    def damaged(self) -> list[DamagedPart]:
        """Return the damage that this handle has noticed so far, empty if none; `verify` looks for more."""

    def abandon(self, part: DamagedPart) -> None:
        """Remove a damaged part, one of the results of `damaged`, from the datastore durably.

        Its records are lost. After that they no longer count as damaged.
        """


@runtime_checkable
class SupportsErase(Protocol):
    """An engine that can remove a whole datastore."""

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove everything that the engine keeps for the datastore at a location, and nothing else.

        The datastore may be damaged, or half removed by an interrupted call. Does nothing if nothing exists.

        Args:
            location: as in `Datastore.open`.
            **params: the parameters with which the datastore was opened.

        Raises:
            LockedError: another process writes to the datastore.
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsOwner(Protocol):
    """An engine that stores the name of an owner, a store, with the keys.

    A store reads this name to avoid writing, moving or erasing the keys of another store, or of the store of
    which it is a copy.
    """

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Return the owner of the datastore at a location, as the last call of `claim` set it.

        Returns None if `claim` was never called, or if no datastore exists. The owner is known as long as any
        part of the datastore exists: also with damaged files, and after an interrupted `erase`.

        Args:
            location: as in `Datastore.open`.
            **params: the parameters with which the datastore was opened.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Set the owner of a datastore, durably. Records and open handles do not change.

        Args:
            location: the location of an existing datastore, which the caller has open for writing.
            owner: one line of text.
            **params: the parameters with which the datastore was opened.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """


def read_keys(store: Datastore, ids: Ids) -> Keys:
    """Return the keys of records by id; implements `SupportsGet.get` with `Datastore.iterate`.

    Args:
        store: open datastore.
        ids: int64, shape (n,), in any order; an id may occur several times.

    Returns:
        float32, shape (n, dim), in the order of the ids.

    Raises:
        RecordNotFoundError: an id has no record; the message names the smallest such id.
    """
    unique_ids = np.unique(ids)
    found_ids, keys = np.empty(0, np.int64), np.empty((0, store.dim), np.float32)
    batches = list(store.iterate(ids=IdRanges.of_ids(unique_ids[unique_ids >= 0])))
    if batches:
        found_ids, keys = (np.concatenate(column) for column in list(zip(*batches, strict=True))[:2])
    missing_ids = np.setdiff1d(unique_ids, found_ids)
    if len(missing_ids):
        raise RecordNotFoundError(f"the datastore has no record {missing_ids[0]}")
    return keys[np.searchsorted(found_ids, ids)]
