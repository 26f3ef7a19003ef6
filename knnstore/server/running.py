"""Running a server: it is there at once, loads its model, and ends what runs when it is told to end."""

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
from knnstore.lm import KNNLMForCausalLM
from knnstore.server.access import Gate
from knnstore.server.app import Options, make_app
from knnstore.server.connections import connections
from knnstore.server.metrics import Metrics
from knnstore.server.serving import Limits, Serving
from knnstore.store import Home

_logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
_IDLE_SECONDS = 75
"""An idle connection is kept longer than clients keep one (httpx 5 s): a request on one that ends is lost."""


@dataclass(frozen=True)
class Config:
    """How to serve."""

    home: Path
    name: str
    """Of the model alone."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any that is free."""
    keys_required: bool = False
    """Also on this machine's own addresses, as is needed behind a proxy; on others always."""
    public_metrics: bool = False
    drain_seconds: int = 30
    """How long what runs may take to end after SIGTERM."""
    limits: Limits = field(default_factory=Limits)

    @property
    def needs_keys(self) -> bool:
        """Whether requests must have a key."""
        return self.keys_required or not is_local(self.host)


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(config: Config, load: Callable[[], KNNLMForCausalLM]) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        config: how.
        load: loads the model, its store opened; called once, in a thread, while the server is there already.

    Raises:
        ConfigError: keys are needed and there is none, or the address cannot be had.
        KnnstoreError: whatever `load` raises.
    """
    catalog = Catalog.open(Home.open(config.home).catalog_url)
    try:
        keys = AccessKeys(catalog)
        if config.needs_keys and not any(not key.has_expired for key in keys.all()):
            raise ConfigError(
                f"whoever reaches {config.host} needs a key, and there is none: `knnstore key add` makes one"
            )
        _serve(config, load, Gate(keys, required=config.needs_keys))
    finally:
        catalog.close()


def _serve(config: Config, load: Callable[[], KNNLMForCausalLM], gate: Gate) -> None:
    metrics = Metrics()
    serving = Serving(config.name, config.limits, metrics.observe)
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            lm = load()
            try:
                serving.begin(lm)
                # What is there now stays: looking through it for garbage would stop all texts for .4 s.
                gc.collect()
                gc.freeze()
            except BaseException:
                lm.store.close()
                raise
            _logger.info("ready: %s", config.name)
        except BaseException as error:
            failed.append(error)
            server.should_exit = True

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = threading.Thread(target=begin, name="knnstore-loading", daemon=True)
        loading.start()
        try:
            yield
        finally:
            await asyncio.to_thread(loading.join)
            await asyncio.to_thread(serving.end)

    options = Options(local_only=not config.needs_keys, public_metrics=config.public_metrics)
    running = uvicorn.Config(
        make_app(serving, gate, metrics, options, lifespan),
        http=connections(config.limits.head_seconds, config.limits.answer_seconds),
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
    server = uvicorn.Server(running)
    try:
        listening = running.bind_socket()
        listening.listen(running.backlog)  # at once: who reads the log connects, and waits for the loop
    except (SystemExit, OSError) as error:  # uvicorn says so in its own log
        raise ConfigError(f"{config.host} port {config.port} cannot be listened to: is it in use?") from error
    listening.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # else a first event waits 40 ms for an ACK
    # Threads that read requests hold up the engine's, at each of its many calls, by this long at most.
    sys.setswitchinterval(_SWITCH_SECONDS)
    address = listening.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    _logger.info("listening at http://%s:%d", host, address[1])
    try:
        with _ending_well(), _reloading(serving, gate):
            server.run(sockets=[listening])
    finally:
        listening.close()
    for failure in failed:
        raise failure


@contextmanager
def _reloading(serving: Serving, gate: Gate) -> Iterator[None]:
    """Let SIGHUP be no end, but a new start of what is remembered; requests go on."""

    def reload() -> None:
        if not serving.is_ready:
            return
        try:
            gate.forget()
            serving.reload()
        except Exception:
            _logger.exception("could not reload")
            return
        _logger.info(
            "reloaded: settings of all domains, counts of n-grams, what keys have used of their limits"
        )

    def begin(*_: object) -> None:
        threading.Thread(target=reload, name="knnstore-reloading", daemon=True).start()

    before = signal.signal(signal.SIGHUP, begin) if hasattr(signal, "SIGHUP") else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)


@contextmanager
def _ending_well() -> Iterator[None]:
    """Let a signal be the end of it: uvicorn sends itself again the one that has ended it."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
