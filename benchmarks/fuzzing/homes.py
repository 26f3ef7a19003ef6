"""A small home with all that one may have, and what it answers."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from knnstore.catalog import Identity, NewDocument
from knnstore.datastore.embedded import manifest
from knnstore.errors import KnnstoreError
from knnstore.progress import Progress
from knnstore.store import KNNStore, SavedSettings, Selection

DIM, VOCABULARY = 8, 1000
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("faiss", {"index": "exact"}),
    "faiss": ("faiss", {"index": "IVF4,Flat", "nprobe": 4}),
    "hnswlib": ("hnswlib", {"exact_up_to": 1, "ef": 400}),
}
"""By the names that they have here: adapter and parameters."""

IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", VOCABULARY, 16, 8)


class Stop(Progress):
    """Ends a move in the middle."""

    def advance(self, amount: int) -> None:
        raise KeyboardInterrupt


def make(home: Path, engine: str) -> None:
    """Return a small store with every feature, among them a manifest in parts and an interrupted move."""
    rng, (adapter, params) = np.random.default_rng(0), ENGINES[engine]
    manifest.PART_SIZE = 1  # which shows in the files alone
    with KNNStore.create(home, IDENTITY, store=adapter, params=params) as store:
        for domain, sizes in (("law", (120, 90, 90)), ("news", (130, 130))):
            new = [
                NewDocument(
                    f"{domain}-{at}",
                    domain,
                    f"{at:064x}",
                    rng.integers(0, VOCABULARY, size).astype(np.uint32),
                    metadata={"year": at, "names": ["a", "b"]},
                    tags=frozenset({"odd"} if at % 2 else ()),
                )
                for at, size in enumerate(sizes)
            ]
            with store.ingest(new) as group:
                for at, document in enumerate(new):
                    size = len(document.tokens)
                    keys = rng.standard_normal((size, DIM)).astype(np.float16).astype(np.float32)
                    group.add(np.full(size, at), np.arange(size), document.tokens.astype(np.int64), keys)
        store.optimize()  # 256 records of a domain are enough for an index
        store.save_settings(SavedSettings({"k": 4}))
        weights = store.save_weights({"a": np.ones(4, np.float32)}, {"model": "x"})
        store.save_settings(SavedSettings({"mixer": {"name": "gate", "weights": weights}}), ["law"])
        with suppress(KeyboardInterrupt):
            store.move("faiss", "half", progress=Stop())


def look(home: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the answers of a home, errors where it gives none, and the report of `verify`."""
    answers: dict[str, Any] = {}
    queries = np.random.default_rng(1).standard_normal((4, DIM)).astype(np.float32)

    def ask(name: str, question: Callable[[], Any]) -> Any:
        try:
            answers[name] = question()
        except KnnstoreError as error:
            answers[name] = error
        return answers[name]

    store = ask("open", lambda: KNNStore.open(home))
    if isinstance(store, KnnstoreError):
        return answers, [str(store)]
    answers["open"] = None
    with store:
        ask("search", lambda: found(store, queries, Selection()))
        ask("tokens", lambda: {n: store.tokens_by_number(n).tolist() for n in store.lengths()})
        ask("counts", lambda: np.trim_zeros(store.token_counts(), "b").tolist())
        ask("records", lambda: [(r.ids.tolist(), r.keys.tolist()) for r in store.records()])
        for name, question in (
            ("~domains", store.domains),
            ("~documents", store.documents),
            ("~info", store.info),
            ("~settings", lambda: [store.settings(), store.settings(["law"])]),
            ("~law", lambda: found(store, queries, Selection(domains=("law",)))),
            ("~odd", lambda: found(store, queries, Selection(tags=("odd",)))),
            ("~one", lambda: store.tokens("law-1", domain="law").tolist()),
            ("~where", lambda: store.provenance(store.search(queries, 2).ids.ravel())),
        ):
            ask(name, question)
        problems = ask("~verify", store.verify)
    return answers, [str(problems)] if isinstance(problems, KnnstoreError) else problems


def found(store: KNNStore, queries: Any, selection: Selection) -> Any:
    neighbors = store.search(queries, 5, selection)
    return neighbors.ids.tolist(), neighbors.distances.tolist()
