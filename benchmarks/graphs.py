"""What the hnswlib adapter costs beside raw hnswlib, what its graphs find, and when exact search is faster.

    python benchmarks/graphs.py                     synthetic clustered keys
    python benchmarks/graphs.py --keys KEYS.npy --queries QUERIES.npy --rows 200000
    python benchmarks/graphs.py --smoke             a few seconds

JSON goes to stdout, a table to stderr. The two sides of a ratio alternate within one process; a
figure is the median of their ratios. Both use all threads.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
from knnstore_hnswlib import HnswlibDatastore
from knnstore_hnswlib.hnswlib_datastore import Policy
from search import BATCH, KS, alternate, clustered, ratio

from knnstore.datastore import Filter, IdRanges, Keys, Metric

SHARES = {"all but 1000": None, "half": 0.5, "a tenth": 0.1, "a hundredth": 0.01}


def filled(root: Path, keys: Keys, metric: Metric) -> dict[str, Any]:
    """Make a store with one graph; returns what that took."""
    with HnswlibDatastore.open(root, dim=keys.shape[1], metric=metric, exact_up_to=0) as store:
        for start in range(0, len(keys), 8192):
            part = np.asarray(keys[start : start + 8192], np.float32)
            store.add(np.arange(start, start + len(part)) << 20, part, np.zeros(len(part), np.int32))
        store.flush()
        start = time.perf_counter()
        store.optimize()
        seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return {"optimize_rows_per_s": round(len(keys) / seconds), "bytes_per_row": round(size / len(keys))}


def searches(root: Path, queries: Keys, repeats: int, metric: Metric) -> list[dict[str, Any]]:
    """Compare the adapter with hnswlib with the same graph, and with a search of all keys."""
    dim = queries.shape[1]
    graph = HnswlibDatastore.open(root, dim=dim, metric=metric, mode="r", exact_up_to=0)
    exact = HnswlibDatastore.open(root, dim=dim, metric=metric, mode="r", exact_up_to=10**9)
    (file,) = (root / "indexes").iterdir()
    raw = hnswlib.Index("l2" if metric is Metric.L2 else "ip", dim + (metric is Metric.IP))
    raw.load_index(str(file))
    raw.set_ef(Policy().ef)
    asked = queries if metric is Metric.L2 else np.column_stack([queries, np.zeros_like(queries[:, 0])])
    results = []
    for batch in (len(queries), 1):
        for k in KS:
            sides = {
                "adapter": lambda k=k, batch=batch: graph.search(queries[:batch], k),
                "raw": lambda k=k, batch=batch: raw.knn_query(asked[:batch], k),
                "exact": lambda k=k, batch=batch: exact.search(queries[:batch], k),
            }
            # Not all three in turn: the threads of a multiplication spin for a while after it.
            beside_raw = alternate({name: sides[name] for name in ("adapter", "raw")}, 3 * repeats)
            beside_exact = alternate({name: sides[name] for name in ("adapter", "exact")}, repeats)
            found, truth = graph.search(queries, k).distances, exact.search(queries, k).distances
            near = found <= truth[:, -1:] + 1e-5 * np.abs(truth[:, -1:])
            results.append(
                {
                    "metric": metric.value, "rows": graph.count(), "batch": batch, "k": k,
                    "adapter_s": round(statistics.median(beside_raw["adapter"]), 5),
                    "ratio_to_raw": ratio(beside_raw, "adapter", "raw"),
                    "ratio_to_exact": ratio(beside_exact, "adapter", "exact"),
                    "recall": round(float(near.mean()), 4),
                    "least_recall_of_a_query": round(float(near.mean(axis=1).min()), 3),
                }
            )  # fmt: skip
    return results


def filtered(root: Path, queries: Keys, repeats: int) -> list[dict[str, Any]]:
    """Compare searches of some of the records with a search of all."""
    store = HnswlibDatastore.open(root, dim=queries.shape[1], mode="r", exact_up_to=0)
    exact = HnswlibDatastore.open(root, dim=queries.shape[1], mode="r", exact_up_to=10**9)
    rows = store.count()
    results = []
    for name, share in SHARES.items():
        first = rows // 3
        left_out = IdRanges([(0, first << 20), (min(first + 1000, rows) << 20, rows << 20)])
        where = Filter(
            left_out if share is None else IdRanges([(first << 20, first + int(share * rows) << 20)])
        )
        for k in KS:
            seconds = alternate(
                {
                    "filtered": lambda k=k, where=where: store.search(queries, k, where=where),
                    "all": lambda k=k: store.search(queries, k),
                },
                repeats,
            )
            found = store.search(queries, k, where=where)
            nearest = exact.search(queries, k, where=where).distances
            results.append(
                {
                    "matching": name, "rows": rows, "k": k,
                    "ratio_to_all": ratio(seconds, "filtered", "all"),
                    "recall": round(float((found.distances <= nearest[:, -1:] * (1 + 1e-5)).mean()), 4),
                }
            )  # fmt: skip
    return results


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=Path, help="a .npy file with keys, shape (n, dim), of any float type")
    parser.add_argument("--queries", type=Path, help="a .npy file with keys of other text")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rows, repeats = (5_000, 1) if options.smoke else (options.rows, options.repeats)
    keys = np.load(options.keys, mmap_mode="r")[:rows] if options.keys else clustered(rows, 256, seed=0)
    rows, dim = keys.shape
    asked = np.load(options.queries) if options.queries else clustered(4096, dim, seed=1)
    chosen = np.random.default_rng(0).choice(len(asked), BATCH, replace=False)
    queries = np.ascontiguousarray(asked[chosen], np.float32)

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "keys": options.keys.name if options.keys else "synthetic",
        "search": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for metric in Metric:
            root = Path(folder) / metric.value
            results[f"building_{metric.value}"] = filled(root, keys, metric)
            results["search"] += searches(root, queries, repeats, metric)
        root = Path(folder) / Metric.L2.value
        results["filtered"] = filtered(root, queries, repeats)
        start = time.perf_counter()
        with HnswlibDatastore.open(root, dim=dim, mode="r", exact_up_to=0) as store:
            store.search(queries[:1], KS[0])
        results["open_and_first_query_s"] = round(time.perf_counter() - start, 3)
    json.dump(results, sys.stdout, indent=2)
    print(file=sys.stdout)
    for line in [*results["search"], *results["filtered"]]:
        print("  ".join(f"{name}={value}" for name, value in line.items()), file=sys.stderr)
    print({name: value for name, value in results.items() if "building" in name}, file=sys.stderr)


if __name__ == "__main__":
    main()
