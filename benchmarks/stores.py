"""The installed engines side by side, on the same keys: what each costs and what it finds.

    python benchmarks/stores.py --keys KEYS.npy --queries QUERIES.npy
    python benchmarks/stores.py                     synthetic clustered keys
    python benchmarks/stores.py --smoke             a few seconds

Each engine holds all keys as one domain, and once more as ten domains of one length. JSON goes to
stdout, a Markdown table to stderr. Searches of all engines alternate within one process; a figure is
the median over the rounds.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from search import alternate, clustered, in_new_process, ratio

from knnstore.datastore import Datastore, Distances, Filter, IdRanges, Keys
from knnstore.datastore.registry import load_adapter

DOMAINS = 10
KS = (1024, 64)
TARGET = 0.95
"""The recall at which engines are compared."""


@dataclass
class Engine:
    """One engine with one setting of its parameters."""

    adapter: str
    params: dict[str, Any] = field(default_factory=dict)
    effort: str = ""
    """The parameter that trades time for recall when searching."""
    efforts: tuple[int, ...] = ()
    """Values of it to try, ascending."""

    @property
    def name(self) -> str:
        """How the tables call it."""
        return " ".join([self.adapter, *map(str, self.params.values())])


ENGINES = [
    Engine("faiss", {"index": "exact"}),
    Engine("faiss", {}, "nprobe", (4, 8, 16, 32, 64, 128)),
    Engine("hnswlib", {}, "ef", (64, 96, 128, 192, 256, 512, 1024, 1536)),
]

OPEN = """
import json, sys, time
import numpy as np
from knnstore.datastore.registry import load_adapter
adapter, root, dim, params = load_adapter(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
query = np.zeros((1, dim), np.float32)
start = time.perf_counter()
with adapter.open(root, dim=dim, mode="r", **params) as store:
    store.search(query, 64)
    print(time.perf_counter() - start)
"""


def opened(engine: Engine, root: Path, dim: int, mode: Any, **params: Any) -> Datastore:
    return load_adapter(engine.adapter).open(root, dim=dim, mode=mode, **(engine.params | params))


def fill(engine: Engine, root: Path, keys: Keys, groups: np.ndarray) -> float:
    """Write keys in batches as ingestion does, and optimize; returns seconds."""
    start = time.perf_counter()
    root.parent.mkdir(exist_ok=True)
    with opened(engine, root, keys.shape[1], "x") as store:
        for at in range(0, len(keys), 8192):
            part = np.asarray(keys[at : at + 8192], np.float32)
            store.add(np.arange(at, at + len(part)) << 20, part, groups[at : at + len(part)])
        store.flush()
        if hasattr(store, "optimize"):
            store.optimize()
    return time.perf_counter() - start


def size(root: Path) -> int:
    """Bytes that a folder takes on disk."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def recall(distances: Distances, truth: Distances) -> float:
    """Share of the neighbors that are among the true ones; ties count."""
    return round(float((distances <= truth[:, -1:] * (1 + 1e-5)).mean()), 4)


def at_target(
    engine: Engine, root: Path, queries: Keys, truth: Distances, repeats: int
) -> dict[str, Any] | None:
    """Return the least effort that reaches the target recall, and its speed; None if none does."""
    for effort in engine.efforts or (0,):
        params = {engine.effort: effort} if engine.effort else {}
        with opened(engine, root, queries.shape[1], "r", **params) as store:
            found = recall(store.search(queries, truth.shape[1]).distances, truth)
            if found >= TARGET:
                seconds = alternate({"it": lambda: store.search(queries, truth.shape[1])}, repeats)
                speed = len(queries) / statistics.median(seconds["it"])
                return {"recall": found, "queries_per_s": round(speed), **params}
    return None


def compare(folder: Path, keys: Keys, queries: Keys, repeats: int) -> list[dict[str, Any]]:
    """Measure every engine on all keys as one domain."""
    rows, dim = keys.shape
    results = []
    for engine in ENGINES:
        root = folder / engine.name
        result: dict[str, Any] = {"engine": engine.name, "rows": rows, "dim": dim}
        result["build_s"] = round(fill(engine, root, keys, np.zeros(rows, np.int32)), 2)
        result["bytes_per_record"] = round(size(root) / rows)
        parameters = json.dumps(engine.params)
        times = [in_new_process(OPEN, engine.adapter, root, dim, parameters) for _ in range(3)]
        result["open_s"] = round(statistics.median(times), 3)
        results.append(result)
    stores = {engine.name: opened(engine, folder / engine.name, dim, "r") for engine in ENGINES}
    for k in KS:
        truth = stores[ENGINES[0].name].search(queries, k).distances
        sides = {name: lambda s=store, k=k: s.search(queries, k) for name, store in stores.items()}
        seconds = alternate(sides, repeats)
        for engine, result in zip(ENGINES, results, strict=True):
            found = stores[engine.name].search(queries, k)
            result[f"k={k}"] = {
                "recall": recall(found.distances, truth),
                "queries_per_s": round(len(queries) / statistics.median(seconds[engine.name])),
                "at_recall": at_target(engine, folder / engine.name, queries, truth, repeats),
            }
    for store in stores.values():
        store.close()
    return results


def compare_domains(engine: Engine, folder: Path, keys: Keys, queries: Keys, repeats: int) -> dict[str, Any]:
    """Measure one engine on the keys as ten domains: searching one of them, and removing it."""
    groups = (np.arange(len(keys)) * DOMAINS // len(keys)).astype(np.int32)
    chosen = DOMAINS // 2
    rows = np.flatnonzero(groups == chosen)
    domain = Filter(IdRanges([(int(rows[0]) << 20, (int(rows[-1]) << 20) + 1)]), frozenset({chosen}))
    fill(engine, folder / "ten", keys, groups)
    fill(engine, folder / "alone", keys[rows], groups[rows])
    result: dict[str, Any] = {}
    with (
        opened(engine, folder / "ten", keys.shape[1], "a") as ten,
        opened(engine, folder / "alone", keys.shape[1], "r") as alone,
    ):
        for k in KS:
            sides = {
                "one of ten": lambda k=k: ten.search(queries, k, where=domain),
                "alone": lambda k=k: alone.search(queries, k),
            }
            seconds = alternate(sides, repeats)
            result[f"one_of_ten_to_alone k={k}"] = ratio(seconds, "one of ten", "alone")
        start = time.perf_counter()
        ten.delete(domain.ids)
        ten.flush()
        result["remove_domain_s"] = round(time.perf_counter() - start, 3)
        found = ten.search(queries, KS[0]).ids
        assert not np.isin(found, rows << 20).any(), f"{engine.name} finds what was removed"
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    head = ["engine", "build s", "bytes a record", "open s", "remove a domain s"]
    for k in KS:
        head += [f"recall k={k}", "queries/s", f"queries/s at {TARGET}", "one of ten ÷ alone"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [result[name] for name in ("engine", "build_s", "bytes_per_record", "open_s")]
        cells.append(result["remove_domain_s"])
        for k in KS:
            of = result[f"k={k}"]
            equal = of["at_recall"]["queries_per_s"] if of["at_recall"] else "–"
            cells += [of["recall"], of["queries_per_s"], equal, result[f"one_of_ten_to_alone k={k}"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=Path, help="a .npy file with keys, shape (n, dim), of any float type")
    parser.add_argument("--queries", type=Path, help="a .npy file with keys of other text")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256, help="queries of a search")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rows, repeats = (4_000, 1) if options.smoke else (options.rows, options.repeats)
    keys = np.load(options.keys, mmap_mode="r")[:rows] if options.keys else clustered(rows, 256, seed=0)
    asked = np.load(options.queries) if options.queries else clustered(4096, keys.shape[1], seed=1)
    chosen = np.random.default_rng(0).choice(len(asked), min(options.batch, len(asked)), replace=False)
    queries = np.ascontiguousarray(asked[chosen], np.float32)
    with tempfile.TemporaryDirectory() as folder:
        results = compare(Path(folder), keys, queries, repeats)
        for engine, result in zip(ENGINES, results, strict=True):
            place = Path(folder) / f"{engine.name} domains"
            result.update(compare_domains(engine, place, keys, queries, repeats))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    source = options.keys.name if options.keys else "synthetic"
    json.dump({"machine": machine, "keys": source, "engines": results}, sys.stdout, indent=2)
    print()
    print(table(results), file=sys.stderr)


if __name__ == "__main__":
    main()
