"""Time limits of connections, against slow clients.

A connection is closed if the head of a request does not arrive in time, or if its client does not read the
answer. `connections` makes the protocol class for uvicorn.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST_READ = 4096
"""Bytes of an answer that a client must read in `answer_seconds`, unless fewer are waiting for it."""


class CountedTransport:
    """A transport that counts the bytes written to it. All other attributes are the wrapped transport's."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data and count its bytes."""
        self._written += len(data)
        self._transport.write(data)

    @property
    def unread(self) -> int:
        """Number of written bytes that are still in the write buffer."""
        size: int = self._transport.get_write_buffer_size()
        return size

    @property
    def read(self) -> int:
        """Number of written bytes that have left the write buffer."""
        return self._written - self.unread


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits. uvicorn alone waits forever for slow clients."""

    head_seconds = 20.0
    """Seconds in which the head of a request must arrive."""
    answer_seconds = 30.0
    """Seconds in which the client must read `_LEAST_READ` bytes of its answer."""
    _waiting: asyncio.TimerHandle | None = None
    """Timer that closes the connection if no head arrives; None while a request is answered."""
    _looking: asyncio.TimerHandle | None = None
    """Timer of the next check that the client reads."""
    _counted: CountedTransport
    _seen = 0, 0.0
    """Number of bytes read at the last progress of the client, and the time of that progress."""

    def connection_made(self, transport: Any) -> None:
        """Start both timers."""
        self._counted = CountedTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        self._watch()
        self._seen = 0, self.loop.time()
        self._look_again()

    def data_received(self, data: bytes) -> None:
        """Process data. Stops the head's timer at the end of a head; starts it with the next request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        super().connection_lost(exc)
        self._stop()
        if self._looking is not None:
            self._looking.cancel()

    def _watch(self) -> None:
        """Start the head's timer if no request is being answered; otherwise stop it."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self._end)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end(self) -> None:
        self._waiting = None
        self.transport.close()

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(min(1.0, self.answer_seconds / 4), self._look)

    def _look(self) -> None:
        """Abort the connection if the client reads too little for too long; else check again later."""
        read, since = self._seen
        now = self.loop.time()
        if not self._counted.unread or self._counted.read - read >= _LEAST_READ:
            self._seen = self._counted.read, now
        elif now - since >= self.answer_seconds:
            self.transport.abort()
            return
        self._look_again()


def connections(head_seconds: float, answer_seconds: float = 30.0) -> type[Connection]:
    """Return a protocol class for uvicorn with these time limits.

    Args:
        head_seconds: seconds in which a client must send the head of a request.
        answer_seconds: seconds in which a client must read a part of its answer.
    """
    times = {"head_seconds": head_seconds, "answer_seconds": answer_seconds}
    return type("Connection", (Connection,), times)
