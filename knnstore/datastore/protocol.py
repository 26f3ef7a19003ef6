"""The contract between knnstore and a vector engine: the `Datastore` protocol, and its optional features.

An optional feature is a protocol with its methods: `SupportsGet`, `SupportsCells`, `SupportsDeviceVisits`,
`SupportsOptimize`, `SupportsSize`, `SupportsVacuum`, `SupportsCopyParams`, `SupportsVerify`,
`SupportsDamage`, `SupportsErase`, `SupportsOwner`, `SupportsUploads`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from knnstore.datastore.arrays import Capabilities, DamagedPart, Filter, Groups, Ids, Keys, Metric
from knnstore.datastore.neighbors import Neighbors
from knnstore.datastore.ranges import IdRanges
from knnstore.datastore.visits import DeviceVisits, Visits
from knnstore.errors import RecordNotFoundError

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


@runtime_checkable
class SupportsGet(Protocol):
    """A vector engine that reads a few records by id quickly."""

    def get(self, ids: Ids) -> Keys:
        """Return the keys of records.

        Args:
            ids: record ids, int64, shape (n,), in any order; an id may occur several times.

        Returns:
            Keys, float32, shape (n, dim), in the order of the ids; as exact as the keys from `iterate`.

        Raises:
            RecordNotFoundError: an id has no record; the message names the id.
        """


@runtime_checkable
class SupportsCells(Protocol):
    """A vector engine that divides its records into cells. A cell is a cluster of records with nearby keys.

    With `visit`, a query is compared with all records of its nearest cells. With `search`, only the k nearest
    records are returned.
    """

    def visit(self, queries: Keys, probes: int, *, where: Filter | None = None) -> list[Visits]:
        """Compute the distances of each query to every record of its nearest cells (clusters of near keys).

        Cells without a matching record are skipped and not counted. So each query is compared with at least
        one record if any record matches. With as many probes as cells, a query is compared with all matching
        records.

        Args:
            queries: query vectors, float32, shape (q, dim), finite; q may be 0.
            probes: number of cells to search for each query, >= 1.
            where: filter that records must match; None matches all records.

        Returns:
            A list of `Visits`. Each `Visits` has arrays of query numbers, record ids and the distances
            between these queries and records. No pair of a query and a record occurs twice. The distances
            take 4 bytes of memory for each pair. The list is empty if no record matches or q is 0.

        Raises:
            DimensionMismatchError: the queries have another dimension than the records.
            InvalidVectorError: a query contains NaN or infinity.
            ValueError: probes < 1.
        """


@runtime_checkable
class SupportsDeviceVisits(Protocol):
    """A vector engine with cells that can leave the results of a few queries on a device such as a GPU."""

    def visit_on_device(self, queries: Any, probes: int, where: Filter) -> DeviceVisits | None:
        """Compute what `SupportsCells.visit` computes, and leave the results on the device.

        The program does not wait for the device, so the queries are not checked.

        Args:
            queries: query vectors, a tensor of torch, float32, shape (q, dim), on any device.
            probes: number of cells to search for each query, >= 1.
            where: filter that records must match. No other record may be found, also if `where` has groups.

        Returns:
            Distances and tokens of the records, on the device of the queries. None if no record matches, or
            if the engine cannot compute them on this device, for example because its keys are elsewhere. Then
            the caller uses `visit`.
        """


@runtime_checkable
class SupportsOptimize(Protocol):
    """A vector engine that can reorganize itself for faster search."""

    def optimize(self) -> None:
        """Build or extend indexes for faster search, and reclaim the space of deleted records.

        The set of records does not change. Searches that were exact before may be approximate afterwards,
        because an engine may search its indexes approximately.
        """


@runtime_checkable
class SupportsSize(Protocol):
    """A vector engine that can estimate its size on a local disk."""

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return an estimate of the bytes that one record takes on disk, including its share of an index.

        If the exact size is not known, the estimate is too large rather than too small.

        Args:
            dim: number of components of a vector.
            **params: the adapter's parameters, as for `Datastore.open`.
        """


@runtime_checkable
class SupportsVacuum(Protocol):
    """A vector engine that only marks records as deleted, and can rewrite its files without them."""

    def vacuum(self) -> None:
        """Rewrite every file that contains deleted or replaced records, without these records.

        Afterwards no file contains the id or the key of a deleted record, or the old key of a replaced
        record.
        """


@runtime_checkable
class SupportsCopyParams(Protocol):
    """A vector engine, usually a server, that can hold several datastores at one location."""

    @classmethod
    def choose_copy_params(cls, location: str | Path, **params: Any) -> dict[str, Any]:
        """Choose parameters with which a copy of a datastore can be created at the same location.

        The method only chooses parameters; it creates nothing.

        Args:
            location: location of the datastore that will be copied, for example the URL of a server.
            **params: the parameters with which this datastore was opened.

        Returns:
            The parameters that must differ for the copy, with values that no datastore at the location has
            yet, for example ``{"collection": NEW_NAME}``. All other parameters stay as in `params`.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsVerify(Protocol):
    """A vector engine that can check its files."""

    def verify(self) -> list[str]:
        """Check sizes and checksums of all stored files, without changing any file.

        Returns one line of text for each problem; the list is empty if no problem is found.
        """


@runtime_checkable
class SupportsDamage(Protocol):
    """A vector engine that continues to work after a file with some of its records is damaged.

    As soon as the engine knows of the damage, `search` and `iterate` leave the damaged records out. Each
    damaged part is logged once.
    """

    def list_damaged_parts(self) -> list[DamagedPart]:
        """Return the damaged parts (such as files) that this handle has noticed so far; empty if none.

        The method reads no files to look for damage; `SupportsVerify.verify` does.
        """

    def remove_damaged_part(self, part: DamagedPart) -> None:
        """Remove a damaged part (such as a file) and all its records from the datastore, durably.

        The records of the part are lost, and `list_damaged_parts` no longer returns the part.

        Args:
            part: one of the results of `list_damaged_parts`.
        """


@runtime_checkable
class SupportsErase(Protocol):
    """A vector engine that can remove a whole datastore."""

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Remove all files or server data of the datastore at a location, and nothing else.

        The datastore may be damaged. If a call is interrupted, a second call removes the rest. If no
        datastore exists at the location, the method does nothing.

        Args:
            location: directory or URL of the datastore, as in `Datastore.open`.
            **params: the parameters with which the datastore was opened.

        Raises:
            LockedError: another process writes to the datastore.
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsOwner(Protocol):
    """A vector engine that saves the name of the owner of a datastore together with the keys.

    The owner is the store (catalog and datastore together) to which the keys belong. A store reads the
    owner's name so that it never writes, moves or erases keys of another store. If somebody copies the folder
    of a store, the copy reads the name of the original store here, and does not change the keys.
    """

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Return the name of the owner of the datastore at a location, which the last `claim` set.

        Returns None if `claim` was never called, or if no datastore exists. The name can be read as long as
        any part of the datastore exists, even if files are damaged or an `erase` was interrupted.

        Args:
            location: directory or URL of the datastore, as in `Datastore.open`.
            **params: the parameters with which the datastore was opened.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Save the name of a datastore's owner, durably. Records and open handles do not change.

        Args:
            location: the location of an existing datastore, which the caller has open for writing.
            owner: name of the owner, one line of text.
            **params: the parameters with which the datastore was opened.

        Raises:
            StoreUnavailableError: the engine cannot be reached.
        """


@runtime_checkable
class SupportsUploads(Protocol):
    """A vector engine, usually a server, to which several processes may upload records at the same time.

    A plan adds many documents to a store. Its workers compute the keys, and each worker uploads records with
    its own handle and under a name. The commit of the plan adds the documents to the store. For each upload,
    it checks with `count_uploaded` whether all records are there, and otherwise adds the records with `add`.
    Until the commit, the engine returns uploaded records from searches like all other records, and the store
    leaves them out of its results. A slow worker may upload after the commit, and must not change any stored
    record then.

    Workers open the datastore with the location and the parameters of the store. The folder of the plan has
    them as plain text, so an adapter must read passwords and API keys from the environment.
    """

    @property
    def takes_uploads(self) -> bool:
        """True if the engine accepts uploads; False, for example, if the server has an old version."""

    def upload(self, ids: Ids, keys: Keys, groups: Groups, name: str) -> None:
        """Store records whose ids are not stored yet, durably. Each record also gets the name of the upload.

        If an id is stored already, its record does not change, and the new record is ignored. This must hold
        even if other processes add, delete and upload the same ids at the same time. After an error, the same
        call can be repeated.

        Args:
            ids: record ids, int64, shape (n,), >= 0, without duplicates.
            keys: vectors, float32, shape (n, dim), finite.
            groups: group number of each record, int32, shape (n,), >= 0.
            name: name of the upload, one line of at most 100 characters.

        Raises:
            ConfigError: the engine accepts no uploads; see `takes_uploads`.
        """

    def count_uploaded(self, ids: IdRanges, name: str, group: int) -> int:
        """Return the exact number of records that an upload has stored and that are unchanged since.

        Records that were later deleted, or replaced with `add`, do not count.

        Args:
            ids: ids of the records to count; records with other ids do not count.
            name: name of the upload.
            group: group number of the records to count.
        """


def read_keys(store: Datastore, ids: Ids) -> Keys:
    """Return the keys of records by id. Adapters can use the function to implement `SupportsGet.get`.

    A key is the vector of a record.

    Args:
        store: open datastore; its method `iterate` reads the records.
        ids: record ids, int64, shape (n,), in any order; an id may occur several times.

    Returns:
        Keys, float32, shape (n, dim), in the order of the ids.

    Raises:
        RecordNotFoundError: an id has no record; the message names the smallest such id.
    """
    unique_ids = np.unique(ids)
    found_ids, keys = np.empty(0, np.int64), np.empty((0, store.dim), np.float32)
    batches = list(store.iterate(ids=IdRanges.from_ids(unique_ids[unique_ids >= 0])))
    if batches:
        found_ids, keys = (np.concatenate(column) for column in list(zip(*batches, strict=True))[:2])
    missing_ids = np.setdiff1d(unique_ids, found_ids)
    if len(missing_ids):
        raise RecordNotFoundError(f"the datastore has no record {missing_ids[0]}")
    return keys[np.searchsorted(found_ids, ids)]
