"""How the test server misbehaves: which call, in what way, for how long."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qdrant_client.http.models import UpdateResult, UpdateStatus

UPDATES = frozenset({"upsert", "delete", "create_payload_index", "delete_payload_index"})
"""Endpoints that answer with an `UpdateStatus`."""

FOREVER = 2**62


class Kind(StrEnum):
    """Ways to misbehave."""

    REFUSE = "refuse"
    """The connection is reset; nothing was done."""
    CUT = "cut"
    """Done, and the connection is cut in the middle of the answer's body."""
    LOST = "lost"
    """Done, and the connection is reset before any answer."""
    ERROR = "error"
    """500; nothing was done."""
    BUSY = "busy"
    """429 with Retry-After; nothing was done."""
    STALL = "stall"
    """Done and answered, but only after `seconds`; neither, if the fault is cleared before."""
    ACKNOWLEDGED = "acknowledged"
    """The update is answered with `acknowledged` and done `seconds` later or before the next update, as
    updates are done in order; never if `seconds` is 0."""
    WAIT_TIMEOUT = "wait_timeout"
    """The same with `wait_timeout`."""
    GONE = "gone"
    """The connection is reset, and after that the server knows no collection."""
    EMPTIED = "emptied"
    """The connection is reset, and after that the collections are there and empty."""


@dataclass(slots=True)
class Fault:
    """One misbehaviour.

    Args:
        kind: which.
        endpoint: the calls it is for, as the client's methods are named ("upsert", "query", "scroll",
            ...); "query" is also its batch; "*" means all.
        first: the first of these calls, from now, that it hits; from 1.
        times: how many it hits.
        seconds: what `kind` says; for "busy", what Retry-After says.
    """

    kind: Kind
    endpoint: str = "*"
    first: int = 1
    times: int = 1
    seconds: float = 0
    seen: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the next call that is for it will be spoilt, or one is being spoilt."""
        return self.first - 1 <= self.seen < self.first + self.times

    def hits(self, endpoint: str) -> bool:
        """Count a call, and say whether this is one to spoil."""
        is_for_updates = self.kind in (Kind.ACKNOWLEDGED, Kind.WAIT_TIMEOUT)
        if self.endpoint not in ("*", endpoint) or (is_for_updates and endpoint not in UPDATES):
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


class ApiError(Exception):
    """A call that is answered with an error."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ConnectionLost(Exception):
    """The connection is to be reset; `answer` is what the client is to see half of, if anything."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__("the connection is lost")
        self.answer = answer


class Faults:
    """The misbehaviour of one server, and a record of the calls it got.

    Args:
        forget: drops all collections (False), or only what is in them (True).
    """

    def __init__(self, forget: Callable[[bool], None]) -> None:
        self.calls: list[tuple[str, str]] = []
        """The protocol ("rest" or "grpc") and the endpoint of each."""
        self._well_again = threading.Event()
        self._forget = forget
        self._faults: list[Fault] = []
        self._late: list[Callable[[], Any]] = []
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()
        self._answering = 0

    def add(self, kind: str, endpoint: str = "*", **details: Any) -> Fault:
        """Misbehave from now on; the arguments are those of `Fault`.

        Of several faults the one added first that a call is for decides; later ones do not count it.
        """
        fault = Fault(Kind(kind), endpoint, **details)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Behave, and forget the calls; what stalls or was to be done late is never done."""
        with self._lock:
            self._faults.clear()
            self.calls.clear()
            self._late.clear()
            self._well_again.set()
            self._well_again = threading.Event()
        for timer in self._timers:
            timer.cancel()

    @property
    def leave_unanswered(self) -> bool:
        """Whether the next call is one that nobody answers, however long one waits or how often one asks.

        Those before it are answered, and a client must have the time to see that.
        """
        return any(
            (fault.kind is Kind.STALL or fault.times == FOREVER) and fault.is_due for fault in self._faults
        )

    @property
    def is_answering(self) -> bool:
        """Whether a call is being answered, for a client that waits or for one that gave up."""
        return self._answering > 0

    def counted(self) -> Counter[str]:
        """How often each endpoint was called."""
        return Counter(endpoint for _, endpoint in self.calls)

    def answer(self, protocol: str, endpoint: str, work: Callable[[], Any]) -> Any:
        """Do the work of a call, or spoil it.

        Raises:
            ApiError: the answer is this error.
            ConnectionLost: the connection must be reset.
        """
        with self._lock:
            self._answering += 1
            self.calls.append((protocol, endpoint))
            well_again = self._well_again
            fault = next((fault for fault in self._faults if fault.hits(endpoint)), None)
        try:
            return self._answer(endpoint, work, fault, well_again)
        finally:
            with self._lock:
                self._answering -= 1

    def _answer(
        self, endpoint: str, work: Callable[[], Any], fault: Fault | None, well_again: threading.Event
    ) -> Any:
        if endpoint in UPDATES:
            self._do_what_is_late()
        if fault is None:
            return work()
        match fault.kind:
            case Kind.REFUSE:
                raise ConnectionLost
            case Kind.GONE | Kind.EMPTIED as kind:
                self._forget(kind is Kind.EMPTIED)
                raise ConnectionLost
            case Kind.ERROR:
                raise ApiError(500, "Service internal error: told to fail")
            case Kind.BUSY:
                raise ApiError(429, "Rate limit exceeded: told to be busy", fault.seconds)
            case Kind.LOST:
                work()
                raise ConnectionLost
            case Kind.CUT:
                raise ConnectionLost(work())
            case (Kind.ACKNOWLEDGED | Kind.WAIT_TIMEOUT) as kind:
                if fault.seconds:
                    self._later(work, fault.seconds)
                return UpdateResult(operation_id=0, status=UpdateStatus(kind.value))
            case Kind.STALL:
                if well_again.wait(fault.seconds):
                    raise ConnectionLost
                return work()

    def _later(self, work: Callable[[], Any], seconds: float) -> None:
        timer = threading.Timer(seconds, self._do_what_is_late)
        with self._lock:
            self._late.append(work)
            self._timers.append(timer)
        timer.start()

    def _do_what_is_late(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for work in late:
            work()
