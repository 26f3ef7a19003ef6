"""Lets the power fail in the middle of a store's history, and reads what the disk may then hold.

The history runs once, in a process of its own, under `disk_recorder.c`, and marks each operation that was
acknowledged. From the record `disk_images` makes images. Each is opened as a store: it must hold exactly
what was acknowledged, and of the operation that was under way all or nothing; in every other image that is
run again and must go through. After erasing, no image may have a byte of what was removed. Prints a report
as JSON.

    python power_trials.py FOLDER IMAGES [-]MUTANTS

A mutant is a record in which some syncs are left out; of so many images those are reported that the same
checks then find wrong, or with a minus the first of them.
"""

import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import power_history
from crash_trials import IDENTITY, contents, keys_for, tokens_for
from disk_images import Disk, Event, Image, Recorder, Share, read, write
from power_history import HISTORY, STATES, State

from knnstore.datastore import registry
from knnstore.errors import StoreNotFoundError
from knnstore.store import KNNStore


class Outcome(NamedTuple):
    """An image, and the step that was under way."""

    step: int
    how: str
    image: Image

    @property
    def during(self) -> str:
        """The name of the step."""
        return HISTORY[self.step].name if self.step < len(HISTORY) else "close"


class Loss(NamedTuple):
    """A kind of disk, and what it loses of the changes of names and of files that were not synced."""

    disk: str
    names: Share
    data: Share

    def __str__(self) -> str:
        return f"{self.disk} disk, {self.names} of the names and {self.data} of the data lost"


LOSSES = [
    Loss("strict", "all", "all"),
    Loss("ordered", "all", "all"),
    Loss("strict", "none", "all"),
    Loss("strict", "some", "some"),
    Loss("ordered", "some", "some"),
    Loss("strict", "some", "all"),
    Loss("ordered", "some", "none"),
    Loss("strict", "some", "none"),
    Loss("ordered", "none", "some"),
]


def outcomes(events: list[Event], count: int, seed: int = 1) -> Iterator[Outcome]:
    """So many images at most, all different, evenly over the steps; first of all at each acknowledgment."""
    chance = random.Random(seed)
    ends = [at for at, event in enumerate(events) if event.kind == "!"]
    spans = list(zip([0, *(end + 1 for end in ends)], [*ends, len(events)], strict=True))
    steps = set(range(len(spans)))
    seen: set[bytes] = set()
    first = True
    while steps and len(seen) < count:
        share = -(-(count - len(seen)) // len(steps))
        asked: dict[int, list[tuple[int, Loss]]] = {}
        for step in sorted(steps):
            start, end = spans[step]
            sure = [(start, loss) for loss in LOSSES[:3]] if first else []
            drawn = [(chance.randint(start, end), chance.choice(LOSSES)) for _ in range(share)]
            for at, loss in [*sure, *drawn][:share]:
                asked.setdefault(at, []).append((step, loss))
        first, steps = False, set()
        for at, disks in replayed(events):
            for step, loss in asked.get(at, ()):
                image = disks[loss.disk].after_loss(loss.names, loss.data, chance)
                digest = digest_of(image)
                if digest not in seen and len(seen) < count:
                    seen.add(digest)
                    steps.add(step)  # which has more than were seen
                    yield Outcome(step, f"{loss} before event {at}", image)


def digest_of(image: Image) -> bytes:
    """What tells images apart, but for what SQLite makes anew after a crash."""
    hashed = hashlib.sha256()
    for path, content in image.items():
        if not path.endswith("-shm"):
            hashed.update(f"{path} {-1 if content is None else len(content)}\n".encode() + (content or b""))
    return hashed.digest()


def replayed(events: list[Event]) -> Iterator[tuple[int, dict[str, Disk]]]:
    """Both kinds of disk before each event, and after the last one."""
    disks = {"strict": Disk("strict"), "ordered": Disk("ordered")}
    for at, event in enumerate(events):
        yield at, disks
        for disk in disks.values():
            disk.replay(event)
    yield len(events), disks


def found_in(store: KNNStore) -> State:
    return State(contents(store), store.engine.location)


def unerased(outcome: Outcome) -> set[tuple[str, str, int]]:
    """The documents of which an image has a token or a key although they were erased."""
    erased = max((n for n in range(outcome.step) if HISTORY[n].name == "erase"), default=None)
    if erased is None:
        return set()
    before, since = (
        {(*place, version) for s in states if s for place, version in s.contents.items()}
        for states in (STATES[: erased + 1], STATES[erased + 1 : outcome.step + 2])
    )
    content = b"".join(part or b"" for path, part in outcome.image.items() if not path.endswith("-shm"))
    return {document for document in before - since if any(part in content for part in traces_of(*document))}


@functools.cache
def traces_of(domain: str, id: str, version: int) -> list[bytes]:
    """Some tokens and keys of a document, as files have them."""
    keys, tokens = keys_for(domain, id, version), tokens_for(domain, id, version)
    rows = [row.tobytes() for key in keys[::9] for row in (key, key.astype(np.float16))]
    return [*rows, tokens[:4].tobytes(), tokens[-4:].tobytes()]


def left_over(home: Path, location: str) -> set[str]:
    """Folders and files of keys that nothing names."""
    named = (home / location / "manifest.json").read_text()
    files = {path.name for path in (home / location).rglob("0*") if path.name not in named}
    return files | {path.name for path in home.iterdir() if path.is_dir()} - {location, "weights"}


def find_file_problem(outcome: Outcome, folder: Path, *, again: bool = True) -> str | None:
    """Open an image as a store, and perhaps run again what was under way; says what is wrong."""
    home, step = folder / "home", min(outcome.step, len(HISTORY) - 1)
    allowed = (STATES[outcome.step], STATES[min(outcome.step + 1, len(HISTORY))])
    try:
        assert not unerased(outcome), f"has bytes of {unerased(outcome)}"
        write(outcome.image, folder)
        try:
            with KNNStore.open(home) as store:
                before = found_in(store)
        except StoreNotFoundError:
            before = None
        assert before in allowed, f"holds {before}"
        if before is None:
            KNNStore.create(home, IDENTITY).close()
        with KNNStore.open(home, "a") as store:
            found = found_in(store)
            assert before in (None, found), f"after recovery holds {found}"
            assert store.verify() == [], store.verify()
            if again:
                HISTORY[step].run(store)
                assert found_in(store) == STATES[step + 1], f"in the end holds {found_in(store)}"
            if store.info()["unfinished_move"] is None:
                assert not left_over(home, store.engine.location), left_over(home, store.engine.location)
        return None
    except Exception as error:
        return f"{outcome.during} (step {outcome.step}), {outcome.how}: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _left_out(events: list[Event], mutant: str) -> list[Event]:
    """The record without syncs of our files, of our folders, or of SQLite's log but when it is copied."""
    folders = {event.path for event in events if event.kind == "m"} | {"", "home"}

    def lost(before: Event, event: Event, after: Event) -> bool:
        name = Path(event.path).name
        if event.kind != "s":
            return False
        if event.path in folders:  # SQLite syncs one after its new log
            return mutant == "folders" and not (before.kind == "s" and "catalog.db-" in before.path)
        if name.startswith("catalog.db"):
            copied = after.kind == "w" and after.path.endswith("catalog.db")
            return mutant == "catalog" and name.endswith("-wal") and before.offset > 0 and not copied
        return mutant == "files"

    last = Event("!", "")
    return [
        event
        for before, event, after in zip([last, *events], events, [*events[1:], last], strict=False)
        if not lost(before, event, after)
    ]


def recorded(folder: Path) -> list[Event]:
    """Run the history and return the record, which must give what the process left."""
    root = folder / "disk"
    root.mkdir()
    events = Recorder(folder).run([sys.executable, power_history.__file__, root], root)
    disk = Disk("strict")
    for event in events:
        disk.replay(event)
    recalled, left = (
        {path: content for path, content in image.items() if not path.endswith("-shm")}
        for image in (disk.now(), read(root))
    )
    assert recalled == left, "the record is not whole"
    assert sum(event.kind == "!" for event in events) == len(HISTORY)
    return events


def main(folder: Path, count: int, mutants: int) -> None:
    registry.load_adapter = functools.cache(registry.load_adapter)  # which reads the metadata of all packages
    os.umask(0o077)  # as the home was, so that nobody is warned of each image
    events = recorded(folder)
    images: Counter[str] = Counter()
    problems = []
    for number, outcome in enumerate(outcomes(events, count)):
        images[outcome.during] += 1
        problems += filter(None, [find_file_problem(outcome, folder / "image", again=number % 2 == 0)])
    caught = {}
    for mutant in ("files", "folders", "catalog"):
        tried = outcomes(_left_out(events, mutant), abs(mutants))
        found = (problem for outcome in tried if (problem := find_file_problem(outcome, folder / "image")))
        caught[mutant] = list(itertools.islice(found, 1) if mutants < 0 else found)
    print(json.dumps({"events": len(events), "images": images, "problems": problems, "caught": caught}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
