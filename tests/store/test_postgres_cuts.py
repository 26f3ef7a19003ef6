"""PostgreSQL's connection is cut at a commit, so that the client cannot know whether it committed."""

import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pytest
from sqlalchemy import URL

from knnstore.errors import KnnstoreError, StoreUnavailableError
from knnstore.store import KNNStore, SavedSettings, Selection

Moment = Literal["before", "after"]
"""A commit that the server never gets, or one that it did and whose reply the client never gets."""

_COMMIT = b"COMMIT\0"


class CutProxy:
    """Passes connections on, until a commit that it was told of.

    Args:
        upstream: the server's Unix socket.
    """

    def __init__(self, upstream: Path) -> None:
        self._upstream = str(upstream)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._left: int | None = None
        self._moment: Moment = "before"
        self._cut_all = False
        self.cuts = 0
        """Commits that were cut."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for pair in self._pairs:
            _close(*pair)

    def arm(self, commit: int, moment: Moment, *, cut_all: bool) -> None:
        """Cut at a commit from now on, counted from 1; with `cut_all` every other connection ends too."""
        with self._lock:
            self._left, self._moment, self._cut_all, self.cuts = commit, moment, cut_all, 0

    def disarm(self) -> None:
        """Pass everything on."""
        with self._lock:
            self._left = None

    def clients_of_this_process(self) -> Iterator[socket.socket]:
        """Yield the other ends of the connections, where they are open in this process."""
        for link in list(Path("/proc/self/fd").iterdir()):
            if link.exists() and stat.S_ISSOCK(link.stat().st_mode):
                with socket.socket(fileno=os.dup(int(link.name))) as one, contextlib.suppress(OSError):
                    if one.family == socket.AF_INET and one.getpeername()[1] == self.port:
                        yield one

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._upstream)
            except OSError:
                _close(client, server)
                continue
            with self._lock:
                self._pairs.append((client, server))
            reply_lost = threading.Event()
            for target, *arguments in (
                (self._send, client, server, reply_lost),
                (self._reply, client, server, reply_lost),
            ):
                threading.Thread(target=target, args=arguments, daemon=True).start()

    def _is_due(self, data: bytes) -> bool:
        with self._lock:
            if self._left is None or _COMMIT not in data:
                return False
            self._left -= 1
            if self._left:
                return False
            self._left = None
            self.cuts += 1
            return True

    def _send(self, client: socket.socket, server: socket.socket, reply_lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if self._is_due(data):
                    if self._moment == "before":
                        self._cut(client, server)
                        return
                    reply_lost.set()
                server.sendall(data)
        _close(client, server)

    def _reply(self, client: socket.socket, server: socket.socket, reply_lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if reply_lost.is_set():  # the server has committed
                    self._cut(client, server)
                    return
                client.sendall(data)
        _close(client, server)

    def _cut(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            cut = list(self._pairs) if self._cut_all else [(client, server)]
        for pair in cut:
            _close(*pair)


def _close(*sockets: socket.socket) -> None:
    """Close connections as a cut cable does: by a reset."""
    for one in sockets:
        with contextlib.suppress(OSError):
            if one.family == socket.AF_INET:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RDWR)
        one.close()


MOST_COMMITS = 40


MOST_COMMITS = 40
UNSETTLED = "half added or half removed"


@pytest.fixture
def proxy(postgres) -> Iterator[CutProxy]:
    with CutProxy(postgres.folder / ".s.PGSQL.5432") as running:
        yield running


class Documents:
    """Makes and stores documents by domain, id and version, the same each time."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.store: KNNStore = writer.store

    def add(self, *wanted: tuple[str, str, int]) -> None:
        new = []
        for domain, id, version in wanted:
            self._writer.rng = np.random.default_rng([len(domain), int(id), version])
            new.append(self._writer._new(domain, id, 20 + version))
        with self.store.ingest(new) as group:
            for at, document in enumerate(new):
                self._writer.put(group, at, document)


def save_calibration(documents: Documents) -> None:
    """Save as `calibrate` does: a file of weights, then the settings that name it."""
    name = documents.store.save_weights({"w": np.arange(3.0)}, {"model": "m"})
    documents.store.save_settings(SavedSettings({"k": 7, "gate": {"weights": name}}, {"held_out": []}))


def remove(documents: Documents) -> None:
    if any(document.id == "2" for document in documents.store.documents()):
        documents.store.remove_document("2")


def remove_domain(documents: Documents) -> None:
    if any(domain.name == "news" for domain in documents.store.domains()):
        documents.store.remove_domain("news")


def move(documents: Documents) -> None:
    if documents.store.engine.location != "other":
        documents.store.move("faiss", "other")


class Operation(NamedTuple):
    """A change of a store that may be repeated."""

    run: Callable[[Documents], object]
    commits: int
    """How many it takes, at least."""


OPERATIONS = {
    "add": Operation(lambda documents: documents.add(("law", "1", 2), ("law", "4", 1)), 3),
    "remove": Operation(remove, 2),
    "remove-domain": Operation(remove_domain, 2),
    "retag": Operation(lambda documents: documents.store.retag_selected(Selection(), add=["seen"]), 1),
    "settings": Operation(save_calibration, 1),
    "move": Operation(move, 1),
    "erase": Operation(lambda documents: documents.store.erase(), 1),
}


IN_CI = {"add", "remove", "settings"}
"""Operations of which CI cuts the commits; the others have commits like these."""


def make_store(home: Path, identity: Any, postgres: Any, proxy: CutProxy, writer_of: Any) -> Documents:
    """Make a store with three documents, whose catalog is behind the proxy."""
    place = {"host": "127.0.0.1", "port": proxy.port, "database": postgres.new_database().database}
    url = URL.create("postgresql+psycopg", username="knnstore", **place)
    store = KNNStore.create(home, identity, catalog=url.render_as_string(hide_password=False))
    documents = Documents(writer_of(store))
    documents.add(("law", "1", 1), ("law", "2", 1), ("news", "3", 1))
    store.save_settings(SavedSettings({"k": 3}))
    return documents


def contents(store: KNNStore) -> dict[str, Any]:
    """Return all of a store that a user can see."""
    return {
        "documents": {
            (one.domain, one.id): (store.tokens(one.id, domain=one.domain).tobytes(), one.tags)
            for one in store.documents()
        },
        "settings": store.settings(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "cut_all"),
    [pytest.param("before", False, marks=pytest.mark.exhaustive), ("after", True)],
)
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in OPERATIONS],
)
def test_a_cut_commit_loses_nothing_and_leaves_nothing_half(
    name: str, moment: Moment, cut_all: bool, postgres, proxy, identity, writer_of, tmp_path
) -> None:
    """Each commit of an operation is cut in turn, until one is not reached."""
    run, least = OPERATIONS[name]
    expected = make_store(tmp_path / "expected", identity, postgres, proxy, writer_of)
    with expected.store as store:
        before = contents(store)
        run(expected)
        after = contents(store)
    for commit in range(1, MOST_COMMITS):
        home = tmp_path / f"home-{commit}"
        documents = make_store(home, identity, postgres, proxy, writer_of)
        with documents.store as store:
            proxy.arm(commit, moment, cut_all=cut_all)
            failed = None
            try:
                run(documents)
            except KnnstoreError as error:
                failed = error
            proxy.disarm()
            if failed is not None:
                assert isinstance(failed, StoreUnavailableError), repr(failed)
                assert str(failed).startswith("the catalog's database (postgresql")
                assert str(failed).endswith("; try again: nothing is half done")
                assert "\n" not in str(failed)
            with KNNStore.open(home) as reader:
                found = contents(reader)
                assert found["settings"] in (before["settings"], after["settings"])
                assert found["documents"] in (before["documents"], after["documents"])
                assert failed or found == after
            if commit % 2:  # the same handle goes on; else the next command does
                run(documents)
                assert contents(store) == after
                assert not [problem for problem in store.verify() if UNSETTLED not in problem]
        with KNNStore.open(home, "a") as again:
            run(Documents(writer_of(again)))
            assert contents(again) == after
            assert again.verify() == []
            tokens = sum(len(tokens) // 4 for tokens, _ in after["documents"].values())
            assert again.datastore.count() == tokens
        if not proxy.cuts:
            assert failed is None
            assert commit > least
            return
    pytest.fail(f"more than {MOST_COMMITS} commits")


def test_a_server_that_falls_silent_is_given_up(proxy, identity, postgres, writer_of, tmp_path) -> None:
    """No test cuts the network itself: the kernel is asked what it was told."""
    with make_store(tmp_path / "home", identity, postgres, proxy, writer_of).store as store:
        store.documents()
        told = [
            (
                client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
            for client in proxy.clients_of_this_process()
        ]
    assert set(told) == {(1, 30, 60_000)}
