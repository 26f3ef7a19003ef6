"""The search of a decoding step on a GPU: Triton's kernels, the same with torch, and results in main memory.

    python benchmarks/device_search.py --rows 1000000 --dim 576 --codes pq64
    python benchmarks/device_search.py --smoke      a few seconds, on a CPU too

A store of synthetic clustered keys is asked with 1, 8 and 64 queries at once. Each side finds the records of
the probed cells, and sums exp(-d/T) for each token at five temperatures. The sides alternate in one process;
a figure is a median. `visit` returns its records in main memory, and only its search is timed. On a GPU, the
other two first run while torch raises an error at every wait. JSON goes to stdout, a table to stderr.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from knnstore_cells import CellsDatastore, device_search
from search import clustered

from knnstore.datastore import Filter, IdRanges, Keys

BATCHES = (1, 8, 64)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def fill_store(root: Path, keys: Keys, codes: str, vocabulary: int) -> dict[str, Any]:
    """Make a store of the keys, each with a random token."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, len(keys))
    begun = time.perf_counter()
    with CellsDatastore.open(root, dim=keys.shape[1], codes=codes, device="none") as store:
        for start in range(0, len(keys), 8192):
            part = np.asarray(keys[start : start + 8192], np.float32)
            ids = (np.arange(start, start + len(part)) << 20) + tokens[start : start + len(part)]
            store.add(ids, part, np.zeros(len(part), np.int32))
        store.flush()
        store.optimize()
        return {"made_s": round(time.perf_counter() - begun, 1), "record_bytes": store.record_size(
            keys.shape[1], codes=codes
        )}  # fmt: skip


def make_device_search(
    store: CellsDatastore, queries: torch.Tensor, probes: int, where: Filter, vocabulary: int, kernels: str
) -> Callable[[], torch.Tensor]:
    """Return a function that searches and sums by token on the device, with or without the kernels."""

    def run() -> torch.Tensor:
        if os.environ.get(device_search.SWITCH) != kernels:
            os.environ[device_search.SWITCH] = kernels
            device_search._kernels.clear()
        found = store.visit_on_device(queries, probes, where)
        near = found.distances.amin(1, keepdim=True)
        spread = (found.distances.where(found.distances < torch.inf, near) - near).amax(1, keepdim=True)
        return found.sum_by_token(torch.cat([spread / 8 * factor for factor in FACTORS], 1), vocabulary)

    return run


def time_in_turns(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each side; the first run of each does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            run() if repeat == 0 else None  # a kernel may have to be compiled or loaded
            synchronize()
            begun = time.perf_counter()
            run()
            synchronize()
            seconds[name].append(time.perf_counter() - begun)
    return {name: round(statistics.median(times[1:]) * 1e3, 4) for name, times in seconds.items()}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--codes", default="pq64")
    parser.add_argument("--probes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.dim, options.codes, options.repeats = 40_000, 64, "pq8", 1
    gpu = torch.cuda.is_available()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = clustered(options.rows, options.dim, seed=0)
        made = fill_store(Path(folder) / "store", keys, options.codes, options.vocabulary)
        where = Filter(IdRanges([(0, options.rows << 20)]))
        device = "cuda" if gpu else "cpu"
        with CellsDatastore.open(Path(folder) / "store", dim=options.dim, mode="r", device=device) as store:
            for batch in BATCHES:
                asked = clustered(batch, options.dim, seed=1)
                queries = torch.from_numpy(asked).to(device)
                for probes in options.probes:
                    arguments = store, queries, probes, where, options.vocabulary
                    sides: dict[str, Callable[[], Any]] = {"torch": make_device_search(*arguments, "0")}
                    if gpu:
                        sides["triton"] = make_device_search(*arguments, "1")
                    sums = [run() for run in sides.values()]
                    assert all(torch.allclose(each, sums[0], rtol=1e-3, atol=1e-3) for each in sums)
                    for run in sides.values() if gpu else ():
                        run()  # so that everything is compiled and loaded
                        torch.cuda.set_sync_debug_mode("error")
                        run()
                        torch.cuda.set_sync_debug_mode("default")
                    found = store.visit_on_device(queries, probes, where)
                    records = int((found.distances < torch.inf).sum()) / batch
                    sides["visit"] = lambda asked=asked, probes=probes: store.visit(asked, probes)
                    results.append(
                        {"queries": batch, "probes": probes, "records_a_query": round(records)}
                        | {
                            f"{name}_ms": spent
                            for name, spent in time_in_turns(sides, options.repeats).items()
                        }
                    )
                    print(results[-1], file=sys.stderr, flush=True)
    place = torch.cuda.get_device_name() if gpu else "CPU"
    described = {"place": place, "torch": torch.__version__, **vars(options), **made}
    json.dump(described | {"search": results}, sys.stdout, indent=2)
    print(file=sys.stdout)


if __name__ == "__main__":
    main()
