"""A store of many records: made, arranged, weighed, opened, searched, grown, removed from and erased.

    python benchmarks/large.py --rows 1000000 10000000 --keys KEYS.npy
    python benchmarks/large.py --rows 1000000 10000000 --keys KEYS.npy --planned
    python benchmarks/large.py --smoke                a few seconds

With `--planned` the store is made and grown by plans, as several machines make it: shards of 100,000 tokens
of random words, with the same keys, are committed in one transaction for each domain.

KEYS.npy holds keys of a language model, shape (n, dim). The last 4,096 are the queries and are not stored.
The others are repeated, with a tenth of their spread added as noise, until there are enough; without `--keys`
they are synthetic. Each step is a process of its own, so that its memory can be told. JSON goes to stdout.
Seconds include neither imports nor making the keys; `peak_mib` is all that the process ever had in memory,
torch, keys being made and mapped files that were read included; `peak_anonymous_mib` leaves out what files
back: libraries and mapped keys.

Stores of several sizes are asked at equal recall of mass: the first with 16 probes, each other one with the
fewest that hold as large a share of the exact sum. The ratios of their times are the last line on stderr.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

import knnstore
from knnstore.catalog import Identity, NewDocument
from knnstore.datastore import Keys, Metric, pairwise_distances
from knnstore.distributed import SHARD_TOKENS, PlanFolder, commit_plan, make_plan
from knnstore.lm import load_text_parts
from knnstore.store import KNNStore

TINY_LM = Path(__file__).parent.parent / "examples" / "tiny-lm"
DOCUMENT = 1_000
BATCH = 50
"""Documents of one commit."""
DOMAINS = ("first", "second")
QUERIES, PROBES = 4096, 16
DIM = 256
"""Components of synthetic keys, as the demo's model has."""
DISTANCES = 1 << 26
"""Of so many queries at once, where many ask: as scoring does it, so that memory is bounded."""
LADDER = [1, 2, 4, 8, 12, *range(16, 64, 4), *range(64, 256, 16), 256]
"""Numbers of probes whose shares of the sum are measured."""
ALONE = 64
"""Queries that are asked one by one, and those by which recall is measured."""


class Run(NamedTuple):
    """What a step works on."""

    home: Path
    source: Path
    rows: int
    probes: int


def queries_of(source: Path) -> Keys:
    """Return the queries, float32, shape (QUERIES, dim)."""
    return np.array(np.load(source, mmap_mode="r")[-QUERIES:], np.float32)


def key_batches(source: Path, start: int, rows: int) -> Iterator[Keys]:
    """Return the keys of the records of one commit, from a place on, float32."""
    base = np.load(source, mmap_mode="r")[:-QUERIES]
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


def write_plan(run: Run, domain: str, start: int, rows: int) -> dict[str, float]:
    """Plan documents of random words, and write keys for their shards; returns seconds."""
    tokenizer = load_text_parts(TINY_LM).tokenizer
    assert tokenizer is not None
    folder, begun = PlanFolder(find_plan(run, domain)), time.perf_counter()
    with KNNStore.open(run.home, "a") as store:
        plan = make_plan(store, tokenizer, write_words(tokenizer, start, rows), folder, domain=domain)
    assert plan is not None
    planning, begun = time.perf_counter() - begun, time.perf_counter()
    for shard in plan.shards:
        keys = np.concatenate([*key_batches(run.source, start + shard.start, shard.records)])
        folder.write_keys(shard, keys.astype(plan.dtype))
    return {
        f"{domain}_shards": len(plan.shards),
        f"{domain}_tokens": plan.tokens,
        f"{domain}_planning_seconds": planning,
        f"{domain}_keys_seconds": time.perf_counter() - begun,
    }


def write_words(tokenizer: PreTrainedTokenizerBase, start: int, rows: int) -> Iterator[dict[str, str]]:
    """Yield documents of random words, with about so many tokens in all."""
    words = [tokenizer.decode([id]) for id in range(300, 2_300)]
    words = [word for word in words if word.strip().isalpha()]
    for number in range(start, start + rows, DOCUMENT):
        draw = np.random.default_rng(number)
        yield {"id": f"{number}", "text": "".join(draw.choice(words, min(DOCUMENT, start + rows - number)))}


def find_plan(run: Run, domain: str) -> Path:
    """Return the folder of the plan of a domain."""
    return run.home.with_name(f"{run.home.name}-{domain}")


def commit(store: KNNStore, run: Run, domain: str) -> dict[str, float]:
    """Commit the plan of a domain, and remove its folder; returns seconds."""
    begun, processor = time.perf_counter(), time.process_time()
    commit_plan(store, PlanFolder(find_plan(run, domain)))
    found = {
        f"{domain}_seconds": time.perf_counter() - begun,
        f"{domain}_processor_seconds": time.process_time() - processor,
    }
    shutil.rmtree(find_plan(run, domain))
    return found


def planned(run: Run) -> dict[str, Any]:
    """Make a store without records, and the plans of its two domains, of which the second has a tenth."""
    knnstore.create(run.home, TINY_LM).store.close()
    small = run.rows // 10
    return write_plan(run, "second", 0, small) | write_plan(run, "first", small, run.rows - small)


def committed(run: Run) -> dict[str, Any]:
    """Commit both plans."""
    with KNNStore.open(run.home, "a") as store:
        return commit(store, run, "second") | commit(store, run, "first") | count_bytes(run)


def grown_by_shard(run: Run) -> dict[str, Any]:
    """Plan and commit one shard more."""
    write_plan(run, "first", run.rows, min(run.rows, SHARD_TOKENS))
    with KNNStore.open(run.home, "a") as store:
        return commit(store, run, "first")


def made(run: Run) -> dict[str, Any]:
    """Make the store, in two domains of which the second has a tenth."""
    dim, small = queries_of(run.source).shape[1], run.rows // 10
    identity = Identity("none", "0" * 64, "0" * 64, "key", dim, "l2", 1000, 16, 8)
    with KNNStore.create(run.home, identity) as store:
        seconds = add(store, "second", run.source, 0, small)
        return {"seconds": seconds + add(store, "first", run.source, small, run.rows - small)}


def arranged(run: Run) -> dict[str, Any]:
    """Merge segments and put all records in cells."""
    with KNNStore.open(run.home, "a") as store:
        begun = time.perf_counter()
        store.optimize()
        seconds = time.perf_counter() - begun
    return {"seconds": seconds} | count_bytes(run)


def count_bytes(run: Run) -> dict[str, float]:
    """Return the bytes of keys for each record, and the size of the whole home in multiples of them."""
    size = sum(file.stat().st_size for file in run.home.rglob("*") if file.is_file())
    keys = sum(file.stat().st_size for file in (run.home / "keys").rglob("*") if file.is_file())
    return {"bytes_a_record": keys / run.rows, "home_to_keys": size / keys}


def weighed(run: Run) -> dict[str, Any]:
    """How much of the sum over all records the nearest cells hold, on average: recall of mass.

    The temperature is a tenth of the keys' variance. `shares` are those of each number of probes.
    """
    queries = queries_of(run.source)[:: QUERIES // ALONE]
    temperature = np.load(run.source, mmap_mode="r")[:20_000].astype(np.float32).var(0).sum() / 10
    exact, shares = np.zeros(len(queries)), dict[int, float]()
    with KNNStore.open(run.home) as store:
        for _, keys in store.records():
            exact += np.exp(-pairwise_distances(queries, keys, Metric.L2) / temperature).sum(1)
        for probes in sorted({*LADDER, run.probes}):
            near = np.zeros(len(queries))
            for visit in (one for some in store.visit(queries, probes) for one in some.split()):
                near[visit.queries] += np.exp(-visit.distances / temperature).sum(1)
            shares[probes] = round(float((near / exact).mean()), 4)
    return {"shares": shares}


def searched(run: Run) -> dict[str, Any]:
    """Open the store for a first query, ask some one by one, twice, and then many together, twice."""
    queries = queries_of(run.source)
    with suppress(ImportError):
        import faiss  # noqa: F401  # which measures by tables; imports do not count
    begun, processor = time.perf_counter(), time.process_time()
    with KNNStore.open(run.home) as store:
        store.visit(queries[-1:], run.probes)
        found = {
            "open_and_first_query": time.perf_counter() - begun,
            "processor_seconds": time.process_time() - processor,
        }
        alone = queries[:: QUERIES // ALONE, None]
        for name in "query_alone_unread_ms", "query_alone_ms":
            found[name] = float(np.median([milliseconds(store, query, run.probes) for query in alone]))
        visits = (one for some in store.visit(alone[:, 0], run.probes) for one in some.split())
        found["records_visited"] = sum(one.distances.size for one in visits) / len(alone)
        at_once = max(1, int(DISTANCES / found["records_visited"]))
        pieces = [queries[at : at + at_once] for at in range(0, len(queries), at_once)]
        for name in "query_unread_ms", "query_ms":
            spent = [milliseconds(store, piece, run.probes) for piece in pieces]
            found[name] = sum(spent) / len(queries)
    if torch.cuda.is_available():
        found["gpu_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return {"probes": run.probes} | found


def milliseconds(store: KNNStore, queries: Keys, probes: int) -> float:
    """How long it takes to ask some queries at once."""
    begun = time.perf_counter()
    store.visit(queries, probes)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def grown(run: Run) -> dict[str, Any]:
    """Add a hundredth, and arrange it."""
    with KNNStore.open(run.home, "a") as store:
        seconds = add(store, "first", run.source, run.rows, run.rows // 100)
        begun = time.perf_counter()
        store.optimize()
        return {"seconds": seconds, "arrange_seconds": time.perf_counter() - begun}


def removed(run: Run) -> dict[str, Any]:
    """Remove a document, then a domain, a tenth of all."""
    with KNNStore.open(run.home, "a") as store:
        begun = time.perf_counter()
        store.remove_document(str(run.rows // 2), domain="first")
        document = time.perf_counter() - begun
        begun = time.perf_counter()
        store.remove_domain("second")
        return {"document_seconds": document, "domain_seconds": time.perf_counter() - begun}


def erased(run: Run) -> dict[str, Any]:
    """Erase what was removed."""
    with KNNStore.open(run.home, "a") as store:
        return {"seconds": store.erase().seconds}


STEPS: dict[str, Callable[[Run], dict[str, Any]]] = {
    step.__name__: step
    for step in (
        made, arranged, planned, committed, weighed, searched, grown, grown_by_shard, removed, erased
    )
}  # fmt: skip
ASKED = ["weighed", "searched"]
ADDED = ["made", "arranged", *ASKED, "grown", "removed", "erased"]
PLANNED = ["planned", "committed", *ASKED, "grown_by_shard", "removed", "erased"]


class Watch(threading.Thread):
    """Looks again and again how much memory the process has that no file backs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        """Bytes."""

    def run(self) -> None:
        while True:
            self.most = max(self.most, anonymous())
            time.sleep(0.02)


def anonymous() -> int:
    """Bytes of memory that no file backs, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def done_here(step: str, run: Run) -> dict[str, Any]:
    """Do a step in this process; returns what it found, and what memory it took."""
    watch = Watch()
    watch.start()
    found = {name: round(one, 4) if isinstance(one, float) else one for name, one in STEPS[step](run).items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found | {"peak_mib": peak, "peak_anonymous_mib": watch.most >> 20}


def probes_for(share: float, shares: dict[str, float]) -> int:
    """Return the fewest measured probes that reach a recall; else the most."""
    return int(next((probes for probes, held in shares.items() if held >= share), [*shares][-1]))


def ratios(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the times of a query in the largest store, as multiples of those in the first."""
    first, last = (result["searched"] for result in (results[0], results[-1]))
    return {name: round(last[name] / first[name], 2) for name in first if name.startswith("query")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--keys", type=Path, help="keys as numpy's array, shape (n, dim)")
    parser.add_argument("--folder", type=Path, help="where the stores are made; default a temporary folder")
    parser.add_argument("--planned", action="store_true", help="make the stores by plans")
    parser.add_argument("--steps", nargs="+", choices=STEPS, help="in this order; default all")
    parser.add_argument("--smoke", action="store_true", help="small, and nothing can be concluded from it")
    parser.add_argument("--probes", type=int, default=PROBES, help="cells of a query in the first store")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "HOME"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        name, home = given.step
        print(json.dumps(done_here(name, Run(Path(home), given.keys, given.rows[0], given.probes))))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        keys, cases = given.keys, [(rows, given.planned) for rows in given.rows]
        if given.smoke:
            cases = [(20_000, False), (20_000, True)]
        if keys is None:
            from search import clustered  # which needs FAISS

            keys = Path(folder) / "keys.npy"
            np.save(keys, clustered(min(cases[0][0], 1_000_000), DIM, seed=0))
        # As where it is installed: modules that opening imports were compiled before.
        compiling = {name: one for name, one in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        results: list[dict[str, Any]] = []
        for number, (rows, is_planned) in enumerate(cases):
            home, result, probes = Path(folder) / f"{number}", {"rows": rows}, given.probes
            for name in given.steps or (PLANNED if is_planned else ADDED):
                size = ["--rows", str(rows), "--keys", str(keys), "--probes", str(probes)]
                command = [sys.executable, __file__, *size, "--step", name, str(home)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=compiling)
                result[name] = json.loads(done.stdout)
                print(rows, name, result[name], file=sys.stderr, flush=True)
                if name == "weighed" and results:
                    share = results[0][name]["shares"][str(given.probes)]
                    probes = probes_for(share, result[name]["shares"])
            results.append(result)
        if len(results) > 1 and "searched" in results[0]:
            print("at equal recall of mass:", ratios(results), file=sys.stderr)
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
