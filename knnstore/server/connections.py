"""Time limits of connections, against slow clients.

A connection is closed if the head of a request (first line and headers) does not arrive in time, or if its
client does not read the answer. `create_connection_class` makes the protocol class for uvicorn.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LEAST_READ = 4096
"""Bytes of an answer that a client must read in `answer_seconds`, unless fewer are waiting for it."""


class CountedTransport:
    """Wrapper of an asyncio transport that counts the bytes written to it.

    All other attributes are taken from the wrapped transport.

    Args:
        transport: the transport to wrap.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data to the connection and count its bytes."""
        self._written += len(data)
        self._transport.write(data)

    @property
    def unread_bytes(self) -> int:
        """Number of written bytes that the client has not taken yet: they are still in the write buffer."""
        size: int = self._transport.get_write_buffer_size()
        return size

    @property
    def read_bytes(self) -> int:
        """Number of written bytes that have left the write buffer."""
        return self._written - self.unread_bytes


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits for slow clients. uvicorn alone would wait forever."""

    head_seconds = 20.0
    """Seconds in which the head of a request must arrive."""
    answer_seconds = 30.0
    """Seconds in which the client must read `_LEAST_READ` bytes of its answer."""
    _head_timer: asyncio.TimerHandle | None = None
    """Timer that closes the connection if no head arrives; None while a request is answered."""
    _check_timer: asyncio.TimerHandle | None = None
    """Timer of the next check that the client reads."""
    _counted_transport: CountedTransport
    _last_progress = 0, 0.0
    """Number of bytes that the client had read when it last made progress, and the time of this progress."""

    def connection_made(self, transport: Any) -> None:
        """Start the connection and both timers: for the head of a request, and for the client's reading."""
        self._counted_transport = CountedTransport(transport)
        super().connection_made(self._counted_transport)  # type: ignore[arg-type]
        self._update_head_timer()
        self._last_progress = 0, self.loop.time()
        self._schedule_check()

    def data_received(self, data: bytes) -> None:
        """Process received data.

        The time limit for the head ends with the head, and begins again with the next request.
        """
        super().data_received(data)
        self._update_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and stop both timers.

        Args:
            exc: the error that ended the connection; None if it was closed.
        """
        super().connection_lost(exc)
        self._stop_head_timer()
        if self._check_timer is not None:
            self._check_timer.cancel()

    def _update_head_timer(self) -> None:
        """Start the timer that waits for a request's head. Stop it if a request is being answered."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._close_late)

    def _stop_head_timer(self) -> None:
        """Stop the timer that waits for the head of a request, if it runs."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        """Close the connection, because the head of its request has not arrived in time."""
        self._head_timer = None
        self.transport.close()

    def _schedule_check(self) -> None:
        """Start the timer of the next check whether the client reads its answer.

        The check comes after a quarter of `answer_seconds`, and after 1 second at the latest.
        """
        self._check_timer = self.loop.call_later(min(1.0, self.answer_seconds / 4), self._check_client_reads)

    def _check_client_reads(self) -> None:
        """Abort the connection if the client reads too slowly; otherwise check again later.

        The client must make progress at least every `answer_seconds`. Progress means that it has read all
        that was written, or `_LEAST_READ` bytes more than at its last progress.
        """
        read, since = self._last_progress
        now = self.loop.time()
        if (
            not self._counted_transport.unread_bytes
            or self._counted_transport.read_bytes - read >= _LEAST_READ
        ):
            self._last_progress = self._counted_transport.read_bytes, now
        elif now - since >= self.answer_seconds:
            self.transport.abort()
            return
        self._schedule_check()


def create_connection_class(head_seconds: float, answer_seconds: float = 30.0) -> type[Connection]:
    """Return a subclass of `Connection` with the given time limits, for uvicorn's argument ``http``.

    Args:
        head_seconds: seconds in which a client must send the head of a request.
        answer_seconds: seconds in which a client must read a part of its answer.
    """
    times = {"head_seconds": head_seconds, "answer_seconds": answer_seconds}
    return type("Connection", (Connection,), times)
