"""Kills a writer at every step of an operation, or lets its disk run full, and its recovery too.

A script of its own, because it forks: each trial is a child process that dies by SIGKILL, and
each check is another one that opens the store anew. Prints a report as JSON.

    python crash_trials.py FOLDER kill|disk-full OPERATION
"""

import itertools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from knnstore import failpoints
from knnstore.catalog import Identity, NewDocument
from knnstore.datastore.records import tokens_of
from knnstore.errors import KnnstoreError
from knnstore.store import KNNStore

DIM = 8
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)

Contents = dict[tuple[str, str], int]
"""What a store holds: the version of each (domain, id)."""


def tokens_for(domain: str, id: str, version: int) -> np.ndarray:
    rng = np.random.default_rng([crc32(f"{domain}/{id}".encode()), version])
    return rng.integers(0, 1000, 20 + version).astype(np.uint32)


def keys_for(domain: str, id: str, version: int) -> np.ndarray:
    rng = np.random.default_rng([crc32(f"{domain}/{id}".encode()), version, 1])
    return rng.standard_normal((20 + version, DIM)).astype(np.float16).astype(np.float32)


def add(store: KNNStore, *documents: tuple[str, str, int]) -> None:
    new = [
        NewDocument(id, domain, f"{version:064d}", tokens_for(domain, id, version))
        for domain, id, version in documents
    ]
    with store.ingest(new) as group:
        for at, (domain, id, version) in enumerate(documents):
            n = 20 + version
            group.add(
                np.full(n, at), np.arange(n), new[at].tokens.astype(np.int64), keys_for(domain, id, version)
            )


class Operation(NamedTuple):
    """One thing to interrupt: what it does, and what the store holds when it is done."""

    run: Callable[[KNNStore], object]
    result: Callable[[Contents], Contents]


BEFORE: Contents = {("a", "1"): 1, ("a", "2"): 1, ("b", "1"): 1, ("b", "3"): 1}


def _remove_document(store: KNNStore) -> None:
    if any(document.id == "2" for document in store.documents(domain="a")):
        store.remove_document("2", domain="a")


def _remove_domain(store: KNNStore) -> None:
    if any(domain.name == "b" for domain in store.domains()):
        store.remove_domain("b")


OPERATIONS = {
    "ingest": Operation(
        lambda store: add(store, ("a", "4", 1), ("c", "5", 1)),
        lambda before: before | {("a", "4"): 1, ("c", "5"): 1},
    ),
    "replace": Operation(
        lambda store: add(store, ("a", "1", 2), ("b", "1", 2)),
        lambda before: before | {("a", "1"): 2, ("b", "1"): 2},
    ),
    "remove-document": Operation(
        _remove_document, lambda before: {key: v for key, v in before.items() if key != ("a", "2")}
    ),
    "remove-domain": Operation(
        _remove_domain, lambda before: {key: v for key, v in before.items() if key[0] != "b"}
    ),
    "compact": Operation(lambda store: store.optimize(), lambda before: before),
}


def contents(store: KNNStore) -> Contents:
    """Read what is live, checking that every document is whole and nothing else is found."""
    live: Contents = {}
    records = 0
    for document in store.documents():
        version = int(document.content_hash)
        live[document.domain, document.id] = version
        keys, tokens = (
            keys_for(document.domain, document.id, version),
            tokens_for(document.domain, document.id, version),
        )
        found = store.search(keys, 1)
        assert np.array_equal(tokens_of(found.ids[:, 0]), tokens), f"{document.id} is not whole"
        assert (found.distances[:, 0] == 0).all(), f"{document.id} has other keys"
        sources = store.provenance(found.ids[:, 0])
        assert all(s and (s.document, s.domain) == (document.id, document.domain) for s in sources), (
            "wrong source"
        )
        records += len(tokens)
    everything = store.search(np.zeros((1, DIM), np.float32), 1000).ids[0]
    assert (everything >= 0).sum() == records, f"{(everything >= 0).sum()} records found, {records} live"
    return live


def leaked(home: Path) -> set[str]:
    """Files of the datastore that its manifest does not name."""
    manifest = (home / "keys" / "manifest.json").read_text()
    files = {path.name for path in (home / "keys").rglob("*") if path.is_file()}
    known = {"manifest.json", "owner", "writer.lock", "writer.json"}
    return {name for name in files if name not in manifest} - known


def child(work: Callable[[], object]) -> int:
    """Run work in a forked process; returns its exit status, negative when a signal ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_writer(
    home: Path, work: Callable[[KNNStore], object], *, arm: str | None = None
) -> Callable[[], None]:
    def run() -> None:
        failpoints.arm(arm)
        with KNNStore.open(home, "a") as store:
            work(store)

    return run


def prepare(home: Path) -> None:
    with KNNStore.create(home, IDENTITY) as store:
        for (domain, id), version in BEFORE.items():
            add(store, (domain, id, version))
        add(store, ("gone", "x", 1), ("a", "1", 0))  # leaves tombstones behind
        add(store, ("a", "1", 1))
        store.remove_domain("gone")


def passages(template: Path, home: Path, operation: Operation) -> list[str]:
    """The failpoints that an operation passes, as ``name:passage``."""
    shutil.copytree(template, home)
    log = home.with_suffix(".log")

    def run() -> None:
        with KNNStore.open(home, "a") as store:
            names = failpoints.record()
            operation.run(store)
            log.write_text(json.dumps(names))

    assert child(run) == 0, "the operation fails by itself"
    counted: dict[str, int] = {}
    listed = []
    for name in json.loads(log.read_text()):
        counted[name] = counted.get(name, 0) + 1
        listed.append(f"{name}:{counted[name]}")
    shutil.rmtree(home)
    return listed


class Interrupted(NamedTuple):
    """A way to interrupt an operation."""

    how: str
    work: Callable[[Path, Operation], Callable[[], None]]
    statuses: set[int]
    """How the child may end."""


def killed_at(place: str) -> Interrupted:
    return Interrupted(
        f"killed at {place}",
        lambda home, operation: in_writer(home, operation.run, arm=place),
        {-signal.SIGKILL},
    )


def out_of_space(size: int) -> Interrupted:
    """No file may grow beyond so many bytes, as on a full disk: an error, but never a signal."""

    def work(home: Path, operation: Operation) -> Callable[[], None]:
        def run() -> None:
            with KNNStore.open(home, "a") as store:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                try:
                    operation.run(store)
                except (OSError, KnnstoreError):
                    os._exit(1)

        return run

    return Interrupted(f"files limited to {size} bytes", work, {0, 1})


def trial(
    template: Path, home: Path, operation: Operation, interrupted: Interrupted, second: str | None
) -> list[str]:
    """Interrupt the operation, kill recovery at `second`, and check what is there after each."""
    shutil.copytree(template, home)
    after = operation.result(BEFORE)
    problems: list[str] = []

    def recover() -> None:
        for mode in ("r", "a"):  # a reader does not recover, and sees nothing half done all the same
            with KNNStore.open(home, mode) as store:
                assert contents(store) in (BEFORE, after), f"holds {contents(store)}"
                assert mode == "r" or store.verify() == [], store.verify()

    def try_again() -> None:
        with KNNStore.open(home, "a") as store:
            operation.run(store)
        with KNNStore.open(home) as store:
            assert contents(store) == after, f"holds {contents(store)}"
            assert store.verify() == [], store.verify()

    def expect(work: Callable[[], object], allowed: set[int], what: str) -> None:
        status = child(work)
        if status not in allowed:
            problems.append(f"{interrupted.how}, recovery killed at {second}: {what} gave {status}")

    expect(interrupted.work(home, operation), interrupted.statuses, "the operation")
    if second is not None:
        expect(in_writer(home, lambda _: None, arm=second), {0, -signal.SIGKILL}, "killed recovery")
    expect(recover, {0}, "recovery")
    expect(try_again, {0}, "the second try")
    if leaked(home):
        problems.append(f"{interrupted.how}: files are left: {leaked(home)}")
    shutil.rmtree(home)
    return problems


def main(folder: Path, how: str, operation: Operation) -> None:
    template = folder / "template"
    assert child(lambda: prepare(template)) == 0
    KNNStore.open(template).close()  # imports and compiles statements once, here, and not in every child
    recovery = [
        "purge.before",
        "purge.deleted",
        "purge.flushed",
        "catalog.forget.before",
        "catalog.forget.inside",
    ]
    seconds = itertools.cycle([None, *recovery])
    if how == "kill":
        interruptions = [killed_at(place) for place in passages(template, folder / "rehearsal", operation)]
    else:
        interruptions = [
            out_of_space(size) for size in (0, 100, 400, 700, 1000, 2000, 4096, 8192, 30_000, 80_000)
        ]
    problems = []
    for interrupted in interruptions:
        problems += trial(template, folder / "trial", operation, interrupted, next(seconds))
    print(json.dumps({"trials": [interrupted.how for interrupted in interruptions], "problems": problems}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], OPERATIONS[sys.argv[3]])
