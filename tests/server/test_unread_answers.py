"""Answers that nobody reads: they are dropped, no more than a part of them is copied, and nobody waits."""

import asyncio
import contextlib
import json
import shutil
import socket
from typing import Any

import pytest

from knnstore.server.connections import create_connection_class
from knnstore.server.engine import MOST_BEHIND, MOST_UNREAD, Ticket
from knnstore.server.frame import Frame
from tests.server.conftest import Clock, Inside, clocked, listening, wait_until
from tests.server.test_turns import Client, until

BODY = bytes(range(256)) * (100 << 10)  # 25 MiB


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory) -> Inside:
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("unread") / "home")
    return inside(home, require_keys=False)


class Serving:
    """A server in this process whose every answer is large; clients must read something in a second."""

    def __init__(self, server: Any, clocks: list[Clock]) -> None:
        self.server, self.address, self._clocks = server, server.address, clocks

    def wait_for(self, connected: int) -> None:
        """Wait until so many clients are answered."""
        wait_until(lambda: len(self._clocks) >= connected)
        wait_until(lambda: len(self.server.server_state.connections) == connected)

    def wait_for_none(self) -> None:
        """Wait until all connections have ended."""
        wait_until(lambda: not self.server.server_state.connections)

    def advance(self, seconds: float) -> None:
        """Let time go on for all connections."""
        for clock in list(self._clocks):
            clock.advance(seconds)


@pytest.fixture
def large(server):
    kind, clocks = clocked(create_connection_class(20, 1))

    async def answer(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/":
            await send({"type": "http.response.body", "body": BODY})
            return
        for start in range(0, len(BODY), 1000):
            body = BODY[start : start + 1000]
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    paths = frozenset(["/", "/parts"])
    frame = Frame(answer, server.gate, paths, frozenset(), 1000, 60, local_only=False, count=lambda *_: None)
    with listening(frame, kind) as running:
        yield Serving(running, clocks)


def ask(address, path: bytes) -> socket.socket:
    """Send a request; returns when the answer has begun, with its first byte read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(120)
    client.connect(address)
    client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert client.recv(1)
    return client


@pytest.mark.parametrize("path", [b"/", b"/parts"])
def test_an_answer_that_nobody_reads_is_dropped(large, path):
    clients = [ask(large.address, path) for _ in range(4)]
    large.wait_for(connected=4)
    large.advance(0.9)
    assert len(large.server.server_state.connections) == 4, "it was given up too soon"
    large.advance(1.6)  # it was last seen to read up to half a second after it began
    large.wait_for_none()
    for client in clients:
        client.close()


@pytest.mark.parametrize("path", [b"/", b"/parts"])
def test_who_reads_slowly_is_given_all(large, path):
    """All of it takes longer than nothing may be read for."""
    with ask(large.address, path) as client:
        read, pauses = bytearray(), 0
        while part := client.recv(1 << 16):
            read += part
            if len(read) > pauses << 21:
                pauses += 1
                large.advance(0.2)
    assert pauses * 0.2 > 2
    assert BODY[-1000:] in read
    assert len(read) >= len(BODY)


def test_no_further_text_begins_for_who_does_not_read(server, monkeypatch):
    """Two clients ask for many texts: of the one that reads none, few are written, of the other all."""
    monkeypatch.setattr("knnstore.server.engine.tickets.MOST_BEHIND", 20)
    assert MOST_BEHIND < MOST_UNREAD
    asked = {
        "model": "tiny",
        "prompt": [[3, 4, 5]] * 8,
        "n": 8,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    reading = asyncio.Event()

    class Deaf(Client):
        """Does not take what is sent until it is told to."""

        async def send(self, message) -> None:
            await reading.wait()
            await super().send(message)

    async def run() -> None:
        deaf, other = Deaf(server, "/v1/completions", asked), Client(server, "/v1/completions", asked)
        waiting = asyncio.ensure_future(deaf.run())
        engine = server.serving.engine
        await until(lambda: len(engine._admission) == 1)
        ticket = engine._admission.tickets[0]
        await until(lambda: ticket.is_behind and not engine.rows)
        await other.run()
        written = ticket.told
        # Sixteen texts were being written when the reader fell behind.
        assert written <= 20 + 16 * 4 + 4
        assert not waiting.done()
        reading.set()
        await waiting
        texts = [[], []]
        for found, client in zip(texts, (deaf, other), strict=True):
            for message in client.sent:
                for line in message.get("body", b"").decode().split("\n\n"):
                    if line.startswith("data: {"):
                        found += [(one["index"], one["text"]) for one in json.loads(line[6:])["choices"]]
        assert len({index for index, _ in texts[0]}) == 64
        assert sorted(texts[0]) == sorted(texts[1])

    server.loop.run_until_complete(run())


def test_an_answer_is_given_up_where_far_too_much_is_unread(server, monkeypatch):
    monkeypatch.setattr("knnstore.server.serving.MOST_UNREAD", 10)
    asked = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 80, "temperature": 0, "stream": True}
    reading = asyncio.Event()
    tickets: list[Ticket] = []
    engine = server.serving.engine
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda ticket: (tickets.append(ticket), submit(ticket)))

    class Deaf(Client):
        async def send(self, message) -> None:
            await reading.wait()
            await super().send(message)

    async def run() -> None:
        deaf = Deaf(server, "/v1/completions", asked)
        waiting = asyncio.ensure_future(deaf.run())
        await until(lambda: any(ticket.cancelled for ticket in tickets))
        reading.set()
        with contextlib.suppress(Exception):
            await waiting
        assert b"too_slow" in b"".join(message.get("body", b"") for message in deaf.sent)

    server.loop.run_until_complete(run())
