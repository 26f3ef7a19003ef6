"""The history of a store in which `power_trials` lets the power fail, and what the store holds at each step.

python power_history.py FOLDER      lives through it, recorded by `disk_recorder.c`
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crash_trials import IDENTITY, Contents, add
from disk_images import mark

from knnstore.store import KNNStore, SavedSettings


class State(NamedTuple):
    """What a store holds, and where its keys are."""

    contents: Contents
    location: str = "keys"


class Step(NamedTuple):
    """An operation, and what the store holds once it is acknowledged. It may be run again."""

    name: str
    run: Callable[[KNNStore], object]
    result: Callable[[State], State]


def adding(name: str, *documents: tuple[str, str, int]) -> Step:
    new = {(domain, id): version for domain, id, version in documents}
    return Step(name, lambda store: add(store, *documents), lambda s: s._replace(contents=s.contents | new))


def removing(domain: str, id: str | None = None) -> Step:
    def gone(key: tuple[str, str]) -> bool:
        return key[0] == domain and id in (None, key[1])

    def run(store: KNNStore) -> None:
        if any(gone((document.domain, document.id)) for document in store.documents()):
            store.remove_domain(domain) if id is None else store.remove_document(id, domain=domain)

    def result(s: State) -> State:
        return s._replace(contents={key: v for key, v in s.contents.items() if not gone(key)})

    return Step("remove", run, result)


def moving(adapter: str, location: str, **params: object) -> Step:
    def run(store: KNNStore) -> None:
        if store.engine.location != location:
            store.move(adapter, location, params=params)

    return Step("move", run, lambda s: s._replace(location=location))


def leaving(name: str, run: Callable[[KNNStore], object]) -> Step:
    return Step(name, run, lambda s: s)


def _fit(store: KNNStore, value: float) -> None:
    name = store.save_weights({"w": np.full(3000, value)}, {})
    store.save_settings(SavedSettings({"mixer": {"weights": name}}))


HISTORY = [
    leaving("create", lambda store: None),
    adding("add", ("a", "1", 1), ("a", "2", 1), ("b", "1", 1)),
    adding("add", ("b", "3", 1), ("c", "5", 1)),
    leaving("fit", partial(_fit, value=1)),
    adding("replace", ("a", "1", 2), ("b", "1", 2)),
    leaving("optimize", KNNStore.optimize),
    removing("a", "2"),
    leaving("reopen", lambda store: None),
    removing("b"),
    leaving("erase", KNNStore.erase),
    adding("replace", ("c", "5", 2), ("b", "4", 1)),
    leaving("fit", partial(_fit, value=2)),
    moving("faiss", "lists", index="IVF2,SQ8", nprobe=2),
    adding("add", ("d", "6", 1), ("a", "2", 3)),
    leaving("optimize", KNNStore.optimize),
    removing("c", "5"),
    adding("replace", ("a", "1", 3)),
    leaving("reopen", lambda store: None),
    moving("hnswlib", "graphs", exact_up_to=0),
    adding("add", ("d", "7", 1)),
    adding("replace", ("d", "6", 2)),
    leaving("optimize", KNNStore.optimize),
    removing("a"),
    leaving("erase", KNNStore.erase),
    moving("cells", "coded", cells=2, codes="int8", coded_from=8),
    removing("d", "7"),
    adding("add", ("e", "8", 1)),
    leaving("optimize", KNNStore.optimize),
]


def live_through(home: Path) -> None:
    """Run the history, marking what is acknowledged."""
    store = KNNStore.create(home, IDENTITY)
    for step in HISTORY:
        if step.name == "reopen":
            store.close()
            store = KNNStore.open(home, "a")
        step.run(store)
        mark("acknowledged")
    store.close()


STATES: list[State | None] = [None]
"""What the store holds before each step, and at last."""
for _step in HISTORY:
    STATES.append(_step.result(STATES[-1] or State({})))


if __name__ == "__main__":
    live_through(Path(sys.argv[1]) / "home")
