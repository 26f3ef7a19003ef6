"""Running a server: `serve` listens at once, loads the model in a thread, and stops at a signal."""

import asyncio
import gc
import ipaddress
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from knnstore.catalog import AccessKeys, Catalog
from knnstore.errors import ConfigError
from knnstore.lm import KNNLM
from knnstore.server.access import Gate
from knnstore.server.app import Options, make_app
from knnstore.server.connections import create_connection_class
from knnstore.server.metrics import Metrics
from knnstore.server.serving import Limits, Serving
from knnstore.server.upstream import UpstreamAddress
from knnstore.store import Home

_logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""Seconds after which Python lets another thread run. Shorter than Python's default, so that the thread of
the engine waits less for other threads."""
_IDLE_SECONDS = 75
"""Seconds that an idle connection stays open. Clients close idle connections earlier (httpx after 5 s). A
request that is sent while the server closes its connection would be lost."""


@dataclass(frozen=True)
class Config:
    """Configuration of a server."""

    home: Path
    """Folder of the store."""
    name: str
    """Name of the model alone, without domains."""
    host: str = "127.0.0.1"
    """Name or IP address to listen at."""
    port: int = 8000
    """Port to listen at; 0 takes any free port."""
    keys_required: bool = False
    """True if requests need an API key also on a loopback address, for example behind a proxy. On other
    addresses they always need a key."""
    public_metrics: bool = False
    """True if ``/metrics`` needs no key."""
    drain_seconds: int = 30
    """Seconds in which running requests may end after SIGTERM."""
    limits: Limits = field(default_factory=Limits)
    upstream: UpstreamAddress | None = None
    """A vLLM server with the same store that generates and scores all texts; None lets this process do
    that."""

    @property
    def needs_keys(self) -> bool:
        """True if requests need an API key: keys are required, or the host is not a loopback address."""
        return self.keys_required or not is_local(self.host)


def is_local(host: str) -> bool:
    """Check whether a host is a loopback IP address or the name ``localhost``. Other names give False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(config: Config, load: Callable[[], KNNLM]) -> None:
    """Run a server until SIGTERM or Ctrl-C.

    The server listens while the model is loaded, and answers requests with 503 until then.

    Args:
        config: the configuration.
        load: function that loads the model and opens its store; called once, in a thread.

    Raises:
        ConfigError: if API keys are needed and the store has no valid key, or if the server cannot listen at
            the address.
        KnnstoreError: any error that `load` raises.
    """
    catalog = Catalog.open(Home.open(config.home).catalog_url)
    try:
        keys = AccessKeys(catalog)
        if config.needs_keys and not any(not key.has_expired for key in keys.list_keys()):
            raise ConfigError(
                f"clients of {config.host} need an API key, but none exists: make one with `knnstore key add`"
            )
        _run_uvicorn(config, load, Gate(keys, required=config.needs_keys))
    finally:
        catalog.close()


def _run_uvicorn(config: Config, load: Callable[[], KNNLM], gate: Gate) -> None:
    """Run the HTTP server uvicorn with the application until a signal stops it.

    Args:
        config: the configuration.
        load: function that loads the model and opens its store; called once, in a thread.
        gate: object that finds the permissions of each client by its API key.

    Raises:
        ConfigError: if the server cannot listen at the address.
        KnnstoreError: any error that `load` raises.
    """
    metrics = Metrics()
    serving = Serving(config.name, config.limits, metrics.record_turn, config.upstream)
    failures: list[BaseException] = []

    def load_and_start() -> None:
        """Load the model and start serving it. An error is kept in `failures` and stops the server."""
        try:
            lm = load()
            try:
                serving.start(lm)
                # The loaded objects stay until the end. Without the freeze, each full garbage collection
                # would scan them and stop all texts for 0.4 s.
                gc.collect()
                gc.freeze()
            except BaseException:
                lm.store.close()
                raise
            import torch  # loaded with the model; before, it would delay the first answers

            threads = torch.get_num_threads()
            _logger.info("ready: %s on %s, with %d threads", config.name, lm.device, threads)
        except BaseException as error:
            failures.append(error)
            server.should_exit = True

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Load the model in a thread when the server starts, and stop serving it when the server ends."""
        loading = threading.Thread(target=load_and_start, name="knnstore-loading", daemon=True)
        loading.start()
        try:
            yield
        finally:
            await asyncio.to_thread(loading.join)
            if serving.upstream is not None:
                await serving.upstream.close()
            await asyncio.to_thread(serving.stop)

    # 1) Build the application, and the HTTP server around it.
    options = Options(local_only=not config.needs_keys, public_metrics=config.public_metrics)
    uvicorn_config = uvicorn.Config(
        make_app(serving, gate, metrics, options, lifespan),
        http=create_connection_class(config.limits.head_seconds, config.limits.answer_seconds),
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=config.drain_seconds,
        lifespan="on",
    )
    server = uvicorn.Server(uvicorn_config)
    # 2) Listen. This comes before the log line, so that a client that reads the line can connect.
    try:
        listening_socket = uvicorn_config.bind_socket()
        listening_socket.listen(uvicorn_config.backlog)
    except (SystemExit, OSError) as error:  # uvicorn logs the cause
        raise ConfigError(
            f"cannot listen at {config.host} port {config.port}: is the port in use?"
        ) from error
    # Without TCP_NODELAY the first event of a stream waits 40 ms for an ACK.
    listening_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A thread that reads requests delays the engine's thread by at most this long each time.
    sys.setswitchinterval(_SWITCH_SECONDS)
    address = listening_socket.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    _logger.info("listening at http://%s:%d", host, address[1])
    # 3) Run until a signal or a failed load stops the server.
    try:
        with _ignore_stop_signals(), _reload_on_sighup(serving, gate):
            server.run(sockets=[listening_socket])
    finally:
        listening_socket.close()
    for failure in failures:
        raise failure


@contextmanager
def _reload_on_sighup(serving: Serving, gate: Gate) -> Iterator[None]:
    """Reload caches when the process gets SIGHUP, while the context is open. Requests go on meanwhile.

    A reload forgets the cached settings of all domains, prepares their n-gram counts again, and resets the
    rate limits of API keys. SIGHUP is ignored until the model is loaded.
    """

    def reload() -> None:
        """Reload all caches if the model is loaded. Errors are only logged."""
        if not serving.is_ready:
            return
        try:
            gate.reset_quotas()
            serving.reload_caches()
        except Exception:
            _logger.exception("could not reload")
            return
        _logger.info("reloaded: settings of all domains, counts of n-grams, usage of all keys")

    def start_reload(*_: object) -> None:
        """Start a reload in a thread. This is the handler of the signal."""
        threading.Thread(target=reload, name="knnstore-reloading", daemon=True).start()

    earlier_handler = signal.signal(signal.SIGHUP, start_reload) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        if earlier_handler is not None:
            signal.signal(signal.SIGHUP, earlier_handler)


@contextmanager
def _ignore_stop_signals() -> Iterator[None]:
    """Ignore SIGTERM and SIGINT while the context is open, except where uvicorn handles them itself.

    uvicorn has its own handlers while it runs. At the end it sends the signal that stopped it to the process
    again. Without this context that second signal would kill the process.
    """
    earlier_handlers = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
