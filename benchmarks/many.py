"""What many domains, documents and tags cost: each figure at n and at 2n, so that linear can be seen.

    python benchmarks/many.py                                5,000 and 10,000 domains, and so on
    python benchmarks/many.py --domains 200 --documents 0    without the documents
    python benchmarks/many.py --engine hnswlib
    python benchmarks/many.py --smoke                        a few seconds

JSON goes to stdout, a Markdown table to stderr. Each domain is added by a commit of its own. The documents
are added in groups, with tags; half of them, and all tags, are selected; everything is verified. Seconds are
those of the processor, of all threads; a ratio is that of 2n to n: 2 is linear, 4 is quadratic. Descriptors
are the most that were open after a step.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import event

from knnstore.catalog import Identity, NewDocument
from knnstore.store import KNNStore, Selection

DIM = 16
K = 64
TOKENS = 20
"""Of a document."""
GROUP = 1000
"""Documents of a commit, where they are many."""
TAGGED = 10
"""Documents of a tag."""
SHARING = 20
"""Documents of a domain, where they are many."""


class Steps:
    """Measures the steps of one size: seconds of the clock and of the processor, statements, descriptors."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self.statements: dict[str, int] = {}
        self.descriptors = 0

    def take(self, name: str, store: KNNStore | None, step: Callable[[], Any]) -> Any:
        executed: list[str] = []
        if store is not None:
            event.listen(store._catalog.sql, "before_cursor_execute", lambda *at: executed.append(at[2]))
        start, processor = time.perf_counter(), time.process_time()
        result = step()
        self.seconds[name] = round(time.perf_counter() - start, 3)
        self.processor[name] = round(time.process_time() - processor, 3)
        self.statements[name] = len(executed)
        self.descriptors = max(self.descriptors, len(os.listdir("/proc/self/fd")))
        return result


def add(store: KNNStore, rng: np.random.Generator, documents: Sequence[tuple[str, str, str]]) -> None:
    """Add documents, each an id, a domain and a tag, in one commit."""
    tokens = rng.integers(0, 1000, (len(documents), TOKENS)).astype(np.uint32)
    new = [
        NewDocument(id, domain, f"{id:>064}", own, tags=frozenset({tag}))
        for (id, domain, tag), own in zip(documents, tokens, strict=True)
    ]
    at, position = np.divmod(np.arange(tokens.size), TOKENS)
    with store.ingest(new) as group:
        keys = rng.standard_normal((tokens.size, DIM)).astype(np.float32)
        group.add(at, position, tokens.ravel().astype(np.int64), keys)


def create(home: Path, engine: str) -> KNNStore:
    identity = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)
    return KNNStore.create(home, identity, store=engine)


def many_domains(home: Path, engine: str, n: int) -> Steps:
    """Add n domains, one a commit, and search them."""
    rng, steps = np.random.default_rng(0), Steps()
    queries = rng.standard_normal((4, DIM)).astype(np.float32)

    def one_by_one() -> None:
        for number in range(n):
            add(store, rng, [(f"{number}", f"domain {number}", "tag")])

    with create(home, engine) as store:
        steps.take("add, one domain a commit", store, one_by_one)
        steps.take("search all, writer", store, lambda: store.search(queries, K))
    with steps.take("open", None, lambda: KNNStore.open(home)) as store:
        one = Selection(domains=(f"domain {n // 2}",))
        steps.take("search one domain", store, lambda: store.search(queries, K, one))
        steps.take("search all, first", store, lambda: store.search(queries, K))
        steps.take("search all, again", store, lambda: store.search(queries, K))
        steps.take("domains", store, store.domains)
    with KNNStore.open(home, "a") as store:
        steps.take("optimize", store, store.optimize)
    return steps


def many_documents(home: Path, engine: str, n: int) -> Steps:
    """Add n documents, and select and verify them."""
    rng, steps = np.random.default_rng(0), Steps()
    queries = rng.standard_normal((4, DIM)).astype(np.float32)
    documents = [(f"{at}", f"domain {at // SHARING}", f"tag {at // TAGGED}") for at in range(n)]

    def in_groups() -> None:
        for start in range(0, n, GROUP):
            add(store, rng, documents[start : start + GROUP])

    with create(home, engine) as store:
        steps.take("add, 1,000 documents a commit", store, in_groups)
    with KNNStore.open(home) as store:
        steps.take("view", store, store.view)
        half = tuple(id for id, _, _ in documents[::2])
        tags = tuple(sorted({tag for _, _, tag in documents}))
        for name, chosen in {
            "select half of the documents": Selection(documents=half),
            "select all tags": Selection(tags=tags),
            "exclude a tenth by content": Selection(exclude=tuple(f"{id:>064}" for id in half[::5])),
        }.items():
            found = steps.take(name, store, lambda chosen=chosen: store.record_count(chosen))
            steps.take(f"{name}, search", store, lambda chosen=chosen: store.search(queries, K, chosen))
            print(f"{name}: {found} records", file=sys.stderr)
        steps.take("list documents", store, store.documents)
        steps.take("verify", store, store.verify)
    return steps


def table(n: int, of: str, before: Steps, after: Steps) -> list[dict[str, Any]]:
    """Rows of what was measured at n and at 2n, printed too."""
    rows = []
    print(f"| {of} | {n:,} | {2 * n:,} | ratio | statements |\n|---|---|---|---|---|", file=sys.stderr)
    for name, seconds in before.processor.items():
        twice = after.processor[name]
        row = {"step": name, "n": n, "processor": seconds, "processor_2n": twice}
        row |= {"seconds": before.seconds[name], "seconds_2n": after.seconds[name]}
        row |= {"statements": before.statements[name], "statements_2n": after.statements[name]}
        rows.append(row)
        ratio = f"{twice / seconds:.1f}" if seconds > 0.05 else ""
        counted = f"{before.statements[name]:,} → {after.statements[name]:,}"
        print(f"| {name} | {seconds:.2f} s | {twice:.2f} s | {ratio} | {counted} |", file=sys.stderr)
    print(f"| open descriptors | {before.descriptors} | {after.descriptors} | | |\n", file=sys.stderr)
    return rows


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--domains", type=int, default=5_000, help="n; 0 leaves them out")
    parser.add_argument("--documents", type=int, default=100_000, help="n; 0 leaves them out")
    parser.add_argument("--engine", default="faiss")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    sizes = (20, 200) if options.smoke else (options.domains, options.documents)
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "engine": options.engine,
    }
    for of, n, measure in zip(("domains", "documents"), sizes, (many_domains, many_documents), strict=True):
        if not n:
            continue
        measured = []
        for size in (n, 2 * n):
            with tempfile.TemporaryDirectory() as folder:
                measured.append(measure(Path(folder) / "home", options.engine, size))
        results[of] = table(n, of, *measured)
        results[f"{of}_descriptors"] = [steps.descriptors for steps in measured]
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
