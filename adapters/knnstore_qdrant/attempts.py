"""Calls to a server, made again while that may help and within a time limit."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
from grpc import RpcError, StatusCode
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from knnstore.errors import DatastoreError, DatastoreNotFoundError, StoreUnavailableError

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_WRITE_FACTOR = 3
_TRANSIENT = {
    StatusCode.UNAVAILABLE: "cannot be reached",
    StatusCode.DEADLINE_EXCEEDED: "did not answer in time",
    StatusCode.RESOURCE_EXHAUSTED: "has too much to do",
    StatusCode.INTERNAL: "failed",
    StatusCode.ABORTED: "gave up",
    StatusCode.CANCELLED: "broke the connection off",
    StatusCode.UNKNOWN: "failed",
}
_AS_HTTP = {
    StatusCode.NOT_FOUND: 404,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
}


class _NotCompletedError(Exception):
    """The server took a change and did not say that it is done."""


class Attempts:
    """Makes calls to one server.

    Args:
        place: the server's address, for messages.
        timeout: seconds within which a read is answered or given up; a write may take three times that.
    """

    def __init__(self, place: str, timeout: float) -> None:
        self.place = place
        self._timeout = timeout
        self._attempt = threading.local()

    def open(self, call: Callable[[], Result]) -> Result:
        """Make a first call: where nobody listens, it is not made again."""
        return self._repeat(call, self._timeout, patient=False)

    def read(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes nothing.

        Raises:
            StoreUnavailableError: it was not answered within the time limit.
            DatastoreNotFoundError: the collection does not exist.
            DatastoreError: the server refuses it.
        """
        return self._repeat(call, self._timeout)

    def write(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes something, and may be made again; raises as `read` does."""
        return self._repeat(call, _WRITE_FACTOR * self._timeout)

    def change(self, call: Callable[[], str]) -> None:
        """Make a call that changes points, until the status it returns says ``completed``.

        Any other says that the change may be done later or never.
        """

        def complete() -> None:
            status = call()
            if status != "completed":
                raise _NotCompletedError(f"says {status!r} of a change, not that it is done")

        self.write(complete)

    def seconds_left(self) -> float:
        """How long the call that this thread is making may still take."""
        until: float = getattr(self._attempt, "until", time.monotonic() + self._timeout)
        return max(until - time.monotonic(), 0.001)

    def limit(
        self, request: httpx.Request, send: Callable[[httpx.Request], httpx.Response]
    ) -> httpx.Response:
        """Give an HTTP request the time that is left; a middleware of the client."""
        request.extensions["timeout"] = httpx.Timeout(self.seconds_left()).as_dict()
        return send(request)

    def _repeat(self, call: Callable[[], Result], seconds: float, *, patient: bool = True) -> Result:
        deadline = time.monotonic() + seconds
        for pause in pauses():
            self._attempt.until = min(time.monotonic() + self._timeout, deadline)
            try:
                return call()
            except DatastoreError:
                raise
            except Exception as error:
                reason, wanted_pause = self._reason(error)
                nobody_there = isinstance(getattr(error, "source", None), httpx.ConnectError)
                pause_now = max(pause, wanted_pause)
                if time.monotonic() + pause_now >= deadline or (nobody_there and not patient):
                    raise StoreUnavailableError(f"store unavailable: {self.place} {reason}") from error
            time.sleep(pause_now)
        raise AssertionError("the pauses never end")

    def _reason(self, error: Exception) -> tuple[str, float]:
        """Why a call failed and how long to wait, if making it again may help; else raise."""
        match error:
            case _NotCompletedError():
                return str(error), 0
            case ResourceExhaustedResponse():
                return "has too much to do", error.retry_after_s
            case ResponseHandlingException(source=httpx.TimeoutException()):
                return "did not answer in time", 0
            case ResponseHandlingException(source=httpx.TransportError() as cause):
                return f"cannot be reached: {_first_line(cause)}", 0
            case UnexpectedResponse(status_code=int() as code):
                if code in (408, 429) or code >= 500:
                    return f"failed with {code}", 0
                raise self._refusal(code, error.content.decode(errors="replace")[:200]) from error
            case RpcError():
                if error.code() in _TRANSIENT:
                    return f"{_TRANSIENT[error.code()]}: {error.details()}", 0
                raise self._refusal(_AS_HTTP.get(error.code(), 400), str(error.details())[:200]) from error
        raise DatastoreError(f"{self.place} cannot be used: {_first_line(error)}") from error

    def _refusal(self, code: int, text: str) -> DatastoreError:
        line = " ".join(text.split())
        if code == 404:
            return DatastoreNotFoundError(f"{self.place}: {line}")
        if code in (401, 403):
            return DatastoreError(
                f"{self.place} refuses the API key, or misses it ({code}): set KNNSTORE_QDRANT_API_KEY to "
                "it, or KNNSTORE_QDRANT_API_KEY_FILE to a file with it, and KNNSTORE_QDRANT_URL to the "
                f"server that it is for, {self.place}"
            )
        return DatastoreError(f"{self.place} refuses the request: {line}")


def pauses() -> Iterator[float]:
    """Seconds, more and more, and never the same for two clients."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1)  # noqa: S311  # no secret
        pause = min(2 * pause, _LONGEST_PAUSE)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
