"""A collection on a Qdrant server: creating it, recognizing it, and waiting for its index.

A collection is a named set of points. A point is a vector with an id and a payload (named values); each
record is stored as a point. `Attempts` repeats calls to the server within a time limit.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar
from uuid import uuid4

import httpx
from grpc import RpcError, StatusCode
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from knnstore.datastore import Metric
from knnstore.errors import (
    DatastoreError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    StoreUnavailableError,
)
from knnstore_qdrant.qdrant_options import Options

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds
_WRITE_FACTOR = 3
"""The time limit of a writing call is this many times the time limit of a reading call."""
_TRANSIENT = {
    StatusCode.UNAVAILABLE: "cannot be reached",
    StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    StatusCode.RESOURCE_EXHAUSTED: "is overloaded",
    StatusCode.INTERNAL: "failed",
    StatusCode.ABORTED: "aborted the request",
    StatusCode.CANCELLED: "closed the connection",
    StatusCode.UNKNOWN: "failed",
}
"""gRPC errors after which a call is repeated, with their description for the message."""
_AS_HTTP = {
    StatusCode.NOT_FOUND: 404,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
}


class _NotCompletedError(Exception):
    """Error for a change that the server has accepted, and has not confirmed as done."""


class Attempts:
    """Makes calls to one server, and repeats a failed call within a time limit if repeating may help.

    Args:
        place: address of the server, for messages.
        timeout: time limit of a reading call in seconds; a writing call may take three times as long.
    """

    def __init__(self, place: str, timeout: float) -> None:
        self.place = place
        self._timeout = timeout
        self._attempt = threading.local()

    def open(self, call: Callable[[], Result]) -> Result:
        """Make the first call to a server, as `read` does, and return the result of the call.

        But if the server cannot be connected to, the call is not repeated, and StoreUnavailableError is
        raised at once.
        """
        return self._repeat_call(call, self._timeout, retry_refused=False)

    def read(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes nothing on the server, and return the result of the call.

        After an error that may be temporary, the call is repeated until the time limit.

        Args:
            call: function that calls the server; it may be called several times.

        Raises:
            StoreUnavailableError: the call did not succeed within the time limit.
            DatastoreNotFoundError: the collection does not exist.
            DatastoreError: the server refuses the call.
        """
        return self._repeat_call(call, self._timeout)

    def write(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes something on the server, as `read` does, and return its result.

        The time limit is three times the limit of `read`.
        """
        return self._repeat_call(call, _WRITE_FACTOR * self._timeout)

    def change_points(self, call: Callable[[], str]) -> None:
        """Repeat a call that changes points until it returns ``completed``, within the limit of `write`.

        Any other status means that the server may make the change later or never. Errors are those of `read`.

        Args:
            call: function that calls the server and returns the status of the change; it may be called
                several times.
        """

        def require_completed() -> None:
            """Call the server; raise _NotCompletedError if the change is not confirmed as done."""
            status = call()
            if status != "completed":
                raise _NotCompletedError(f"did not complete a change, its status is {status!r}")

        self.write(require_completed)

    def seconds_left(self) -> float:
        """Return how many seconds are left for the call that the current thread makes, at least 0.001.

        If the thread makes no call through this object, the result is the time limit of a reading call.
        """
        until: float | None = getattr(self._attempt, "until", None)
        return self._timeout if until is None else max(until - time.monotonic(), 0.001)

    def send_within_time_limit(
        self, request: httpx.Request, send: Callable[[httpx.Request], httpx.Response]
    ) -> httpx.Response:
        """Send an HTTP request with the time that is left for the current call as its timeout.

        The HTTP client calls this method for each request, as a middleware. Returns the response.
        """
        request.extensions["timeout"] = httpx.Timeout(self.seconds_left()).as_dict()
        return send(request)

    def _repeat_call(
        self, call: Callable[[], Result], seconds: float, *, retry_refused: bool = True
    ) -> Result:
        """Make a call, repeat it after errors that may be temporary, and return the result of the call.

        Args:
            call: function that calls the server.
            seconds: time limit of all attempts together.
            retry_refused: True also repeats the call if the server cannot be connected to; False raises an
                error in this case.

        Raises:
            StoreUnavailableError: no attempt succeeded within the time limit, or the server cannot be
                connected to and `retry_refused` is False.
            DatastoreError: the error is not temporary, so the call is not repeated.
        """
        deadline = time.monotonic() + seconds
        for pause in yield_retry_pauses():
            self._attempt.until = min(time.monotonic() + self._timeout, deadline)
            try:
                return call()
            except DatastoreError:
                raise
            except Exception as error:
                reason, requested_pause = self._explain_retry(error)
                is_refused = isinstance(getattr(error, "source", None), httpx.ConnectError)
                wait = max(pause, requested_pause)
                if time.monotonic() + wait >= deadline or (is_refused and not retry_refused):
                    raise StoreUnavailableError(f"store unavailable: {self.place} {reason}") from error
            finally:
                self._attempt.until = None
            time.sleep(wait)
        raise AssertionError("the pauses never end")

    def _explain_retry(self, error: Exception) -> tuple[str, float]:
        """Explain an error after which a call may be repeated.

        Args:
            error: the exception that the call raised.

        Returns:
            The reason of the failure as text for messages; and the pause in seconds that the server requests
            before the next call, 0 if it requests none.

        Raises:
            DatastoreError: the error is not temporary, so repeating the call does not help.
        """
        match error:
            case _NotCompletedError():
                return str(error), 0
            case ResourceExhaustedResponse():
                return "is overloaded", error.retry_after_s
            case ResponseHandlingException(source=httpx.TimeoutException()):
                return "did not answer in time", 0
            case ResponseHandlingException(source=httpx.TransportError() as cause):
                return f"cannot be reached: {_get_first_line(cause)}", 0
            case UnexpectedResponse(status_code=int() as code):
                if code in (408, 429) or code >= 500:
                    return f"failed with {code}", 0
                raise self._make_refusal_error(code, error.content.decode(errors="replace")[:200]) from error
            case RpcError():
                if error.code() in _TRANSIENT:
                    return f"{_TRANSIENT[error.code()]}: {error.details()}", 0
                raise self._make_refusal_error(
                    _AS_HTTP.get(error.code(), 400), str(error.details())[:200]
                ) from error
        raise DatastoreError(f"{self.place} cannot be used: {_get_first_line(error)}") from error

    def _make_refusal_error(self, code: int, text: str) -> DatastoreError:
        """Return, without raising it, the error for a call that the server has refused.

        Args:
            code: HTTP status of the answer.
            text: text of the answer.
        """
        line = " ".join(text.split())
        if code == 404:
            return DatastoreNotFoundError(f"{self.place}: {line}")
        if code in (401, 403):
            return DatastoreError(
                f"{self.place} refuses the API key, or got none ({code}): set KNNSTORE_QDRANT_API_KEY to "
                "the key, or KNNSTORE_QDRANT_API_KEY_FILE to a file with the key, and KNNSTORE_QDRANT_URL to "
                f"the address of this server, {self.place}"
            )
        return DatastoreError(f"{self.place} refuses the request: {line}")


def yield_retry_pauses() -> Iterator[float]:
    """Yield the length in seconds of each pause between two attempts of a call, without end.

    The pauses begin at .05 seconds and double up to 2 seconds. Each pause is shortened by a random amount of
    up to one half.
    """
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1)  # noqa: S311  # no secret
        pause = min(2 * pause, _LONGEST_PAUSE)


def _get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message; if the message is empty, the name of the error's class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


DISTANCES = {Metric.L2: models.Distance.EUCLID, Metric.IP: models.Distance.DOT}
"""Qdrant's names of the metrics."""

MARK = "knnstore"
"""Name in a collection's metadata under which a random number that identifies the collection is saved."""

OWNER = "knnstore_owner"
"""Name in a collection's metadata under which the name of the store that owns the collection is saved."""

GROUP = "group"
"""Name in a point's payload of the record's group number (such as the number of its domain), an integer."""

POSITION = "position"
"""Name in a point's payload of the record's position (the number of its token in the store), an integer.

Qdrant cannot filter by ranges of ids. It can filter by ranges of a field, but with floats as limits. A record
id begins with the record's position, so ranges of ids are converted to ranges of positions. A position has 43
bits, which a float represents exactly.
"""

UPLOAD = "upload"
"""Name in a point's payload of the name of the upload that stored it; see `QdrantDatastore.upload`."""

_BULK = 100_000
"""Number of added records after which the server is told to postpone indexing until all records are added."""

_INDEXES: Mapping[str, models.IntegerIndexParams] = {
    # `is_principal`: the server stores the points of a group together and links them in the graph.
    GROUP: models.IntegerIndexParams(
        type=models.IntegerIndexType.INTEGER, lookup=True, range=False, is_principal=True
    ),
    POSITION: models.IntegerIndexParams(
        type=models.IntegerIndexType.INTEGER, lookup=False, range=True, enable_hnsw=False
    ),
}
_QUANTIZATION: Mapping[str, models.QuantizationConfig | None] = {
    "none": None,
    "scalar": models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
    ),
    "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
}


class Collection:
    """A collection (a named set of vectors) on a Qdrant server. Call `open` before searching or adding.

    Args:
        client: client of the server.
        attempts: object that makes calls to the server, and repeats failed calls.
        options: parameters of the adapter, among them the name of the collection.
    """

    mark: str | None = None
    """Random number that identifies the collection; None if the server keeps no metadata (before 1.16)."""

    exact_keys = True
    """True if vectors are stored as float32; False if they are stored as float16."""

    quantized = False
    """True if the server searches compressed vectors (codes)."""

    def __init__(self, client: QdrantClient, attempts: Attempts, options: Options) -> None:
        self.client, self.attempts, self.options = client, attempts, options
        self.name = options.collection
        self._added = 0
        self._is_indexing_postponed = False

    def open(self, dim: int, metric: Metric, *, create: bool, must_create: bool) -> None:
        """Find the collection on the server, or create it, and check its dimension and metric.

        The attributes `mark`, `exact_keys` and `quantized` are set. If `create` is True, missing indexes of
        the payload are created too.

        Args:
            dim: number of components of a vector.
            metric: metric of the distances.
            create: True creates the collection if it does not exist, and completes an interrupted creation.
            must_create: True raises an error if the collection exists already.

        Raises:
            DatastoreNotFoundError: the collection does not exist, and `create` is False.
            DatastoreExistsError: the collection exists, and `must_create` is True.
            DatastoreMismatchError: another program made the collection, or it has another dim or metric.
            StoreUnavailableError: the server cannot be reached.
            DatastoreError: the server refuses a call.
        """
        info = self._fetch_info()
        if info is None:
            if not create:
                raise DatastoreNotFoundError(f"{self.attempts.place} has no collection {self.name!r}")
            mark = uuid4().hex
            self._create_collection(dim, metric, mark)
            info = self._fetch_info()
            if info is None:
                raise DatastoreError(
                    f"{self.attempts.place} does not list the collection that it has just created"
                )
            is_taken = self._read_mark(info) not in (mark, None)
        else:
            is_taken = bool(self._is_complete(info) or info.points_count)
        if must_create and is_taken:
            raise DatastoreExistsError(
                f"{self.attempts.place} already has a collection {self.name!r}: choose another with "
                "collection=NAME"
            )
        vectors = self._check_vectors(info, dim, metric)
        for field, index in _INDEXES.items():
            if create and field not in info.payload_schema:
                self._index_payload(field, index)
        # A process that was killed during a bulk load leaves indexing postponed.
        self._is_indexing_postponed = create and info.config.optimizer_config.indexing_threshold == 0
        self.mark = self._read_mark(info)
        self.exact_keys = vectors.datatype in (None, models.Datatype.FLOAT32)
        self.quantized = (info.config.quantization_config or vectors.quantization_config) is not None

    def erase(self) -> None:
        """Delete the collection from the server. Does nothing if the collection does not exist.

        Raises:
            DatastoreMismatchError: another program made the collection.
        """
        info = self._fetch_info()
        if info is None:
            return
        if self._read_mark(info) is None and not self._is_complete(info):
            raise self._make_not_ours_error()
        self.attempts.write(lambda: self.client.delete_collection(self.name))

    def owner(self) -> str | None:
        """Return the name of the store to which the collection belongs.

        Returns None if no store has claimed the collection, if the collection does not exist, or if the
        server keeps no metadata.
        """
        info = self._fetch_info()
        owner = (info.config.metadata or {}).get(OWNER) if info else None
        return owner if isinstance(owner, str) else None

    def claim(self, owner: str) -> None:
        """Save the name of the store to which the collection belongs. Other metadata are not changed.

        Args:
            owner: name of the store.
        """
        self.attempts.write(lambda: self.client.update_collection(self.name, metadata={OWNER: owner}))

    def prepare_upload(self, records: int) -> None:
        """Count records that the caller is about to add, and postpone the server's indexing if they are many.

        From 100,000 added records on, indexing is postponed until `resume_indexing` or `index` is called.
        Without the postponement, the server would index the same points again and again.

        Args:
            records: number of records that will be added.
        """
        self._added += records
        if self._added >= _BULK and not self._is_indexing_postponed:
            self._configure_indexing(models.OptimizersConfigDiff(indexing_threshold=0))
            self._is_indexing_postponed = True

    def resume_indexing(self) -> None:
        """Tell the server to index new points (stored vectors) again, if its indexing was postponed.

        The method does not wait; the server indexes in the background. If indexing was not postponed, nothing
        is sent to the server.
        """
        self._added = 0
        if self._is_indexing_postponed:
            self._configure_indexing(
                models.OptimizersConfigDiff(indexing_threshold=self.options.indexing_threshold)
            )
            self._is_indexing_postponed = False

    def build_index(self) -> None:
        """Make the server index all points (stored vectors), and wait until all points are indexed.

        There is no time limit.

        Raises:
            StoreUnavailableError: the server cannot be reached.
            DatastoreError: the server reports that it cannot index.
        """
        self.resume_indexing()
        for pause in yield_retry_pauses():
            info = self.attempts.read(lambda: self.client.get_collection(self.name))
            if info.status == models.CollectionStatus.GREEN:
                return
            if info.status == models.CollectionStatus.RED:
                raise DatastoreError(f"{self.attempts.place} cannot index: {info.optimizer_status}")
            if info.status == models.CollectionStatus.GREY:  # a restarted server waits for a change
                self._configure_indexing(models.OptimizersConfigDiff())
            time.sleep(pause)

    def _fetch_info(self) -> models.CollectionInfo | None:
        """Fetch the server's description of the collection; return None if the collection does not exist."""
        try:
            return self.attempts.open(lambda: self.client.get_collection(self.name))
        except DatastoreNotFoundError:
            return None

    @staticmethod
    def _read_mark(info: models.CollectionInfo) -> str | None:
        """Return the random number that identifies a collection; None if its metadata has no such number.

        Args:
            info: the server's description of the collection.
        """
        return (info.config.metadata or {}).get(MARK)

    @staticmethod
    def _is_complete(info: models.CollectionInfo) -> bool:
        """Return True if the indexes of ``group`` and ``position`` exist, which are created last."""
        return set(_INDEXES) <= set(info.payload_schema)

    def _create_collection(self, dim: int, metric: Metric, mark: str) -> None:
        """Create the collection with the adapter's parameters. An existing collection is not changed.

        Args:
            dim: number of components of a vector.
            metric: metric of the distances.
            mark: random number that is saved in the metadata to identify the collection.
        """
        options = self.options

        def create() -> None:
            """Create the collection unless it exists."""
            if self.client.collection_exists(self.name):
                return  # the answer to an earlier attempt was lost, or another process was faster; see `open`
            self.client.create_collection(
                self.name,
                models.VectorParams(
                    size=dim,
                    distance=DISTANCES[metric],
                    on_disk=options.on_disk,
                    datatype=models.Datatype(options.datatype),
                ),
                shard_number=options.shards or None,
                replication_factor=options.replicas,
                write_consistency_factor=options.write_consistency,
                hnsw_config=models.HnswConfigDiff(
                    m=options.m,
                    ef_construct=options.ef_construct,
                    full_scan_threshold=options.full_scan_threshold,
                    on_disk=options.graph_on_disk,
                ),
                optimizers_config=models.OptimizersConfigDiff(indexing_threshold=options.indexing_threshold),
                quantization_config=_QUANTIZATION[options.quantization],
                metadata={MARK: mark},
            )

        self.attempts.write(create)

    def _index_payload(self, field: str, index: models.IntegerIndexParams) -> None:
        """Make the server create an index of a value of the payload, and wait until the index exists."""
        self.attempts.change_points(
            lambda: self.client.create_payload_index(self.name, field, index, wait=True).status.value
        )

    def _check_vectors(self, info: models.CollectionInfo, dim: int, metric: Metric) -> models.VectorParams:
        """Check that a collection was made by knnstore for vectors of a dimension and a metric.

        Args:
            info: the server's description of the collection.
            dim: expected number of components of a vector.
            metric: expected metric.

        Returns:
            The server's description of the vectors.

        Raises:
            DatastoreMismatchError: another program made the collection, or dim or metric differ.
        """
        vectors = info.config.params.vectors
        if not isinstance(vectors, models.VectorParams) or (
            info.points_count and not self._is_complete(info)
        ):
            raise self._make_not_ours_error()
        stored = {distance: metric for metric, distance in DISTANCES.items()}.get(vectors.distance)
        if (vectors.size, stored) != (dim, metric):
            raise DatastoreMismatchError(
                f"{self.attempts.place}: collection {self.name!r} has dim {vectors.size} and metric "
                f"{stored or vectors.distance.value}, not {dim} and {metric}"
            )
        return vectors

    def _make_not_ours_error(self) -> DatastoreMismatchError:
        """Return, without raising it, the error for a collection that another program made."""
        return DatastoreMismatchError(
            f"{self.attempts.place}: collection {self.name!r} was not made by knnstore: choose another "
            "with collection=NAME"
        )

    def _configure_indexing(self, optimizers: models.OptimizersConfigDiff) -> None:
        """Change how the server indexes the points (stored vectors) of this collection.

        Args:
            optimizers: the settings to change, as a message of qdrant-client. Settings that are not in the
                message stay the same.
        """
        self.attempts.write(lambda: self.client.update_collection(self.name, optimizers_config=optimizers))
