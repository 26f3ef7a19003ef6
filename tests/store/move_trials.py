"""Kills a move of the keys at every step, and checks that it can be finished, given up or redirected.

A script of its own, in the manner of `crash_trials`: prints a report as JSON.

    python move_trials.py FOLDER ENGINE [PREFIX]      only at failpoints whose names begin so
"""

import itertools
import json
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from crash_trials import BEFORE, DIM, Operation, child, contents, in_writer, out_of_space, prepare, warm_up

from knnstore import failpoints
from knnstore.datastore import registry
from knnstore.errors import DatastoreNotFoundError
from knnstore.store import KNNStore
from knnstore.store.relocation import copying as transfer

Ending = Callable[[Path], None]
"""What a user does about a move that was interrupted."""

TARGET, OTHER = "elsewhere", "third"
ENGINE = sys.argv[2]
PREFIX = "".join(sys.argv[3:])
KEPT = {"knnstore.json", "catalog.db", "writer.lock", "writer.json", "reserve"}

transfer.SECONDS_AT_RISK = 0.0  # each batch is made durable
transfer.BATCH_SIZE = 32


def move(store: KNNStore) -> None:
    if store.engine.location != TARGET:
        store.move(ENGINE, TARGET)


def sound(home: Path, at: set[str], mode: Literal["r", "a"] = "a") -> None:
    """Everything is there, at one of some places, and nothing is wrong with it."""
    with KNNStore.open(home, mode) as store:
        assert contents(store) == BEFORE, f"holds {contents(store)}"
        assert store.engine.location in at, f"is at {store.engine.location}"
        assert store.verify() == [], store.verify()


def settled(home: Path, ending: Ending, arm: str | None = None) -> None:
    """A reader finds the store as it was; then the user acts, and may be interrupted again."""
    sound(home, {"keys", TARGET, OTHER}, "r")
    failpoints.arm(arm)
    ending(home)


def only(home: Path, location: str) -> None:
    """One datastore and no other file is left."""
    there = {path.name for path in home.iterdir()} - {"catalog.db-wal", "catalog.db-shm"}
    assert there == KEPT | {location}, f"left: {there}"
    if not (home / location / "manifest.json").exists():  # an engine that keeps no segments
        return
    manifest = (home / location / "manifest.json").read_text()
    files = {path.name for path in (home / location).rglob("*") if path.is_file()}
    orphans = {name for name in files if name not in manifest} - {"manifest.json", "owner", *KEPT}
    assert not orphans, f"files of no segment: {orphans}"


def durable(home: Path) -> int:
    """How many records the target holds."""
    try:
        with registry.load_adapter(ENGINE).open(home / TARGET, dim=DIM, mode="r") as target:
            return target.count()
    except DatastoreNotFoundError:
        return 0


def finish(home: Path) -> None:
    """The same move again copies what was not durable, and nothing else."""
    with KNNStore.open(home, "a") as store:
        if store.engine.location != TARGET:
            held = durable(home)
            moved = store.move(ENGINE, TARGET)
            assert moved.copied == moved.records - held, f"copied {moved.copied}, {held} were there"
    sound(home, {TARGET})
    only(home, TARGET)


def give_up(home: Path) -> None:
    with KNNStore.open(home, "a") as store:
        store.abandon_move()
        location = store.engine.location
    sound(home, {"keys", TARGET})
    only(home, location)


def redirect(home: Path) -> None:
    """Another move does not mind the unfinished one."""
    with KNNStore.open(home, "a") as store:
        if store.engine.location != OTHER:  # else it was killed after its switch
            store.move("faiss", OTHER)
    sound(home, {OTHER})
    only(home, OTHER)


def passages(template: Path, home: Path) -> list[str]:
    """The failpoints that a move passes, as ``name:passage``: of each the first, the middle and the last."""
    shutil.copytree(template, home)
    log = home.with_suffix(".log")

    def run() -> None:
        with KNNStore.open(home, "a") as store:
            names = failpoints.record()
            move(store)
            log.write_text(json.dumps(names))

    assert child(run) == 0, "the move fails by itself"
    names = json.loads(log.read_text())
    shutil.rmtree(home)
    counts = {name: names.count(name) for name in names}
    return [
        f"{name}:{at}"
        for name, n in counts.items()
        if name.startswith(PREFIX)
        for at in sorted({1, (n + 1) // 2, n})
    ]


def main(folder: Path) -> None:
    template, home = folder / "template", folder / "trial"
    optimize = Operation(KNNStore.optimize, lambda before: before)
    assert child(partial(prepare, template, optimize)) == 0
    warm_up(folder / "warm", optimize)
    trials: list[str] = []
    killed: list[str] = []
    recoveries_killed = 0
    problems: list[str] = []

    def expect(work: Callable[[], object], allowed: set[int], what: str) -> int:
        status = child(work)
        if status not in allowed:
            problems.append(f"{trials[-1]}: {what} gave {status}")
        return status

    def trial(how: str, interrupted: Callable[[], None], statuses: set[int], ending: Ending) -> None:
        nonlocal recoveries_killed
        trials.append(f"{how}, then {ending.__name__}")
        shutil.copytree(template, home)
        expect(interrupted, statuses, "the move")
        if (place := next(again)) is not None:
            again_killed = partial(settled, home, ending, place)
            status = expect(again_killed, {-signal.SIGKILL, 0}, f"{ending.__name__}, killed")
            recoveries_killed += status == -signal.SIGKILL
        expect(partial(settled, home, ending), {0}, ending.__name__)
        shutil.rmtree(home)

    again = itertools.cycle([None, "move.erased", "segments.file.unlink:2", "move.copied"])
    endings = itertools.cycle([finish, give_up, finish, redirect, finish])
    for place in passages(template, folder / "rehearsal"):
        killed.append(place)
        trial(f"killed at {place}", in_writer(home, move, arm=place), {-signal.SIGKILL}, next(endings))
    for size in () if PREFIX else (0, 100, 400, 1000, 4096, 30_000):
        full = out_of_space(size)
        trial(full.how, full.work(home, Operation(move, lambda before: before)), full.statuses, finish)
    report = {"trials": trials, "killed": killed, "recoveries_killed": recoveries_killed}
    print(json.dumps(report | {"problems": problems}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
