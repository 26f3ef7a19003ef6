"""From the address of a server to the points of a collection there."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import count
from urllib.parse import urlsplit

import httpx
from packaging.version import InvalidVersion, Version
from qdrant_client import QdrantClient

from knnstore.datastore import Metric, Mode, read_secret
from knnstore.errors import ConfigError, KnnstoreError
from knnstore_qdrant.attempts import Attempts
from knnstore_qdrant.collection import Collection
from knnstore_qdrant.options import Options
from knnstore_qdrant.server import ServerPoints
from knnstore_qdrant.wire import GrpcPoints, answers_over_grpc

API_KEY_VARIABLE = "KNNSTORE_QDRANT_API_KEY"
"""Environment variable with the API key of a server; several keys stand apart by spaces.

KNNSTORE_QDRANT_API_KEY_FILE may name a file with the same content instead.
"""

SERVER_VARIABLE = "KNNSTORE_QDRANT_URL"
"""Environment variable with the address that the key is for; as many as there are keys, in their order."""

_HOW_TO_GIVE_A_KEY = (
    f"give the key in {API_KEY_VARIABLE}, or in a file that {API_KEY_VARIABLE}_FILE names, and the address "
    f"of its server in {SERVER_VARIABLE}"
)

_log = logging.getLogger(__name__)
_compared: set[str] = set()  # servers whose version was asked for


def open_server(url: str, dim: int, metric: Metric, mode: Mode, options: Options) -> ServerPoints:
    """Open or create a collection; over gRPC if the same server answers there.

    Raises:
        StoreUnavailableError: the server cannot be reached.
        DatastoreNotFoundError, DatastoreExistsError, DatastoreMismatchError: see `Datastore.open`.
        ConfigError: the address cannot be used, or the environment does not say which server a key is for.
    """
    if mode == "x" and options.api_key_file:
        raise ConfigError(f"api_key_file is not read any more: {_HOW_TO_GIVE_A_KEY}")
    with _connected(url, options) as collection:
        collection.open(dim, metric, create=mode != "r", must_create=mode == "x")
        _compare_versions(collection)
        kind = GrpcPoints if options.prefer_grpc and answers_over_grpc(collection) else ServerPoints
        return kind(collection, dim, metric)


def erase_server(url: str, options: Options) -> None:
    """Remove a collection; where there is none, nothing happens."""
    with _connected(url, options) as collection:
        collection.erase()
        collection.client.close()


def owner_on_server(url: str, options: Options) -> str | None:
    """Who claimed a collection."""
    with _connected(url, options) as collection:
        owner = collection.owner()
        collection.client.close()
    return owner


def claim_on_server(url: str, owner: str, options: Options) -> None:
    """Remember a new owner of a collection."""
    with _connected(url, options) as collection:
        collection.claim(owner)
        collection.client.close()


def free_name(url: str, options: Options) -> str:
    """A name like the collection's that none on the server has."""
    with _connected(url, options) as collection:
        there = collection.attempts.read(collection.client.get_collections).collections
        collection.client.close()
    taken = {one.name for one in there}
    stem = options.collection.rstrip("0123456789").removesuffix("-")
    return next(name for number in count(2) if (name := f"{stem}-{number}") not in taken)


@contextmanager
def _connected(url: str, options: Options) -> Iterator[Collection]:
    """A collection that is not open yet; its connections are closed if the block fails."""
    place = _checked(url)
    attempts = Attempts(place, options.timeout)
    key = _api_key(place)
    if options.api_key_file and key is None:
        raise ConfigError(
            f"the store names an api_key_file for {place}, which is not read any more: {_HOW_TO_GIVE_A_KEY}"
        )
    client = QdrantClient(
        url,
        grpc_port=options.grpc_port,
        prefer_grpc=False,  # what goes over gRPC is called directly
        headers={"api-key": key} if key else None,
        timeout=max(1, round(options.timeout)),
        check_compatibility=False,
        verify=place.startswith("https"),  # loading certificates takes longer than opening
        limits=httpx.Limits(max_keepalive_connections=options.parallel),
        grpc_options={  # it would wait up to two minutes before it looks for a server again
            "grpc.initial_reconnect_backoff_ms": 100,
            "grpc.min_reconnect_backoff_ms": 100,
            "grpc.max_reconnect_backoff_ms": 1000,
        },
    )
    client.http.client.add_middleware(attempts.limit)
    try:
        yield Collection(client, attempts, options)
    except BaseException:
        client.close()
        raise


def _compare_versions(collection: Collection) -> None:
    """Say, once for each server, that it and the client are more than a minor version apart."""
    place = collection.attempts.place
    if place in _compared:
        return
    _compared.add(place)
    client = version("qdrant-client")
    with suppress(KnnstoreError, InvalidVersion):  # to open the collection no version is needed
        server = collection.attempts.open(collection.client.info).version
        ours, theirs = Version(client).release, Version(server).release
        if ours[0] != theirs[0] or abs(ours[1] - theirs[1]) > 1:
            _log.warning(
                "%s runs Qdrant %s, and the client here is %s: they are made to work together up to one "
                "minor version apart; install another qdrant-client, or upgrade the server",
                place,
                server,
                client,
            )


def _checked(url: str) -> str:
    """The address without what may be secret.

    Raises:
        ConfigError: it is not one, or holds a password or a key.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the location is no address of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("the location of a Qdrant server is http://HOST:PORT or https://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"the address of {parts.hostname} holds more than a place: the API key belongs in "
            f"{API_KEY_VARIABLE}"
        )
    return f"{parts.scheme}://{parts.hostname}:{port or 6333}{parts.path.rstrip('/')}"


def _api_key(place: str) -> str | None:
    """The API key for the server at an address, if the environment has one for it.

    Where a store's keys are is said by the store, which may come from anybody. So a key goes only to the
    server that the user has named beside it, and never comes from a file that the store names.

    Raises:
        ConfigError: there are not as many keys as servers, what is named is no server, a key cannot be sent
            as a header, or the file of keys cannot be read.
    """
    keys = (read_secret(API_KEY_VARIABLE) or "").split()
    servers = [_checked(url) for url in os.environ.get(SERVER_VARIABLE, "").split()]
    if keys and servers and len(keys) != len(servers):
        raise ConfigError(
            f"{API_KEY_VARIABLE} holds {len(keys)} keys and {SERVER_VARIABLE} names {len(servers)} servers: "
            "give each key its server, in the same order"
        )
    key = dict(zip(servers, keys, strict=False)).get(place)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {API_KEY_VARIABLE} for {place} has characters that no key has")
    return key
