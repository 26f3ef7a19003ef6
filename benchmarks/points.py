"""The cost of the Qdrant adapter, compared with the client's own calls to the same server.

    python benchmarks/points.py --url http://127.0.0.1:6333 [--grpc-port 6334] [--api-key-file FILE]
    python benchmarks/points.py --url URL --keys KEYS.npy --queries QUERIES.npy

The keys are clustered and synthetic by default. They go into a collection that is removed afterwards. The API
key is the content of the file, or that of KNNSTORE_QDRANT_API_KEY(_FILE). JSON goes to stdout. The two sides
of a ratio alternate within one process; a figure is the median of their ratios, once of wall time and once of
this process's processor time.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from knnstore_qdrant import QdrantDatastore
from knnstore_qdrant.qdrant_datastore import API_KEY_VARIABLE, SERVER_VARIABLE
from qdrant_client import QdrantClient, models
from search import KS, clustered

from knnstore.datastore import Keys, read_secret

COLLECTION = "knnstore-benchmark"
EF = 128


def fill(store: QdrantDatastore, keys: Keys) -> None:
    for start in range(0, len(keys), 8192):
        part = np.asarray(keys[start : start + 8192], np.float32)
        store.add(np.arange(start, start + len(part)) << 20, part, np.zeros(len(part), np.int32))
    store.optimize()


def compare(adapter: Callable[[], Any], raw: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Ratios of the two, run in turn; the first round does not count."""
    ratios: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        seconds = []
        for side in (adapter, raw):
            wall, processor = time.perf_counter(), time.process_time()
            side()
            seconds.append((time.perf_counter() - wall, time.process_time() - processor))
        (wall, processor), (raw_wall, raw_processor) = seconds
        ratios.append((wall / raw_wall, processor / raw_processor))
    wall, processor = (statistics.median(side) for side in zip(*ratios[1:], strict=True))
    return {"ratio_wall": round(wall, 3), "ratio_cpu": round(processor, 3)}


def server(url: str, grpc_port: int, keys: Keys, queries: Keys, repeats: int) -> list[dict[str, Any]]:
    """Compare the adapter with the client's own batch call, over gRPC and over REST."""
    results = []
    key = read_secret(API_KEY_VARIABLE)
    place: dict[str, Any] = {"collection": COLLECTION, "grpc_port": grpc_port, "timeout": 60.0}
    QdrantDatastore.erase(url, **place)
    try:
        for prefer_grpc in (True, False):
            client = QdrantClient(
                url,
                grpc_port=grpc_port,
                prefer_grpc=prefer_grpc,
                headers={"api-key": key} if key else None,
                timeout=60,
                check_compatibility=False,
            )
            with QdrantDatastore.open(url, dim=keys.shape[1], prefer_grpc=prefer_grpc, **place) as store:
                if store.count() == 0:
                    fill(store, keys)
                for k in KS:
                    params = models.SearchParams(hnsw_ef=max(k, EF))
                    requests = [
                        models.QueryRequest(query=query.tolist(), limit=k, params=params) for query in queries
                    ]
                    result = {"engine": "gRPC" if prefer_grpc else "REST", "rows": len(keys), "k": k}
                    ratios = compare(
                        lambda k=k, store=store: store.search(queries, k),
                        lambda client=client, requests=requests: client.query_batch_points(
                            COLLECTION, requests
                        ),
                        repeats,
                    )
                    results.append(result | ratios)
    finally:
        QdrantDatastore.erase(url, **place)
    return results


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=Path, help="a .npy file with keys, shape (n, dim), of any float type")
    parser.add_argument("--queries", type=Path, help="a .npy file with keys of other text")
    parser.add_argument("--rows", type=int, default=25_000)
    parser.add_argument("--batch", type=int, default=64, help="queries of a search")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--url", required=True, help="of the server")
    parser.add_argument("--grpc-port", type=int, default=6334)
    parser.add_argument("--api-key-file", type=Path, help="a file with the server's API key")
    options = parser.parse_args()
    rows, batch, repeats = options.rows, options.batch, options.repeats
    keys = np.load(options.keys, mmap_mode="r")[:rows] if options.keys else clustered(rows, 256, seed=0)
    asked = np.load(options.queries) if options.queries else clustered(4096, keys.shape[1], seed=1)
    chosen = np.random.default_rng(0).choice(len(asked), min(batch, len(asked)), replace=False)
    queries = np.ascontiguousarray(asked[chosen], np.float32)
    if options.api_key_file:
        os.environ.pop(API_KEY_VARIABLE, None)
        os.environ[f"{API_KEY_VARIABLE}_FILE"] = str(options.api_key_file)
        os.environ[SERVER_VARIABLE] = options.url
    results = server(options.url, options.grpc_port, keys, queries, repeats)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    source = options.keys.name if options.keys else "synthetic"
    json.dump({"machine": machine, "keys": source, "search": results}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
