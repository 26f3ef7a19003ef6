"""What the FAISS adapter costs beside raw FAISS, and what its indexes find.

    python benchmarks/search.py                     synthetic clustered keys
    python benchmarks/search.py --keys KEYS.npy --queries QUERIES.npy
    python benchmarks/search.py --smoke             a few seconds

JSON goes to stdout, a table to stderr. The two sides of a ratio alternate within one process; a
figure is the median of their ratios. Both use all threads.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from knnstore_faiss import FaissDatastore
from knnstore_faiss.faiss_datastore import Policy, create_empty_index

from knnstore.datastore import Keys, Metric

BATCH = 256
LARGE_BATCH = 2048
"""Queries that a batch of windows brings when text is scored."""
KS = (1024, 64)


def clustered(n: int, dim: int, seed: int) -> Keys:
    """Keys like a language model's: many clusters of very different sizes, few directions in each."""
    rng = np.random.default_rng(seed)
    shape = np.random.default_rng(7)
    centers = shape.normal(size=(2000, 48))
    sizes = 1 / np.arange(1, 2001)
    project = shape.normal(size=(48, dim)) / 7
    latent = centers[rng.choice(2000, n, p=sizes / sizes.sum())] + 0.5 * rng.normal(size=(n, 48))
    keys = np.empty((n, dim), np.float32)
    for start in range(0, n, 1 << 16):
        part = latent[start : start + (1 << 16)] @ project
        keys[start : start + len(part)] = part + 0.1 * rng.normal(size=part.shape)
    return keys


def alternate(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, run in turn and each time from another one on; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            sides[name]()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """Median of the ratios of runs that lay side by side."""
    return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)


def fill(root: Path, keys: Keys, *, optimize: bool, **params: Any) -> None:
    """Write keys into a new store, in batches as ingestion does."""
    with FaissDatastore.open(root, dim=keys.shape[1], **params) as store:
        for start in range(0, len(keys), 8192):
            part = np.asarray(keys[start : start + 8192], np.float32)
            store.add(np.arange(start, start + len(part)) << 20, part, np.zeros(len(part), np.int32))
        if optimize:
            store.optimize()


def exact_tier(keys: Keys, batches: list[Keys], repeats: int) -> list[dict[str, Any]]:
    """Adapter against IndexFlat, and against the machine's matrix multiplication."""
    rows, dim = keys.shape
    flat = faiss.IndexFlatL2(dim)
    flat.add(np.ascontiguousarray(keys))
    left = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    product = np.empty_like(left)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "store", keys, optimize=False, index="exact")
        with FaissDatastore.open(Path(folder) / "store", dim=dim, mode="r", index="exact") as store:
            for queries, k in itertools.product(batches, KS):
                seconds = alternate(
                    {
                        "adapter": lambda queries=queries, k=k: store.search(queries, k),
                        "raw": lambda queries=queries, k=k: flat.search(queries, k),
                        "sgemm": lambda: np.matmul(left, left, out=product),
                    },
                    repeats,
                )
                peak = 2 * 2048**3 / statistics.median(seconds["sgemm"])
                speed = 2 * rows * dim * len(queries) / statistics.median(seconds["adapter"])
                results.append(
                    {
                        "tier": "exact", "rows": rows, "dim": dim, "batch": len(queries), "k": k,
                        "adapter_s": statistics.median(seconds["adapter"]),
                        "ratio_to_raw": ratio(seconds, "adapter", "raw"),
                        "share_of_sgemm_peak": round(speed / peak, 3),
                    }
                )  # fmt: skip
    return results


def indexed_tier(root: Path, keys: Keys, queries: Keys, repeats: int, factory: str) -> list[dict[str, Any]]:
    """Adapter against the same kind of index in plain FAISS, which ranks the keys in half precision again.

    Also measures the recall of the adapter.
    """
    rows, dim = keys.shape
    raw = create_empty_index(factory, dim, Metric.L2)
    sample = np.random.default_rng(0).choice(rows, min(rows, 64 * raw.nlist), replace=False)
    raw.train(np.asarray(keys[np.sort(sample)], np.float32))
    for start in range(0, rows, 1 << 16):
        raw.add(np.asarray(keys[start : start + (1 << 16)], np.float32))
    stored = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_fp16)
    stored.train(np.asarray(keys[:1], np.float32))
    for start in range(0, rows, 1 << 16):
        stored.add(np.asarray(keys[start : start + (1 << 16)], np.float32))
    ranking = faiss.IndexRefine(raw, stored)
    coarse = not isinstance(raw, faiss.IndexIVFScalarQuantizer)
    truth = FaissDatastore.open(root, dim=dim, mode="r", index="exact")
    results = []
    for k in KS:
        nearest = truth.search(queries, k).distances[:, -1:]
        wanted = faiss.SearchParametersIVF(nprobe=Policy().count_probes(k, rows, rows, raw.nlist))
        candidates = Policy().count_candidates(k, rows, coarse=coarse)
        ranked = faiss.IndexRefineSearchParameters(k_factor=candidates / k, base_index_params=wanted)
        with FaissDatastore.open(root, dim=dim, mode="r", index=factory) as store:
            found = store.search(queries, k)
            seconds = alternate(
                {
                    "adapter": lambda k=k, store=store: store.search(queries, k),
                    "raw": lambda k=k, ranked=ranked: ranking.search(queries, k, params=ranked),
                },
                repeats,
            )
        results.append(
            {
                "tier": factory, "rows": rows, "dim": dim, "k": k, "nprobe": wanted.nprobe,
                "adapter_s": statistics.median(seconds["adapter"]),
                "ratio_to_raw": ratio(seconds, "adapter", "raw"),
                "recall": round(float((found.distances <= nearest * (1 + 1e-5)).mean()), 4),
            }
        )  # fmt: skip
    return results


OPEN = """
import sys, time
import numpy as np
from knnstore_faiss import FaissDatastore
query = np.zeros((1, int(sys.argv[2])), np.float32)
start = time.perf_counter()
FaissDatastore.open(sys.argv[1], dim=query.shape[1], mode="r").search(query, 1024)
print(time.perf_counter() - start)
"""

GROWTH = """
import sys
import numpy as np
from knnstore_faiss import FaissDatastore
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
rows, dim = int(sys.argv[2]), int(sys.argv[3])
keys = np.random.default_rng(0).normal(size=(8192, dim)).astype(np.float32)
with FaissDatastore.open(sys.argv[1], dim=dim) as store:
    store.add(np.arange(8192), keys, np.zeros(8192, np.int32))
    before, peak = anonymous(), 0
    for start in range(8192, rows, 8192):
        store.add(np.arange(start, start + 8192), keys, np.zeros(8192, np.int32))
        peak = max(peak, anonymous())
    store.flush()
    peak = max(peak, anonymous())
print(peak - before)
"""


def in_new_process(code: str, *arguments: object) -> float:
    """Run code in a fresh interpreter and return the number that it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=Path, help="a .npy file with keys, shape (n, dim), of any float type")
    parser.add_argument("--queries", type=Path, help="a .npy file with keys of other text")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large store")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rows, repeats = (10_000, 2) if options.smoke else (options.rows, options.repeats)
    keys = np.load(options.keys, mmap_mode="r")[:rows] if options.keys else clustered(rows, 256, seed=0)
    rows, dim = keys.shape
    asked = np.load(options.queries) if options.queries else clustered(4096, dim, seed=1)
    chosen = np.random.default_rng(0).choice(len(asked), LARGE_BATCH, replace=False)
    many = np.ascontiguousarray(asked[chosen], np.float32)
    queries = many[:BATCH]

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "faiss": faiss.__version__,
        "keys": options.keys.name if options.keys else "synthetic",
    }
    results["search"] = exact_tier(np.asarray(keys[:100_000], np.float32), [queries, many], repeats)
    policy = Policy()
    with tempfile.TemporaryDirectory() as folder:
        lists = 2 ** round(math.log2(2 * math.sqrt(rows)))
        by_policy = policy.choose_factory(rows, rows, dim) or f"IVF{lists},SQ8"
        factories = {by_policy, f"IVF{lists},SQ8"}
        if not options.smoke:
            factories.add(f"IVF{lists},PQ{dim // 4}x4fs")
        for number, factory in enumerate(sorted(factories)):
            root = Path(folder) / f"store{number}"
            fill(root, keys, optimize=True, index=factory)
            results["search"] += indexed_tier(root, keys, queries, repeats, factory)
            if factory == by_policy:
                times = [in_new_process(OPEN, root, dim) for _ in range(repeats)]
                results["open_and_first_query_s"] = round(statistics.median(times), 3)
        growth = in_new_process(GROWTH, Path(folder) / "growth", rows, dim)
        results["anonymous_growth_mb"] = {"rows": rows, "growth": round(growth / 2**20, 1)}
    json.dump(results, sys.stdout, indent=2)
    for line in results["search"]:
        print("  ".join(f"{name}={value}" for name, value in line.items()), file=sys.stderr)
    print(file=sys.stdout)
    print(f"open and first query {results.get('open_and_first_query_s')} s", file=sys.stderr)
    print(f"growth while adding {results['anonymous_growth_mb']}", file=sys.stderr)


if __name__ == "__main__":
    main()
