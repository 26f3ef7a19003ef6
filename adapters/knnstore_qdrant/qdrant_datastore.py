"""The Qdrant adapter: a datastore is one collection (a named set of vectors) on a Qdrant server.

`QdrantDatastore` is the adapter. The functions after it connect to a server, and choose the API key that is
sent to it.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import numpy as np
from packaging.version import InvalidVersion, Version
from qdrant_client import QdrantClient

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
    read_keys,
    read_secret,
    validate_k,
    validate_keys,
    validate_records,
)
from knnstore.errors import ConfigError, DatastoreClosedError, KnnstoreError, ReadOnlyError
from knnstore_qdrant.collection import Attempts, Collection
from knnstore_qdrant.points import (
    Condition,
    GrpcPoints,
    ServerPoints,
    answers_over_grpc,
    condition_from_filter,
    condition_from_ranges,
)
from knnstore_qdrant.qdrant_options import Options

_NEIGHBORS_AT_ONCE = 1 << 14
"""Largest number of neighbors in one answer of the server; each becomes a Python object for a moment."""
_ANSWER_BYTES = 8 << 20
"""Largest size in bytes of the vectors in one answer."""
_IDS_AT_ONCE = 10_000
"""Largest number of ids in one answer without vectors."""

API_KEY_VARIABLE = "KNNSTORE_QDRANT_API_KEY"
"""Environment variable with the API keys of servers, separated by spaces.

KNNSTORE_QDRANT_API_KEY_FILE may name a file with the same content instead.
"""

SERVER_VARIABLE = "KNNSTORE_QDRANT_URL"
"""Environment variable with the addresses of the servers to which the API keys belong, in the same order."""

_HOW_TO_GIVE_A_KEY = (
    f"give the key in {API_KEY_VARIABLE}, or in a file that {API_KEY_VARIABLE}_FILE names, and the address "
    f"of its server in {SERVER_VARIABLE}"
)

_log = logging.getLogger(__name__)
_compared: set[str] = set()
"""Addresses of the servers whose version was already compared with the client's version."""


class QdrantDatastore:
    """A datastore whose records are points in a collection on a Qdrant server.

    The id of a point is the record's id. The payload (named values of a point) has the record's group number
    and position, both indexed, and the name of its upload if it was uploaded. If a search of the server's
    graph finds fewer than k neighbors, the search is repeated exactly.

    Args:
        points: the points of the open collection.
        dim: number of components of a vector.
        metric: metric of the distances.
        mode: ``"r"`` only reads; ``"a"`` and ``"x"`` also write.
    """

    def __init__(self, points: ServerPoints, dim: int, metric: Metric, mode: Mode) -> None:
        self._dim, self._metric, self._mode = dim, metric, mode
        self._points = points
        self._closed = False
        self._closing = threading.Lock()

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a collection (a named set of vectors) on a Qdrant server.

        The datastore uses gRPC if the server answers over gRPC and `prefer_grpc` is True; otherwise it uses
        REST. A warning is logged if the versions of the server and of qdrant-client differ too much.

        Args:
            location: address of the server, ``http://HOST:PORT`` or ``https://HOST:PORT``.
            dim: number of components of a vector, 1 to 65536.
            metric: metric of the distances.
            mode: ``"r"`` reads an existing collection, ``"a"`` opens for writing or creates, ``"x"`` creates.
            **params: parameters of the adapter, which `Options` explains; `collection` is the name of the
                collection.

        Raises:
            ConfigError: the location is not an address, `dim` or a parameter is not valid, or the environment
                does not say to which server an API key belongs.
            StoreUnavailableError: the server cannot be reached.
            DatastoreNotFoundError: mode ``"r"``, and the collection does not exist.
            DatastoreExistsError: mode ``"x"``, and the collection exists.
            DatastoreMismatchError: the collection has another dim or metric, or another program made it.
        """
        if not 1 <= dim <= 65536:
            raise ConfigError(f"dim must be between 1 and 65536, got {dim}")
        metric = Metric(metric)
        options = Options.from_params(params)
        if mode == "x" and options.api_key_file:
            raise ConfigError(f"api_key_file is no longer read: {_HOW_TO_GIVE_A_KEY}")
        with _connect_collection(location, options) as collection:
            collection.open(dim, metric, create=mode != "r", must_create=mode == "x")
            _compare_versions(collection)
            is_grpc = options.prefer_grpc and answers_over_grpc(collection)
            points = (GrpcPoints if is_grpc else ServerPoints)(collection, dim, metric)
        return cls(points, dim, metric, mode)

    @classmethod
    def erase(cls, location: str | Path, **params: Any) -> None:
        """Delete the collection from the server. Does nothing if the collection does not exist.

        Args:
            location: address of the server.
            **params: parameters of the adapter; `collection` is the name of the collection.

        Raises:
            DatastoreMismatchError: another program made the collection.
        """
        with _connect_collection(location, Options.from_params(params)) as collection:
            collection.erase()
            collection.client.close()

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return an estimate of the bytes that a record takes on the server's disk."""
        return Options.from_params(params).estimate_point_size(dim)

    @classmethod
    def owner(cls, location: str | Path, **params: Any) -> str | None:
        """Return the name of the store to which the collection belongs; None if no name is saved."""
        with _connect_collection(location, Options.from_params(params)) as collection:
            owner = collection.owner()
            collection.client.close()
        return owner

    @classmethod
    def claim(cls, location: str | Path, owner: str, **params: Any) -> None:
        """Save on the server the name of the store to which the collection belongs."""
        with _connect_collection(location, Options.from_params(params)) as collection:
            collection.claim(owner)
            collection.client.close()

    @classmethod
    def choose_copy_params(cls, location: str | Path, **params: Any) -> dict[str, Any]:
        """Choose an unused name for a copy of the collection on the same server. Creates nothing.

        The name is the name of the present collection, with the smallest free number from 2 on at its end,
        such as ``knnstore-2``.

        Args:
            location: address of the server.
            **params: parameters of the adapter; `collection` is the name of the present collection.

        Returns:
            ``{"collection": NEW_NAME}``: the parameter that must differ for the copy.
        """
        options = Options.from_params(params)
        with _connect_collection(location, options) as collection:
            answer = collection.attempts.read(collection.client.get_collections)
            collection.client.close()
        used = {description.name for description in answer.collections}
        stem = options.collection.rstrip("0123456789").removesuffix("-")
        return {"collection": next(name for i in count(2) if (name := f"{stem}-{i}") not in used)}

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
        """The features of this datastore. Records are durable, and several processes may write.

        `exact_search` is True if the parameter `exact` is True. `exact_keys` is True if vectors are stored as
        float32, and False if they are stored as float16.
        """
        return Capabilities(
            exact_search=self._points.exact_search,
            exact_keys=self._points.exact_keys,
            persistent=True,
            shared_writers=True,
        )

    def add(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store records; see `Datastore.add`. The change is durable when the call returns.

        After an error, some of the records may be stored. The same call can then be repeated, and stores all
        records.
        """
        points = self._get_writable_points()
        ids, keys, groups = validate_records(ids, keys, groups, self._dim)
        if len(ids):
            points.upsert(ids, keys, groups)

    @property
    def takes_uploads(self) -> bool:
        """True if the server has version 1.16 or later."""
        return self._points.takes_uploads

    def upload(self, ids: Ids, keys: Keys, groups: Groups, name: str) -> None:
        """Store the records whose ids are new; see `SupportsUploads.upload`.

        The change is durable when the call returns. After an error, some of the records may be stored; the
        same call can then be repeated. Raises ConfigError if the server has a version before 1.16.
        """
        points = self._get_writable_points()
        if not points.takes_uploads:
            raise ConfigError("uploads need a Qdrant server of version 1.16 or later")
        ids, keys, groups = validate_records(ids, keys, groups, self._dim)
        if len(ids):
            points.upsert(ids, keys, groups, name)

    def count_uploaded(self, ids: IdRanges, name: str, group: int) -> int:
        """Return the exact number of records of a group that an upload has stored; see `upload`."""
        points, condition = self._get_open_points(), condition_from_ranges(ids, self._read_ids)
        return points.count(replace(condition, upload=name, groups=(group,))) if condition else 0

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        """Find the k nearest records of each query, approximately unless the parameter `exact` is True.

        Arguments and result are those of `Datastore.search`.
        """
        points, k = self._get_open_points(), validate_k(k)
        queries = validate_keys(queries, self._dim, what="queries")
        condition = None if where is None else condition_from_filter(where, self._read_ids)
        if not len(queries) or (condition is not None and not condition):
            return Neighbors.all_missing(len(queries), k)
        size = max(1, _NEIGHBORS_AT_ONCE // k)
        batches = [
            self._search_batch(points, queries[start : start + size], k, condition)
            for start in range(0, len(queries), size)
        ]
        return Neighbors.concatenate(batches, axis=0)

    def delete(self, ids: IdRanges) -> None:
        """Delete every record whose id is in the ranges; ids without a record are ignored.

        The deletion is durable when the call returns. Raises ReadOnlyError in mode ``"r"``.
        """
        points = self._get_writable_points()
        condition = condition_from_ranges(ids, self._read_ids)
        if condition:
            points.delete(condition)

    def count(self) -> int:
        """Return the exact number of records."""
        return self._get_open_points().count()

    def iterate(
        self, *, ids: IdRanges | None = None, batch_size: int = BATCH_SIZE
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield every record once, by ascending id, as batches (ids, keys, groups); see `Datastore.iterate`.

        A batch may have fewer than `batch_size` records, but has at least one.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        condition = None if ids is None else condition_from_ranges(ids, self._read_ids)
        if condition is not None and not condition:
            return
        limit = min(batch_size, max(1, _ANSWER_BYTES // (4 * self._dim)))
        yield from self._iterate_points(limit, condition, keys=True)

    def get(self, ids: Ids) -> Keys:
        """Return the keys of records by id, float32, shape (n, dim), in the order of `ids`.

        Raises RecordNotFoundError if an id has no record.
        """
        return read_keys(self, ids)

    def flush(self) -> None:
        """Do nothing, because each change is durable when its call returns.

        Raises DatastoreClosedError after `close`.
        """
        self._get_open_points()

    def optimize(self) -> None:
        """Make the server index all records and free the space of deleted records, and wait until it is done.

        While some records are not indexed, each query is compared with all of these records. Call this method
        after adding many records. Raises ReadOnlyError in mode ``"r"``.
        """
        self._get_writable_points().optimize()

    def close(self) -> None:
        """Close the connections to the server. A second call does nothing.

        If adding many records has postponed the server's indexing, the server is first told to index again.
        The call does not wait until the index is built.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._points.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _get_open_points(self) -> ServerPoints:
        """Return the object that reads and writes the points (stored vectors) on the server.

        Raises `DatastoreClosedError` after `close`.
        """
        if self._closed:
            raise DatastoreClosedError("this Qdrant store was closed; open it again")
        return self._points

    def _get_writable_points(self) -> ServerPoints:
        """Return the object that reads and writes the points, if the store is open for writing.

        Raises `ReadOnlyError` in mode ``"r"``, and `DatastoreClosedError` after `close`.
        """
        points = self._get_open_points()
        if self._mode == "r":
            raise ReadOnlyError("this Qdrant store was opened for reading; open it with mode 'a' to write")
        return points

    @staticmethod
    def _search_batch(points: ServerPoints, queries: Keys, k: int, condition: Condition | None) -> Neighbors:
        """Find the k nearest points (stored vectors) of each query.

        The server searches its graph. If this finds fewer than k neighbors of a query, this query is compared
        with all points that may be found. With the parameter `exact`, every query is compared with all
        points.

        Args:
            points: the object that calls the server.
            queries: query vectors, float32, shape (q, dim), q >= 1.
            k: number of neighbors.
            condition: points that may be found; None allows all points.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If fewer than k points may be
            found, each missing neighbor has id -1 and distance +inf.
        """
        neighbors = points.query(queries, k, condition, exact=points.exact_search)
        short = np.flatnonzero(neighbors.ids[:, -1] < 0)
        if len(short) and not points.exact_search:
            # Either few points match, or the graph of the matching points is not connected.
            neighbors.replace_rows(short, points.query(queries[short], k, condition, exact=True))
        return neighbors

    def _iterate_points(
        self, limit: int, condition: Condition | None, *, keys: bool
    ) -> Iterator[tuple[Ids, Keys, Groups]]:
        """Yield all points that a condition selects, by ascending id, as batches (ids, keys, groups).

        Raises `DatastoreClosedError` if the store is closed during the iteration.

        Args:
            limit: largest number of points in a batch.
            condition: points to yield; None yields all points.
            keys: True also reads vectors and group numbers; False yields empty arrays for the vectors and the
                group numbers.

        Yields:
            Record ids int64 (n,), vectors float32 (n, dim), and group numbers int32 (n,); no batch is empty.
        """
        first, size = 0, limit
        while size >= limit:
            batch = self._get_open_points().scroll(first, limit, condition, keys=keys)
            size = len(batch[0])
            if size:
                first = int(batch[0][-1]) + 1  # read before `yield`: the caller may change the arrays
                yield batch

    def _read_ids(self, condition: Condition) -> Ids:
        """Read from the server the ids of all points that a condition selects, int64, ascending."""
        batches = self._iterate_points(_IDS_AT_ONCE, condition, keys=False)
        return np.concatenate([np.empty(0, np.int64), *(ids for ids, _, _ in batches)])


_conforms: type[Datastore] = QdrantDatastore  # a type checker compares every signature here


@contextmanager
def _connect_collection(location: str | Path, options: Options) -> Iterator[Collection]:
    """Create a client of a server, and yield an object for a collection on the server.

    Nothing is sent to the server yet, so the collection may not exist. If the ``with`` block raises an error,
    the connections are closed. Otherwise the caller closes the connections.

    Args:
        location: address of the server.
        options: parameters of the adapter, among them the name of the collection.

    Raises:
        ConfigError: the location is not the address of a server, or no API key can be chosen for it.
    """
    _refuse_folder(location)
    url = str(location)
    place = _check_address(url)
    attempts = Attempts(place, options.timeout)
    key = _find_api_key(place)
    if options.api_key_file and key is None:
        raise ConfigError(
            f"the store names an api_key_file for {place}, which is no longer read: {_HOW_TO_GIVE_A_KEY}"
        )
    client = QdrantClient(
        url,
        grpc_port=options.grpc_port,
        prefer_grpc=False,  # `GrpcPoints` calls gRPC directly
        headers={"api-key": key} if key else None,
        timeout=max(1, round(options.timeout)),
        check_compatibility=False,
        verify=place.startswith("https"),  # for http, loading certificates would take longer than opening
        limits=httpx.Limits(max_keepalive_connections=options.parallel),
        grpc_options={  # by default, gRPC waits up to two minutes before it reconnects
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1000,
        },
    )
    client.http.client.add_middleware(attempts.send_within_time_limit)
    try:
        yield Collection(client, attempts, options)
    except BaseException:
        client.close()
        raise


def _compare_versions(collection: Collection) -> None:
    """Log a warning if the versions of the server and of qdrant-client differ too much.

    The versions differ too much if the major versions differ, or the minor versions differ by more than one.
    Each server is asked for its version only once in a process. If the server does not tell its version,
    nothing is logged.

    Args:
        collection: collection on the server.
    """
    place = collection.attempts.place
    if place in _compared:
        return
    _compared.add(place)
    client = version("qdrant-client")
    with suppress(KnnstoreError, InvalidVersion):  # the version is not needed to open the collection
        server = collection.attempts.open(collection.client.info).version
        client_release, server_release = Version(client).release, Version(server).release
        if client_release[0] != server_release[0] or abs(client_release[1] - server_release[1]) > 1:
            _log.warning(
                "%s runs Qdrant %s, and the client here is %s: they work together only up to one "
                "minor version apart; install another qdrant-client, or upgrade the server",
                place,
                server,
                client,
            )


def _refuse_folder(location: str | Path) -> None:
    """Raise `ConfigError` if a location has no ``://``, so that it cannot be the address of a server.

    Older versions of knnstore kept keys in a folder with Qdrant's engine. For such a folder, the message says
    how to move the keys.
    """
    if "://" in str(location):
        return
    if Path(location, "qdrant-shard").exists():
        raise ConfigError(
            f"{location} has keys that an older knnstore wrote with Qdrant's engine for folders, which is no "
            "longer supported: move them with that version (`knnstore move --store cells`), or make the "
            "store again"
        )
    raise ConfigError(
        "the engine qdrant needs a server: give its address (--location http://HOST:PORT), or keep the keys "
        "in a folder with another engine (--store cells)"
    )


def _check_address(url: str) -> str:
    """Check the address of a server, and return the address in a normalized form.

    The result is scheme, host, port and path; the port is always included, and is 6333 by default.

    Args:
        url: address as the user or the store names it, for example ``http://localhost``.

    Raises:
        ConfigError: the URL is not an address, or contains a password or a key.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the location is not the address of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("the location of a Qdrant server is http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"the address of {parts.hostname} must have no user, password, query or fragment: put the API "
            f"key into {API_KEY_VARIABLE}"
        )
    return f"{parts.scheme}://{parts.hostname}:{port or 6333}{parts.path.rstrip('/')}"


def _find_api_key(place: str) -> str | None:
    """Return the API key for a server from the environment; None if the environment has no such key.

    The environment variable KNNSTORE_QDRANT_API_KEY has keys, and KNNSTORE_QDRANT_URL the addresses of their
    servers in the same order. The address in `place` comes from the store, which a stranger may have made. So
    a key is sent only to the server that the user named together with the key. A file that the store names is
    never read.

    Args:
        place: normalized address of the server, a result of `_check_address`.

    Raises:
        ConfigError: the numbers of keys and servers differ, the name of a server is not an address, a key
            cannot be sent as a header, or the file of keys cannot be read.
    """
    keys = (read_secret(API_KEY_VARIABLE) or "").split()
    servers = [_check_address(url) for url in os.environ.get(SERVER_VARIABLE, "").split()]
    if keys and servers and len(keys) != len(servers):
        raise ConfigError(
            f"{API_KEY_VARIABLE} has {len(keys)} keys, but {SERVER_VARIABLE} has {len(servers)} servers: "
            "give one server for each key, in the same order"
        )
    key = dict(zip(servers, keys, strict=False)).get(place)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key in {API_KEY_VARIABLE} for {place} has characters that are not allowed in a key"
        )
    return key
