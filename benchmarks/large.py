"""A store of many records: made, arranged, opened, searched, grown, removed from and erased.

    python benchmarks/large.py --rows 1000000 10000000 --keys KEYS.npy
    python benchmarks/large.py --smoke                a few seconds

KEYS.npy holds keys of a language model, shape (n, dim). They are repeated, with a tenth of their spread
added as noise, until there are enough; without `--keys` they are synthetic. Each step is a process of its
own, so that its memory can be told. JSON goes to stdout. Seconds include neither imports nor making the
keys; `peak_mib` is all that the process ever had in memory, torch, keys being made and mapped files that
were read included.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from knnstore.catalog import Identity, NewDocument
from knnstore.datastore import Keys
from knnstore.store import KNNStore

DOCUMENT = 1_000
BATCH = 50
"""Documents of one commit."""
DOMAINS = ("first", "second")
QUERIES, PROBES = 4096, 16


def key_batches(source: Path, start: int, rows: int) -> Iterator[Keys]:
    """The keys of so many records from a place on, float32, as many as are committed at once."""
    base = np.load(source, mmap_mode="r")
    noise = base[:20_000].astype(np.float32).std(0) / 10
    for first in range(start, start + rows, BATCH * DOCUMENT):
        numbers = np.arange(first, min(first + BATCH * DOCUMENT, start + rows))
        keys = base[numbers % len(base)].astype(np.float32)
        repeated = np.random.default_rng(first).standard_normal(keys.shape, np.float32) * noise
        yield keys + repeated * (numbers >= len(base))[:, None]


def add(store: KNNStore, domain: str, source: Path, start: int, rows: int) -> float:
    """Add records to a domain; returns the seconds, without those of making keys."""
    seconds, number = 0.0, start
    for keys in key_batches(source, start, rows):
        tokens = np.random.default_rng(number).integers(0, 1000, len(keys)).astype(np.uint32)
        parts = [np.arange(at, min(at + DOCUMENT, len(keys))) for at in range(0, len(keys), DOCUMENT)]
        new = [
            NewDocument(f"{number + part[0]}", domain, f"{number + part[0]:064x}", tokens[part])
            for part in parts
        ]
        begun = time.perf_counter()
        with store.ingest(new) as group:
            for at, part in enumerate(parts):
                group.add(
                    np.full(len(part), at), np.arange(len(part)), tokens[part].astype(np.int64), keys[part]
                )
        seconds += time.perf_counter() - begun
        number += len(keys)
    return seconds


def made(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Make the store, in two domains of which the second has a tenth."""
    dim = np.load(source, mmap_mode="r").shape[1]
    with KNNStore.create(home, Identity("none", "0" * 64, "0" * 64, "key", dim, "l2", 1000, 16, 8)) as store:
        small = rows // 10
        return {
            "seconds": add(store, "second", source, 0, small)
            + add(store, "first", source, small, rows - small)
        }


def arranged(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Merge segments and put all records in cells."""
    with KNNStore.open(home, "a") as store:
        begun = time.perf_counter()
        store.optimize()
        seconds = time.perf_counter() - begun
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    keys = sum(file.stat().st_size for file in (home / "keys").rglob("*") if file.is_file())
    return {"seconds": seconds, "bytes_a_record": keys / rows, "home_to_keys": size / keys}


def searched(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Open the store for a first query, then ask many at once, twice."""
    queries = np.asarray(np.load(source, mmap_mode="r")[-QUERIES:], np.float32)
    with suppress(ImportError):
        import faiss  # noqa: F401  # which measures by tables; imports do not count
    begun = time.perf_counter()
    with KNNStore.open(home) as store:
        store.visit(queries[:1], PROBES)
        opened = time.perf_counter() - begun
        times = []
        for _ in range(2):
            begun = time.perf_counter()
            store.visit(queries, PROBES)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / len(queries) * 1e3)
        alone = []
        for query in queries[:64, None]:
            begun = time.perf_counter()
            store.visit(query, PROBES)
            alone.append((time.perf_counter() - begun) * 1e3)
    found = {"open_and_first_query": opened, "query_ms": times[1], "query_alone_ms": float(np.median(alone))}
    found["anonymous_mib"] = anonymous() >> 20
    if torch.cuda.is_available():
        found["gpu_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return found


def anonymous() -> int:
    """Bytes of memory that no file backs, now; the rest of what is counted are libraries and mapped keys."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def grown(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Add a hundredth, and arrange it."""
    with KNNStore.open(home, "a") as store:
        seconds = add(store, "first", source, rows, rows // 100)
        begun = time.perf_counter()
        store.optimize()
        return {"seconds": seconds, "arrange_seconds": time.perf_counter() - begun}


def removed(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Remove a document, then a domain, a tenth of all."""
    with KNNStore.open(home, "a") as store:
        begun = time.perf_counter()
        store.remove_document(str(rows // 2), domain="first")
        document = time.perf_counter() - begun
        begun = time.perf_counter()
        store.remove_domain("second")
        return {"document_seconds": document, "domain_seconds": time.perf_counter() - begun}


def erased(home: Path, source: Path, rows: int) -> dict[str, float]:
    """Erase what was removed."""
    with KNNStore.open(home, "a") as store:
        return {"seconds": store.erase().seconds}


STEPS: dict[str, Callable[[Path, Path, int], dict[str, float]]] = {
    step.__name__: step for step in (made, arranged, searched, grown, removed, erased)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--keys", type=Path, help="keys as numpy's array, shape (n, dim)")
    parser.add_argument("--folder", type=Path, help="where the stores are made; default a temporary folder")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="in this order")
    parser.add_argument("--smoke", action="store_true", help="small, and nothing can be concluded from it")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "HOME"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        name, home = given.step
        done = STEPS[name](Path(home), given.keys, given.rows[0])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({name: round(value, 4) for name, value in done.items()} | {"peak_mib": round(peak)}))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        keys = given.keys
        if given.smoke:
            given.rows = [20_000]
        if keys is None:
            from search import clustered  # which needs FAISS

            keys = Path(folder) / "keys.npy"
            np.save(keys, clustered(min(given.rows[0], 1_000_000), 32 if given.smoke else 256, seed=0))
        results = []
        for rows in given.rows:
            home, result = Path(folder) / str(rows), {"rows": rows}
            for name in given.steps:
                size = ["--rows", str(rows), "--keys", str(keys)]
                command = [sys.executable, __file__, *size, "--step", name, str(home)]
                result[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                print(rows, name, result[name], file=sys.stderr, flush=True)
            results.append(result)
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
