"""A small random model, a store of two domains, and servers over it, in this process or in another."""

import asyncio
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch
import uvicorn
from playwright.sync_api import Browser, sync_playwright
from typer.testing import CliRunner

import knnstore
from knnstore import KNNSettings
from knnstore.catalog import AccessKeys, Catalog, Right
from knnstore.cli import app as cli
from knnstore.server.access import Gate
from knnstore.server.app import Options, make_app
from knnstore.server.connections import create_connection_class
from knnstore.server.metrics import Metrics
from knnstore.server.serving import Limits, Serving
from knnstore.server.upstream import UpstreamAddress
from knnstore.store import Home
from tests.forked import ForkedCommand
from tests.media.conftest import disk as disk
from tests.server.browsing import Opened
from tests.small_gpt2 import save_gpt2

LETTERS = {
    "first": "The harbour was quiet when the last boat came in, and the harbour lights were lit.",
    "second": "In the morning the boat went out again past the quiet harbour wall. Déjà vu – naïve café 🙂!",
}
NEWS = {
    "n-17": "The council voted to repair the harbour wall before the winter storms.",
    "n-18": "Two boats were lost in the storm, the council said in the morning.",
    "n/19 ü": "Prices of grain rose again this winter.",
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models this small lose time on every further thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def make_model(folder: Path, heads: int = 4) -> Path:
    """Save a random GPT-2 and a tokenizer that cuts characters apart, and return their folder.

    The model's predictions depend on the context.
    """
    texts = [LETTERS["first"], *NEWS.values()]
    return save_gpt2(folder, texts, vocabulary=310, width=32, heads=heads, deviation=0.2)


@pytest.fixture(scope="session")
def prepared(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a store with the domains letters and news."""
    home = tmp_path_factory.mktemp("prepared") / "home"
    lm = knnstore.create(home, str(model_path), states=2)
    with lm.store:
        lm.add([{"id": id, "text": text} for id, text in LETTERS.items()], domain="letters", tags=["sea"])
        lm.add([{"id": id, "text": text} for id, text in NEWS.items()], domain="news")
        lm.store.retag("first", add=["old"])
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path) -> Path:
    """A copy of that store."""
    return Path(shutil.copytree(prepared, tmp_path / "home"))


def make_client(url: str, key: str, **options: Any) -> openai.OpenAI:
    """Return a client of OpenAI's package that tries once and waits long."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=240, **options)


def send_request(url: str, method: str, path: str, key: str, kind: str, **options: Any) -> httpx.Response:
    """Send one request, with a key and a content type where these are given."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"Content-Type": kind} if kind else {}
    # Without TLS; certificates would take 50 ms to load for each request.
    return httpx.request(method, url + path, headers=headers, timeout=240, verify=False, **options)


class Server:
    """`knnstore serve` in a process of its own; its log is kept."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = ["--home", str(home), "serve", "--port", "0", "--log-format", "json", *options]
        self.process = ForkedCommand(arguments, environment)
        self.lines: list[str] = []
        self._clients = ExitStack()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"listening at http://\S+:(\d+)", "http://127.0.0.1:{}")

    def wait_for(self, pattern: str, form: str = "{}", seconds: float = 240) -> str:
        """Wait for a line of the log."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = re.search(pattern, "\n".join(self.lines))
            if found:
                return form.format(found[found.lastindex or 0])
            if self.process.poll() is not None:
                self._reader.join()
                break
            time.sleep(0.02)
        raise AssertionError(f"{pattern} is not in the log:\n" + "\n".join(self.lines))

    def ready(self) -> "Server":
        self.wait_for("ready: ")
        return self

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return self._clients.enter_context(make_client(self.url, key, **options))

    def call(self, method: str, path: str, key: str = "", kind: str = "", **options: Any) -> httpx.Response:
        return send_request(self.url, method, path, key, kind, **options)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended and its log is complete; return the exit status."""
        status = self.process.wait(240)
        self._reader.join()
        return status

    def close(self) -> None:
        """End it by force, and all clients."""
        self._clients.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))


Serve = Callable[..., Server]


@pytest.fixture
def serve(home: Path) -> Iterator[Serve]:
    """Starts servers over the store, with options of the command line; ended with the test."""
    yield from _servers(home)


@pytest.fixture(scope="session")
def process(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process that all tests share; they leave the store as it is."""
    home = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("process") / "home"))
    for serve in _servers(home):
        yield serve().ready()


def _servers(home: Path) -> Iterator[Serve]:
    started: list[Server] = []

    def start(*options: str, home: Path = home) -> Server:
        started.append(Server(home, *options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def make_key() -> Callable[..., str]:
    """Makes a key of a store by the command line, called in this process."""

    def make(home: Path, *options: str) -> str:
        done = CliRunner().invoke(cli, ["--home", str(home), "key", "add", *options])
        assert done.exit_code == 0, done.stderr
        return done.stdout.strip()

    return make


class Application:
    """The application over a store, in this process."""

    def __init__(
        self,
        home: Path,
        *,
        require_keys: bool = True,
        local_only: bool = False,
        upstream: UpstreamAddress | None = None,
    ) -> None:
        self._catalog = Catalog.open(Home.open(home).catalog_url)
        self.keys = AccessKeys(self._catalog)
        metrics = Metrics()
        self.serving = Serving("tiny", observe=metrics.record_turn, upstream_address=upstream)
        self.gate = Gate(self.keys, required=require_keys)
        self.app = make_app(self.serving, self.gate, metrics, Options(local_only=local_only))
        self.serving.start(knnstore.load(home, "a", knn=KNNSettings(lam=0.0)))

    def key(self, *rights: str, domains: list[str] | None = None) -> str:
        """Make an access key with these rights and return it."""
        return self.keys.add([Right(right) for right in rights], domains=domains)[1]

    def close(self) -> None:
        """End the texts that run, and close the store."""
        self.serving.stop()
        self._catalog.close()


class Inside(Application):
    """The application without a socket: requests are calls of it."""

    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__(home, **options)
        self.loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://inside")

    def call(self, method: str, path: str, key: str = "", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= options.pop("headers", {})
        return self.loop.run_until_complete(self.client.request(method, path, headers=headers, **options))

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        super().close()


class Listening(Application):
    """The application behind a real socket, for clients of any kind."""

    def __init__(self, home: Path, **options: Any) -> None:
        super().__init__(home, local_only=not options.get("require_keys", True), **options)
        self._opened = ExitStack()
        limits = Limits()
        connection = create_connection_class(limits.head_seconds, limits.answer_seconds)
        self._server = self._opened.enter_context(listening(self.app, connection))
        self.url = f"http://127.0.0.1:{self._server.address[1]}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """Make a client of OpenAI's package; it is closed with the server."""
        return self._opened.enter_context(make_client(self.url, key, **options))

    def call(self, method: str, path: str, key: str = "", kind: str = "", **options: Any) -> httpx.Response:
        """Send one request on a connection of its own."""
        return send_request(self.url, method, path, key, kind, **options)

    def close(self) -> None:
        self._opened.close()
        super().close()


Start = Callable[..., Any]


def started_as(kind: type[Application]) -> Iterator[Start]:
    """Yield a function that starts applications of a kind; all of them are closed at the end."""
    with ExitStack() as opened:

        def start(home: Path, **options: Any) -> Application:
            return opened.enter_context(closing(kind(home, **options)))

        yield start


@pytest.fixture(scope="module")
def inside() -> Iterator[Start]:
    """Starts applications in this process, without a socket; closed with the module."""
    yield from started_as(Inside)


@pytest.fixture(scope="module")
def listen() -> Iterator[Start]:
    """Starts applications in this process, each behind a socket; closed with the module."""
    yield from started_as(Listening)


@pytest.fixture(scope="session")
def server(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """An application behind a socket that all tests share; they leave the store as it is."""
    home = Path(shutil.copytree(prepared, tmp_path_factory.mktemp("shared") / "home"))
    for start in started_as(Listening):
        yield start(home, require_keys=False)


@contextmanager
def listening(app: Any, connection: type, **options: Any) -> Iterator[uvicorn.Server]:
    """Serve an application over real sockets in this process; its attribute `address` says where."""
    config = uvicorn.Config(app, port=0, http=connection, log_config=None, lifespan="off", **options)
    socket, server = config.bind_socket(), uvicorn.Server(config)
    server.address = socket.getsockname()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join()
        socket.close()


class Clock:
    """The loop of one connection, whose timers wait for the test's clock; all else is the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._now = loop, 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, act: Callable[[], None], *_: object) -> SimpleNamespace:
        timer = (self._now + seconds, act)
        self._timers.append(timer)
        return SimpleNamespace(cancel=lambda: self._timers.remove(timer) if timer in self._timers else None)

    def advance(self, seconds: float) -> None:
        """Let time go on, and do in its order what is due; from any thread, in the loop's."""
        done = threading.Event()

        def go_on() -> None:
            until = self._now + seconds
            while due := [timer for timer in self._timers if timer[0] <= until]:
                first = min(due, key=lambda timer: timer[0])
                self._timers.remove(first)
                self._now = first[0]
                first[1]()
            self._now = until
            done.set()

        self._loop.call_soon_threadsafe(go_on)
        assert done.wait(120)


def clocked(connection: type) -> tuple[type, list[Clock]]:
    """A kind of connections whose time the test sets, and the clocks of those that were made."""
    clocks: list[Clock] = []

    class Clocked(connection):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            self.loop = Clock(self.loop)
            clocks.append(self.loop)
            super().connection_made(transport)

    return Clocked, clocks


def wait_until(is_there: Callable[[], bool], seconds: float = 240) -> None:
    """Wait for something that must come; the time only ends a test that hangs."""
    until = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        reason = "Chromium is not installed (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=quiet)
        yield started
        started.close()


@pytest.fixture
def opened(browser, request):
    """Opens the page; afterwards nothing was asked of others, and the console said only what it may."""
    pages: list[Opened] = []
    may_say = [mark.args[0] for mark in request.node.iter_markers("may_say")]

    def open_page(server, **options) -> Opened:
        pages.append(Opened(browser, server, **options))
        return pages[-1]

    yield open_page
    for one in pages:
        assert {urlsplit(url).netloc for url in one.asked} == {urlsplit(one.server.url).netloc}
        assert one.said_wrongly() == []
        assert [said for said in one.said if not any(re.search(may, said) for may in may_say)] == []
        one.context.close()
