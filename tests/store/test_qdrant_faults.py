"""A store whose keys are on a Qdrant server, while that server misbehaves, is killed or loses its data."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from knnstore.catalog import Identity, NewDocument
from knnstore.datastore.records import tokens_from_ids
from knnstore.errors import DatastoreError, DatastoreNotFoundError, KnnstoreError, StoreUnavailableError
from knnstore.store import KNNStore

pytest.importorskip("qdrant_client")

DIM = 8
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)
SCRIPT = Path(__file__).parents[1] / "qdrant_server" / "qdrant_server.py"

Contents = dict[tuple[str, str], int]
"""The version of each (domain, id)."""


def tokens_and_keys(document: tuple[str, str], version: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([crc32("/".join(document).encode()), version])
    n = 20 + version % 5
    keys = rng.standard_normal((n, DIM)).astype(np.float16).astype(np.float32)
    return rng.integers(0, 1000, n).astype(np.uint32), keys


def put(store: KNNStore, documents: Contents) -> None:
    new = [
        NewDocument(id, domain, f"{version:064d}", tokens_and_keys((domain, id), version)[0])
        for (domain, id), version in documents.items()
    ]
    with store.ingest(new) as group:
        for at, (document, version) in enumerate(documents.items()):
            tokens, keys = tokens_and_keys(document, version)
            where = np.full(len(tokens), at)
            group.add(where, np.arange(len(tokens)), tokens.astype(np.int64), keys)


def contents(store: KNNStore) -> Contents:
    """What a reader finds: every live document whole, and nothing else."""
    live: Contents = {}
    records = 0
    for document in store.documents():
        live[document.domain, document.id] = version = int(document.content_hash)
        tokens, keys = tokens_and_keys((document.domain, document.id), version)
        found = store.search(keys, 1)
        assert np.array_equal(tokens_from_ids(found.ids[:, 0]), tokens), f"{document.id} is not whole"
        assert (found.distances == 0).all(), f"{document.id} has other keys"
        records += len(tokens)
    everything = store.search(np.zeros((1, DIM), np.float32), 500).ids[0]
    assert (everything >= 0).sum() == records, f"{(everything >= 0).sum()} found, {records} are live"
    return live


@contextmanager
def store_on(home: Path, url: str, **params: Any) -> Iterator[KNNStore]:
    """A reader of a new store with the first of `steps(2)`."""
    with KNNStore.create(home, IDENTITY, store="qdrant", location=url, params=params) as store:
        put(store, steps(2)[0])
    with KNNStore.open(home) as reader:
        yield reader


def steps(version: int) -> list[Contents]:
    """What is there before `change`, between its steps, and after it."""
    old: Contents = {("a", "1"): version - 1, ("b", "3"): version - 1}
    new: Contents = dict.fromkeys(old, version)
    return [old | {("a", "2"): 1}, new | {("a", "2"): 1}, new]


def change(store: KNNStore, version: int) -> None:
    """What is disturbed: it replaces two documents, then removes one."""
    put(store, steps(version)[2])
    if any(document.id == "2" for document in store.documents()):
        store.remove_document("2")


def check_change(reader: KNNStore, server: Any, version: int) -> KnnstoreError | None:
    """Change a store on a server that is disturbed; when it is well, the same again completes it.

    Returns:
        The error that the first try ended with.
    """
    home, problem = reader.home.path, None
    try:
        with KNNStore.open(home, "a") as store:
            change(store, version)
    except KnnstoreError as error:
        problem = error
    server.faults.clear()
    assert contents(reader) in (steps(version) if problem else steps(version)[2:])
    with KNNStore.open(home, "a") as store:
        change(store, version)
        assert contents(reader) == steps(version)[2]
        assert store.verify() == []
        records = sum(len(tokens_and_keys(*document)[0]) for document in steps(version)[2].items())
        assert store.datastore.count() == records
        put(store, {("a", "2"): 1})
    return problem


ONCE = ["refuse", "error", "busy", "cut", "lost", "acknowledged", "wait_timeout", "stall"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("lost", "acknowledged", "stall")
        else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in ONCE
    ],
)
def test_one_fault_at_every_call(tmp_path: Path, qdrant_server: Any, kind: str) -> None:
    """Whichever call goes wrong, each step is done or not, and the same again completes it."""
    is_grpc = ONCE.index(kind) % 2 == 0  # the tests of the adapter try each kind over both
    params = {"prefer_grpc": is_grpc, "grpc_port": qdrant_server.grpc_port}
    with store_on(tmp_path / "home", qdrant_server.url, **params) as reader:
        for version in itertools.count(2):
            first = version - 1
            fault = qdrant_server.faults.add(kind, first=first, seconds=30 * (kind == "stall"))
            check_change(reader, qdrant_server, version)
            if fault.seen < first:
                break
    assert first > (3 if kind in ("acknowledged", "wait_timeout") else 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["lost", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("refuse", "acknowledged"))],
)
def test_down_from_any_call_on(tmp_path: Path, qdrant_server: Any, kind: str) -> None:
    """A command on a server that does not come back says that the store is unavailable; the rest as above."""
    with store_on(tmp_path / "home", qdrant_server.url, grpc_port=qdrant_server.grpc_port) as reader:
        for version in itertools.count(2):
            first = version - 1
            fault = qdrant_server.faults.add(kind, first=first, times=2**62)
            problem = check_change(reader, qdrant_server, version)
            if fault.seen < first:
                break
            assert isinstance(problem, StoreUnavailableError), problem
            assert "unavailable" in str(problem)


@pytest.mark.slow
def test_done_late(tmp_path: Path, qdrant_server: Any) -> None:
    """A change that the server took and does later leaves nothing that should not be there."""
    with store_on(tmp_path / "home", qdrant_server.url, grpc_port=qdrant_server.grpc_port) as reader:
        for version in range(2, 6):
            qdrant_server.faults.add("acknowledged", first=version - 1, seconds=0.05)
            check_change(reader, qdrant_server, version)


@contextmanager
def server_process(
    folder: Path, ports: list[str] | None = None
) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """A server that dies by SIGKILL at the end of the block at the latest, and its ports."""
    named = ["--port", ports[0], "--grpc-port", ports[1]] if ports else []
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()
        process.kill()


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle(tmp_path: Path, patience: SimpleNamespace) -> None:
    """What was acknowledged is whole after its restart; what was not is added by the same again."""
    home, version = tmp_path / "home", 2
    with server_process(tmp_path / "qdrant") as (process, ports):
        url = f"http://127.0.0.1:{ports[0]}"
        with store_on(home, url, grpc_port=int(ports[1])) as reader:
            document, (tokens, keys) = ("a", "1"), tokens_and_keys(("a", "1"), version)
            new = NewDocument(document[1], document[0], f"{version:064d}", tokens)
            half = np.arange(len(tokens)) < 10
            with (
                pytest.raises(StoreUnavailableError, match="unavailable"),
                KNNStore.open(home, "a") as store,
                store.ingest([new]) as group,
            ):
                for chosen in (half, ~half):
                    at = np.flatnonzero(chosen)
                    group.add(np.zeros_like(at), at, tokens[at].astype(np.int64), keys[at])
                    process.kill()
                    process.wait()
                    patience.is_in_vain = lambda: True
            with pytest.raises(StoreUnavailableError, match="unavailable"):
                reader.search(keys, 3)
    with pytest.raises(StoreUnavailableError, match="unavailable"):
        KNNStore.open(home)
    patience.is_in_vain = lambda: False
    with server_process(tmp_path / "qdrant", ports), KNNStore.open(home) as reader:
        assert contents(reader) == steps(version)[0]
        with KNNStore.open(home, "a") as store:
            put(store, {document: version})
            assert store.verify() == []
        assert contents(reader) == steps(version)[0] | {document: version}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gone", "emptied"])
def test_a_server_that_lost_its_data(tmp_path: Path, qdrant_server: Any, kind: str) -> None:
    """It is never mistaken for a store in which nothing is near, nor made anew without a word."""
    with store_on(tmp_path / "home", qdrant_server.url, grpc_port=qdrant_server.grpc_port) as reader:
        _, keys = tokens_and_keys(("a", "1"), 1)
        qdrant_server.faults.add(kind)
        for _ in range(2):
            with pytest.raises(DatastoreError):
                reader.search(keys, 3)
        if kind == "gone":
            with pytest.raises(DatastoreNotFoundError):
                KNNStore.open(tmp_path / "home", "a")
            return
        documents = reader.documents()
        assert len([problem for problem in reader.verify() if "has lost or wrong records" in problem]) == 3
        with KNNStore.open(tmp_path / "home", "a") as store:
            for document in documents:
                store.remove_document(document.id, domain=document.domain)
            put(store, steps(2)[0])
            assert store.verify() == []
        assert contents(reader) == steps(2)[0]
