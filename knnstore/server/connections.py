"""Connections of clients that take their time.

A request's head must come soon, and an answer must be read, or the connection ends.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST_READ = 4096
"""Bytes of an answer that a client must read in `answer_seconds`, or all that is there."""


class CountedTransport:
    """A transport that counts the bytes that are written to it; everything else is that of the transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, and count."""
        self._written += len(data)
        self._transport.write(data)

    @property
    def unread(self) -> int:
        """Bytes that the client's side has not taken yet."""
        size: int = self._transport.get_write_buffer_size()
        return size

    @property
    def read(self) -> int:
        """Bytes that the client's side has taken."""
        return self._written - self.unread


class Connection(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, which by itself waits for heads and for readers without end."""

    head_seconds = 20.0
    answer_seconds = 30.0
    _waiting: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _counted: CountedTransport
    _seen = 0, 0.0
    """Bytes that had been read when the client was last seen to read, and the time of that."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        self._counted = CountedTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        self._watch()
        self._seen = 0, self.loop.time()
        self._look_again()

    def data_received(self, data: bytes) -> None:
        """Wait no longer when a head is whole, and anew after its answer."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self._stop()
        if self._looking is not None:
            self._looking.cancel()

    def _watch(self) -> None:
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
        """Drop the connection, and what it holds, where the client does not read what is there for it."""
        read, since = self._seen
        now = self.loop.time()
        if not self._counted.unread or self._counted.read - read >= _LEAST_READ:
            self._seen = self._counted.read, now
        elif now - since >= self.answer_seconds:
            self.transport.abort()
            return
        self._look_again()


def connections(head_seconds: float, answer_seconds: float = 30.0) -> type[Connection]:
    """Make what speaks with clients.

    Args:
        head_seconds: in which a client must send the head of a request.
        answer_seconds: in which a client must read something of its answer.
    """
    times = {"head_seconds": head_seconds, "answer_seconds": answer_seconds}
    return type("Connection", (Connection,), times)
