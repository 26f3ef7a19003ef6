"""From the address of a server to the points of a collection there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from qdrant_client import QdrantClient

from knnstore.datastore import Metric, Mode
from knnstore.errors import ConfigError
from knnstore_qdrant.attempts import Attempts
from knnstore_qdrant.collection import Collection
from knnstore_qdrant.options import Options
from knnstore_qdrant.server import ServerPoints
from knnstore_qdrant.wire import GrpcPoints, answers_over_grpc

API_KEY_VARIABLE = "KNNSTORE_QDRANT_API_KEY"
"""Environment variable with the server's API key."""


def open_server(url: str, dim: int, metric: Metric, mode: Mode, options: Options) -> ServerPoints:
    """Open or create a collection; over gRPC if the same server answers there.

    Raises:
        StoreUnavailableError: the server cannot be reached.
        DatastoreNotFoundError, DatastoreExistsError, DatastoreMismatchError: see `Datastore.open`.
        ConfigError: the address or the file with the key cannot be used.
    """
    with _connected(url, options) as collection:
        collection.open(dim, metric, create=mode != "r", must_create=mode == "x")
        kind = GrpcPoints if options.prefer_grpc and answers_over_grpc(collection) else ServerPoints
        return kind(collection, dim, metric)


def erase_server(url: str, options: Options) -> None:
    """Remove a collection; where there is none, nothing happens."""
    with _connected(url, options) as collection:
        collection.erase()
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
    key = _api_key(options)
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
            f"{API_KEY_VARIABLE} or in api_key_file"
        )
    return f"{parts.scheme}://{parts.hostname}:{port or 6333}{parts.path.rstrip('/')}"


def _api_key(options: Options) -> str | None:
    if not options.api_key_file:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        return Path(options.api_key_file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"api_key_file cannot be read: {error}") from error
