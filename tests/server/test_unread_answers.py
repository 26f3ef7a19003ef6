"""Answers that nobody reads: they are dropped, no more than a part of them is copied, and nobody waits."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time

import pytest
import uvicorn

from knnstore.server.connections import connections
from knnstore.server.engine import MOST_BEHIND, MOST_UNREAD
from knnstore.server.frame import Frame
from tests.server.conftest import Inside
from tests.server.test_turns import Client, until

BODY = bytes(range(256)) * (100 << 10)  # 25 MiB


@pytest.fixture(scope="module")
def server(inside, prepared, tmp_path_factory) -> Inside:
    home = shutil.copytree(prepared, tmp_path_factory.mktemp("unread") / "home")
    return inside(home, require_keys=False)


class Serving:
    """A server in this process whose every answer is large; clients must read something in a second."""

    def __init__(self, gate) -> None:
        self.handed_on: list[int] = []
        nothing = frozenset[str]()
        frame = Frame(
            self._answer,
            gate,
            frozenset(["/", "/parts"]),
            nothing,
            1000,
            60,
            local_only=False,
            count=lambda *_: None,
        )
        kind = connections(20, 1)
        config = uvicorn.Config(frame, port=0, http=kind, log_config=None, lifespan="off")
        self._listening, self.server = config.bind_socket(), uvicorn.Server(config)
        self.address = self._listening.getsockname()
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listening]})
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def _answer(self, scope, receive, send) -> None:
        async def counted(message) -> None:
            await send(message)
            self.handed_on.append(1)

        await counted({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/":
            await counted({"type": "http.response.body", "body": BODY})
            return
        for start in range(0, len(BODY), 1000):
            await counted(
                {"type": "http.response.body", "body": BODY[start : start + 1000], "more_body": True}
            )
        await counted({"type": "http.response.body"})

    def wait_for(self, connected: int) -> None:
        until = time.monotonic() + 60
        while len(self.server.server_state.connections) != connected:
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()
        self._listening.close()


@pytest.fixture
def large(server):
    made = Serving(server.gate)
    yield made
    made.close()


def ask(address, path: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return client


@pytest.mark.parametrize("path", [b"/", b"/parts"])
def test_an_answer_that_nobody_reads_is_dropped(large, path):
    clients = [ask(large.address, path) for _ in range(4)]
    large.wait_for(connected=4)
    large.wait_for(connected=0)
    for client in clients:
        client.close()


@pytest.mark.parametrize("path", [b"/", b"/parts"])
def test_who_reads_slowly_is_given_all(large, path):
    with ask(large.address, path) as client:
        client.settimeout(60)
        read, pauses = bytearray(), 0
        while part := client.recv(1 << 16):
            read += part
            if len(read) > pauses << 21:
                pauses += 1
                time.sleep(0.2)  # all of it takes longer than nothing may be read for
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
        await until(lambda: len(engine._waiting) == 1)
        ticket = engine._waiting.tickets[0]
        await until(lambda: ticket.is_behind and not engine._batch.rows)
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

    class Deaf(Client):
        async def send(self, message) -> None:
            await reading.wait()
            await super().send(message)

    async def run() -> None:
        deaf = Deaf(server, "/v1/completions", asked)
        waiting = asyncio.ensure_future(deaf.run())
        engine = server.serving.engine
        await until(lambda: bool(engine._batch.rows))
        await until(lambda: not engine._batch.rows)
        reading.set()
        with contextlib.suppress(Exception):
            await waiting
        assert b"too_slow" in b"".join(message.get("body", b"") for message in deaf.sent)

    server.loop.run_until_complete(run())
