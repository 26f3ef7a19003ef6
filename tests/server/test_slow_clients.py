"""Clients that send too slowly, too much, or do not read: they end, and nobody else waits for them."""

import contextlib
import json
import re
import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from knnstore.server.app import Options, make_app
from knnstore.server.connections import create_connection_class
from knnstore.server.metrics import Metrics
from tests.server.conftest import clocked, listening, wait_until

PROMPT = {"model": "tiny+news", "prompt": "The", "max_tokens": 3, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE = 100 << 20


@pytest.fixture(scope="module")
def served(inside, prepared):
    """A store to serve."""
    return inside(prepared, require_keys=False)


@pytest.fixture(scope="module")
def application(served):
    """An application that waits half a second for a body."""
    served.serving.limits = type(served.serving.limits)(body_seconds=0.5)
    return make_app(served.serving, served.gate, Metrics(), Options(local_only=False))


@pytest.fixture(scope="module")
def impatient(application):
    """The address of a server in this process with that application."""
    with listening(application, create_connection_class(60)) as server:
        yield server.address


@pytest.fixture
def timed(application):
    """The address of a server that waits half a second for a head, and the clocks of its connections."""
    kind, clocks = clocked(create_connection_class(0.5))
    with listening(application, kind) as server:
        yield server.address, clocks


def heard(connection: socket.socket) -> bytes:
    """All that is answered until the other side ends the connection."""
    connection.settimeout(240)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            said += part
    return said


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("begun", [b"", b"GET /health HT", HEAD])
def test_a_head_that_does_not_come_ends_the_connection(timed, answered, begun):
    place, clocks = timed
    with socket.create_connection(place) as slow:
        slow.settimeout(240)
        if answered and begun:  # a connection that has been answered and is silent ends by itself
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not slow.recv(1000).endswith(b"}"):
                pass
        slow.sendall(begun)
        wait_until(lambda: clocks)
        clocks[0].advance(0.4)
        slow.settimeout(0.1)
        with pytest.raises(TimeoutError):
            slow.recv(1)
        for _ in range(1000):  # what has begun may be read only after some of it
            clocks[0].advance(0.2)
            with contextlib.suppress(TimeoutError):
                assert slow.recv(1) == b""
                return
        pytest.fail("the connection stays")


def test_a_head_that_drips_ends_too(timed):
    place, clocks = timed
    with socket.create_connection(place) as slow:
        wait_until(lambda: clocks)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for byte in HEAD * 50:
                slow.sendall(bytes([byte]))
                clocks[0].advance(0.02)


def test_a_body_that_does_not_come_is_refused(impatient):
    with socket.create_connection(impatient) as slow:
        slow.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        said = heard(slow)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b'"message":"the request did not arrive within 0.5 seconds"' in said


@pytest.mark.slow
def test_an_idle_connection_outlives_what_clients_keep_one_for(process):
    idle = HTTPConnection(*address(process), timeout=240)  # which fails where the server has ended it
    for pause in (0, 5.5):
        time.sleep(pause)
        idle.request("GET", "/health/live")
        assert idle.getresponse().read() == b'{"status":"alive"}'
    idle.close()


def test_an_answer_that_takes_longer_than_a_body_may_is_given(served, impatient):
    body = json.dumps(PROMPT).encode()
    let_go = threading.Event()
    served.serving.engine.call(let_go.wait)
    with socket.create_connection(impatient) as patient:
        patient.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.7)  # longer than a body may take; more does not matter
        let_go.set()
        assert heard(patient).startswith(b"HTTP/1.1 200 ")


def resident(process) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


def address(server) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_hundred_megabytes_takes_no_memory(process, chunked):
    assert process.call("POST", "/v1/completions", json=PROMPT).status_code == 200
    before, sent = resident(process), 0
    with socket.create_connection(address(process)) as large:
        large.settimeout(240)
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % LARGE
        large.sendall(HEAD + length + b"\r\n\r\n")
        part = b"10000\r\n" + b" " * 65_536 + b"\r\n" if chunked else b" " * 65_536
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < LARGE:
                large.sendall(part)
                sent += 65_536
        with contextlib.suppress(ConnectionResetError):
            assert b" 413 " in large.recv(100)
    assert resident(process) - before < 16 << 20
    assert process.call("POST", "/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.slow
def test_who_does_not_read_holds_nobody_up(server):
    asked = {**PROMPT, "prompt": ["The"] * 8, "n": 16, "max_tokens": 90, "logprobs": 20, "stream": True}
    body = json.dumps(asked).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address(server))
        deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert deaf.recv(10)
        for _ in range(3):
            assert server.call("POST", "/v1/completions", json=PROMPT).status_code == 200
