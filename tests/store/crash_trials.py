"""Kills a writer at every step of an operation, or lets its disk run full, and its recovery too.

A script of its own, because it forks: each trial is a child process that dies by SIGKILL, and
each check is another one that opens the store anew. Prints a report as JSON.

    python crash_trials.py FOLDER kill|disk-full OPERATION ENGINE
"""

import functools
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from knnstore import failpoints
from knnstore.catalog import Identity, NewDocument
from knnstore.datastore import registry
from knnstore.datastore.records import tokens_from_ids
from knnstore.errors import KnnstoreError
from knnstore.store import KNNStore

DIM = 8
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)

ENGINES: dict[str, tuple[str, dict[str, object]]] = {
    "exact": ("faiss", {}),
    "lists": ("faiss", {"index": "IVF2,SQ8", "nprobe": 2}),
    "graphs": ("hnswlib", {"exact_up_to": 0}),
    "coded": ("cells", {"cells": 2, "codes": "int8", "coded_from": 8}),
}
"""Adapters with parameters by which a few records have an index; only "exact" is killed at every passage."""

NEAR = 0.01
"""Squared: no code is further from its key, and no other key as near."""

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
    prepare: Callable[[KNNStore], object] = lambda _: None
    """Prepares the store before the operation."""


BEFORE: Contents = {("a", "1"): 1, ("a", "2"): 1, ("b", "1"): 1, ("b", "3"): 1}


def _remove_document(store: KNNStore) -> None:
    if any(document.id == "2" for document in store.documents(domain="a")):
        store.remove_document("2", domain="a")


def _remove_domain(store: KNNStore) -> None:
    if any(domain.name == "b" for domain in store.domains()):
        store.remove_domain("b")


PLANNED: Contents = {("a", "1"): 2, ("a", "4"): 1, ("a", "5"): 1}
"""Documents of the plan in the store's folder, each in a shard of its own."""


def plan_and_encode(store: KNNStore) -> None:
    """Make a plan in the store's folder, and write the keys of its shards."""
    from knnstore.distributed.plan_folder import Plan, PlanFolder, PlannedDocument, ShardWriter  # slow

    folder, versions = (
        PlanFolder(store.home.path / "plan"),
        store.stored_versions("a", [id for _, id in PLANNED]),
    )
    with ShardWriter(folder, store.id, 0) as writer:
        for (domain, id), version in PLANNED.items():
            document = NewDocument(id, domain, f"{version:064d}", tokens_for(domain, id, version))
            replaced = versions.get(id)
            writer.write_shard([PlannedDocument(document, replaced and replaced.start)])
        lease = store.lease("0" * 32, sum(shard.tokens for shard in writer.shards), folder.path)
        plan = Plan(
            id=lease.id, store=store.id, domain="a", identity=store.identity, dtype="float32", prefix=(0,),
            batch_tokens=100, added=2, replaced=1, content=writer.content, start=lease.start, target=None,
            shards=tuple(writer.shards),
        )  # fmt: skip
        writer.finish(plan, None)
    for shard, (place, version) in zip(plan.shards, PLANNED.items(), strict=True):
        folder.write_keys(shard, keys_for(*place, version))


def _commit(store: KNNStore) -> None:
    from knnstore.distributed import PlanFolder, commit_plan

    commit_plan(store, PlanFolder(store.home.path / "plan"))


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
    "commit": Operation(_commit, lambda before: before | PLANNED, plan_and_encode),
    "compact": Operation(lambda store: store.optimize(), lambda before: before),
    "erase": Operation(lambda store: store.erase(), lambda before: before),
}


def contents(store: KNNStore) -> Contents:
    """Read what is live, checking that every document is whole and nothing else is found."""
    live = {(document.domain, document.id): int(document.content_hash) for document in store.documents()}
    parts = [(keys_for(*place, version), tokens_for(*place, version)) for place, version in live.items()]
    tokens = np.concatenate([part for _, part in parts]) if parts else np.zeros(0, np.uint32)
    if parts:
        owners = np.repeat(np.arange(len(live)), [len(part) for _, part in parts])
        found = store.search(np.concatenate([keys for keys, _ in parts]), 1)
        wrong = (tokens_from_ids(found.ids[:, 0]) != tokens) | (found.distances[:, 0] > NEAR)
        assert not wrong.any(), f"not whole: {[list(live)[at] for at in np.unique(owners[wrong])]}"
        places = [source and (source.domain, source.document) for source in store.provenance(found.ids[:, 0])]
        assert places == [list(live)[at] for at in owners], "wrong source"
    everything = store.search(np.zeros((1, DIM), np.float32), len(tokens) + 100).ids[0]
    assert (everything >= 0).sum() == len(tokens), (
        f"{(everything >= 0).sum()} records found, {len(tokens)} live"
    )
    return live


def leaked(home: Path) -> set[str]:
    """Files of the datastore that its manifest does not name, if it has one."""
    if not (home / "keys" / "manifest.json").exists():
        return set()
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


def warm_up(home: Path, operation: Operation) -> None:
    """Import and compile once, here, and not in every child; by an engine that starts no threads."""
    registry.load_adapter = functools.cache(registry.load_adapter)  # which reads the metadata of all packages
    prepare(home, operation)
    with KNNStore.open(home, "a") as store:
        contents(store)
        operation.run(store)
        store.verify()
    shutil.rmtree(home)
    gc.freeze()


def in_writer(
    home: Path, work: Callable[[KNNStore], object], *, arm: str | None = None
) -> Callable[[], None]:
    def run() -> None:
        failpoints.arm(arm)
        with KNNStore.open(home, "a") as store:
            work(store)

    return run


def prepare(home: Path, operation: Operation, engine: str = "exact") -> None:
    adapter, params = ENGINES[engine]
    with KNNStore.create(home, IDENTITY, store=adapter, params=params) as store:
        for (domain, id), version in BEFORE.items():
            add(store, (domain, id, version))
        add(store, ("gone", "x", 1), ("a", "1", 0))  # leaves tombstones behind
        add(store, ("a", "1", 1))
        store.remove_domain("gone")
        operation.prepare(store)


def places(template: Path, home: Path, operation: Operation) -> dict[str, int]:
    """The failpoints that an operation passes, and how often."""
    shutil.copytree(template, home)
    log = home.with_suffix(".log")

    def run() -> None:
        with KNNStore.open(home, "a") as store:
            names = failpoints.record()
            operation.run(store)
            log.write_text(json.dumps(Counter(names)))

    assert child(run) == 0, "the operation fails by itself"
    shutil.rmtree(home)
    return dict(json.loads(log.read_text()))


class Interrupted(NamedTuple):
    """A way to interrupt an operation."""

    how: str
    work: Callable[[Path, Operation], Callable[[], None]]
    statuses: set[int]
    """How the child may end."""
    place: str = ""
    """The passage of a failpoint where it is killed, if it is."""


def killed_at(place: str) -> Interrupted:
    return Interrupted(
        f"killed at {place}",
        lambda home, operation: in_writer(home, operation.run, arm=place),
        {-signal.SIGKILL},
        place,
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


class Trials:
    """Interrupts an operation, again and again, in a copy of one store; what is public is reported."""

    def __init__(self, template: Path, home: Path, operation: Operation) -> None:
        self.trials: list[str] = []
        self.killed: list[str] = []
        self.problems: list[str] = []
        self.recoveries_killed = 0
        self._template, self._home, self._operation = template, home, operation
        self._after = operation.result(BEFORE)

    def interrupt(self, interrupted: Interrupted, second: int) -> None:
        """Interrupt the operation, kill recovery at its n-th failpoint (0: never), and read what is left."""
        shutil.copytree(self._template, self._home)
        self.trials.append(interrupted.how)
        self._expect(interrupted.work(self._home, self._operation), interrupted.statuses, "the operation")
        self.killed += [interrupted.place] if interrupted.place else []
        if second:
            recovery = in_writer(self._home, lambda _: None, arm=f":{second}")
            status = self._expect(recovery, {0, -signal.SIGKILL}, f"recovery, killed at its point {second},")
            self.recoveries_killed += status == -signal.SIGKILL
        self._expect(self._recover, {0}, f"recovery, after one that was killed at its point {second},")
        if leaked(self._home):
            self.problems.append(f"{interrupted.how}: files are left: {leaked(self._home)}")
        shutil.rmtree(self._home)

    def _recover(self) -> None:
        for mode in ("r", "a"):  # a reader does not recover, and sees nothing half done all the same
            with KNNStore.open(self._home, mode) as store:
                assert contents(store) in (BEFORE, self._after), f"holds {contents(store)}"
                if mode == "a":
                    assert store.verify() == [], store.verify()
                    self._operation.run(store)
        with KNNStore.open(self._home) as store:
            assert contents(store) == self._after, f"in the end holds {contents(store)}"
            assert store.verify() == [], store.verify()

    def _expect(self, work: Callable[[], object], allowed: set[int], what: str) -> int:
        status = child(work)
        if status not in allowed:
            self.problems.append(f"{self.trials[-1]}: {what} gave {status}")
        return status


def main(folder: Path, how: str, operation: Operation, engine: str) -> None:
    template = folder / "template"
    assert child(functools.partial(prepare, template, operation, engine)) == 0
    warm_up(folder / "warm", operation)
    trials = Trials(template, folder / "trial", operation)
    if how == "disk-full":
        for size in (0, 100, 400, 700, 1000, 2000, 4096, 8192, 30_000, 80_000):
            trials.interrupt(out_of_space(size), 0)
    else:
        seconds = itertools.cycle(range(9))
        for name, passages in places(template, folder / "rehearsal", operation).items():
            for passage in range(1, passages + 1) if engine == "exact" else sorted({1, passages}):
                trials.interrupt(killed_at(f"{name}:{passage}"), next(seconds))
    print(json.dumps({name: found for name, found in vars(trials).items() if name[0] != "_"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], OPERATIONS[sys.argv[3]], sys.argv[4])
