"""What moving the keys to another engine costs beside loading that engine from memory.

    python benchmarks/move.py                        synthetic clustered keys, each engine installed
    python benchmarks/move.py --keys KEYS.npy --rows N --engine hnswlib
    python benchmarks/move.py --smoke                a few seconds

JSON goes to stdout, a line for each engine to stderr. A store on FAISS is moved with
`KNNStore.move`: read, written durably, indexed, every record compared, recall measured, switched. In
turn with it, in one process, the same keys are loaded from memory into the same engine, ready to be
searched: with its adapter, and with its library alone where that takes a few lines. A ratio is that of the
records/s, the median of neighboring runs; above 0.5 the move takes less than twice as long.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from search import clustered

from knnstore.catalog import Identity, NewDocument
from knnstore.datastore import Keys, SupportsOptimize, registry
from knnstore.store import KNNStore

BATCH = 8192
DOCUMENT = 1000
"""Tokens of a document."""
ENGINES = ("faiss", "hnswlib")


def fill(home: Path, keys: Keys, domains: int) -> None:
    """Make a store on FAISS that holds these keys, the domains one after the other."""
    rows, dim = keys.shape
    identity = Identity("none", "0" * 64, "0" * 64, "key", dim, "l2", 1000, 16, 8)
    tokens = np.random.default_rng(0).integers(0, 1000, rows).astype(np.uint32)
    with KNNStore.create(home, identity, store="faiss") as store:
        for domain, of_domain in enumerate(np.array_split(np.arange(rows), domains)):
            parts = [of_domain[at : at + DOCUMENT] for at in range(0, len(of_domain), DOCUMENT)]
            new = [
                NewDocument(str(number), f"domain {domain}", f"{part[0]:064x}", tokens[part])
                for number, part in enumerate(parts)
            ]
            with store.ingest(new) as group:
                for number, part in enumerate(parts):
                    at = np.full(len(part), number), np.arange(len(part))
                    group.add(*at, tokens[part].astype(np.int64), np.asarray(keys[part], np.float32))
        store.optimize()


def moved(home: Path, engine: str) -> tuple[float, dict[str, Any]]:
    """Move a store; returns the seconds and what was found out."""
    with KNNStore.open(home, "a") as store:
        start = time.perf_counter()
        result = store.move(engine, "moved")
        seconds = time.perf_counter() - start
    return seconds, {"recall": result.recall, "neighbors": result.neighbors}


def loaded(folder: Path, engine: str, keys: Keys, domains: int) -> float:
    """Load an engine through its adapter; returns the seconds."""
    ids, groups = (
        np.arange(len(keys)) << 20,
        np.repeat(np.arange(domains, dtype=np.int32), [len(part) for part in np.array_split(keys, domains)]),
    )
    start = time.perf_counter()
    with registry.load_adapter(engine).open(folder, dim=keys.shape[1], mode="x") as store:
        for at in range(0, len(keys), BATCH):
            part = slice(at, at + BATCH)
            store.add(ids[part], keys[part], groups[part])
        store.flush()
        if isinstance(store, SupportsOptimize):
            store.optimize()
        return time.perf_counter() - start


def faiss_alone(folder: Path, keys: Keys, domains: int) -> float:
    """Build and write the index that the adapter chooses for each domain."""
    import faiss
    from knnstore_faiss.faiss_datastore import Policy, create_empty_index

    from knnstore.datastore import Metric

    start = time.perf_counter()
    for domain, part in enumerate(np.array_split(keys, domains)):
        factory = Policy().choose_factory(len(part), len(part), keys.shape[1])
        index = (
            create_empty_index(factory, keys.shape[1], Metric.L2)
            if factory
            else faiss.IndexFlatL2(keys.shape[1])
        )
        if factory:
            sample = np.random.default_rng(0).choice(
                len(part), min(len(part), 64 * index.nlist), replace=False
            )
            index.train(np.ascontiguousarray(part[np.sort(sample)]))
        index.add(np.ascontiguousarray(part))
        faiss.write_index(index, str(folder / f"{domain}.faiss"))
    return time.perf_counter() - start


def hnswlib_alone(folder: Path, keys: Keys, domains: int) -> float:
    """Build and write a graph of each domain with the adapter's parameters."""
    import hnswlib
    from knnstore_hnswlib.hnswlib_datastore import Policy

    policy = Policy()
    start = time.perf_counter()
    for domain, part in enumerate(np.array_split(keys, domains)):
        graph = hnswlib.Index("l2", keys.shape[1])
        graph.init_index(len(part), M=policy.M, ef_construction=policy.ef_construction)
        graph.add_items(part)
        graph.save_index(str(folder / f"{domain}.hnsw"))
    return time.perf_counter() - start


ALONE: dict[str, Callable[[Path, Keys, int], float]] = {"faiss": faiss_alone, "hnswlib": hnswlib_alone}


def compare(home: Path, engine: str, keys: Keys, domains: int, repeats: int) -> dict[str, Any]:
    """Move and load in turn, each time from another one on."""
    seconds: dict[str, list[float]] = {"move": [], "adapter": []}
    if engine in ALONE:
        seconds["library"] = []
    found: dict[str, Any] = {}
    sides = list(seconds)
    for repeat in range(repeats):
        for side in sides[repeat % len(sides) :] + sides[: repeat % len(sides)]:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if side == "move":
                    shutil.copytree(home, folder / "home")
                    taken, found = moved(folder / "home", engine)
                elif side == "adapter":
                    taken = loaded(folder / "store", engine, keys, domains)
                else:
                    taken = ALONE[engine](folder, keys, domains)
            seconds[side].append(taken)
    result = {"engine": engine, "records": len(keys), "domains": domains, "dim": keys.shape[1], **found}
    for side, times in seconds.items():
        result[f"{side}_records_per_s"] = round(len(keys) / statistics.median(times))
        if side != "move":
            ratios = [other / mine for mine, other in zip(seconds["move"], times, strict=True)]
            result[f"ratio_to_{side}"] = round(statistics.median(ratios), 3)
    return result


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=Path, help="a .npy file with keys, shape (n, dim), of any float type")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--domains", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="repeatable; default is each one")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rows, repeats = (4000, 1) if options.smoke else (options.rows, options.repeats)
    keys = np.load(options.keys, mmap_mode="r")[:rows] if options.keys else clustered(rows, 256, seed=0)
    keys = np.asarray(keys, np.float16).astype(np.float32)  # as a store keeps them
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "keys": options.keys.name if options.keys else "synthetic",
        "moves": [],
    }
    usable = {row.name for row in registry.describe_adapters() if row.problem is None and row.capabilities}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        fill(home, keys, options.domains)
        for engine in options.engine or [name for name in ENGINES if name in usable]:
            results["moves"].append(compare(home, engine, keys, options.domains, repeats))
            line = "  ".join(f"{name}={value}" for name, value in results["moves"][-1].items())
            print(line, file=sys.stderr)
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
