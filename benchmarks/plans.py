"""Plans: tokens a second of two workers and of one, and the commit of many shards.

    python benchmarks/plans.py workers --model DIR --documents FILE.jsonl --tokens 20000
    python benchmarks/plans.py commit --shards 100 --shard-tokens 100000 --folder DIR
    python benchmarks/plans.py --smoke               seconds, with the demo's model

`workers` encodes the same plan with one process of one thread and with two, in turn. The time runs from the
first batch to the last, so starting processes and loading the model are left out; `seconds` has them.
`commit` fills a plan of random words with synthetic keys, as wide as the model's, and commits it in a process
of its own, so that its memory can be told. JSON goes to stdout.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from search import clustered

import knnstore
from knnstore.distributed import PlanFolder, commit_plan, encode_with_processes, make_plan
from knnstore.documents import read_documents
from knnstore.lm import load_text_parts
from knnstore.progress import Progress
from knnstore.store import KNNStore

TINY_LM = Path(__file__).parent.parent / "examples" / "tiny-lm"
DOCUMENT_WORDS = 1_000
DISTINCT_KEYS = 200_000
"""Synthetic keys; those of a shard are drawn from them, with a little noise."""


class Clock(Progress):
    """Counts tokens, and notes when the first and the last of them arrived."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first: float | None = None
        self.last = 0.0

    def advance(self, amount: int) -> None:
        """Count tokens. Those of the first batch do not count: they were encoded before it arrived."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        else:
            self.tokens += amount

    @property
    def rate(self) -> float:
        """Tokens a second."""
        assert self.first is not None
        return self.tokens / (self.last - self.first)


def measure_workers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Encode a plan with one and with two processes, in turn."""
    lm = knnstore.create(folder / "home", options.model)
    assert lm.tokenizer is not None
    documents, tokens = [], 0
    for document in read_documents([options.documents]):
        documents.append(document)
        tokens += len(lm.reader.tokens(document.text))
        if tokens >= options.tokens:
            break
    plan_folder = PlanFolder(folder / "plan")
    plan = make_plan(lm.store, lm.tokenizer, documents, plan_folder, domain="d", shard_tokens=tokens // 20)
    assert plan is not None
    lm.store.close()
    rates: dict[int, list[float]] = {1: [], 2: []}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for repeat in range(options.rounds):
        for workers in (1, 2) if repeat % 2 else (2, 1):
            shutil.rmtree(plan_folder.key_files, ignore_errors=True)
            torch.set_num_threads(workers)  # the workers share them
            clock, started = Clock(), time.perf_counter()
            encode_with_processes(plan_folder, workers, model=options.model, device="cpu", progress=clock)
            rates[workers].append(clock.rate)
            seconds[workers].append(time.perf_counter() - started)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "tokens": plan.tokens, "shards": len(plan.shards), "two_workers_to_one": statistics.median(ratios),
        "ratios": ratios, "tokens_a_second": rates, "seconds": seconds,
    }  # fmt: skip


def measure_commit(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make a plan of random words, write synthetic keys, and commit it."""
    home, plan_folder = folder / "home", PlanFolder(folder / "plan")
    lm = knnstore.create(home, options.model)
    assert lm.tokenizer is not None
    words = write_words(lm.tokenizer, options.shards * options.shard_tokens)
    started = time.perf_counter()
    plan = make_plan(
        lm.store, lm.tokenizer, words, plan_folder, domain="d", shard_tokens=options.shard_tokens
    )
    planning = time.perf_counter() - started
    assert plan is not None
    lm.store.close()
    some, draw = clustered(DISTINCT_KEYS, plan.identity.dim, seed=0), np.random.default_rng(0)
    noise = some.std(0) / 10
    for shard in plan.shards:
        keys = some[draw.integers(len(some), size=shard.records)]
        keys += draw.standard_normal(keys.shape, np.float32) * noise
        plan_folder.write_keys(shard, keys.astype(plan.dtype))
    queue: Any = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(
        target=commit, args=(home, plan_folder.path, queue)
    )
    process.start()
    committed = queue.get()
    process.join()
    size = sum(file.stat().st_size for file in (home / "keys").rglob("*") if file.is_file())
    return {
        "tokens": plan.tokens, "shards": len(plan.shards), "dim": plan.identity.dim,
        "planning_seconds": planning, **committed, "bytes_a_record": size / plan.tokens,
    }  # fmt: skip


def write_words(tokenizer: Any, tokens: int) -> Iterator[dict[str, str]]:
    """Yield documents of random words with about so many tokens in all."""
    words = [tokenizer.decode([id]) for id in range(300, 2_300)]
    words = [word for word in words if word.strip().isalpha()]
    for number, draw in enumerate(np.random.default_rng(0).spawn(tokens // DOCUMENT_WORDS)):
        yield {"id": f"d{number}", "text": "".join(draw.choice(words, DOCUMENT_WORDS))}


def commit(home: Path, folder: Path, results: Any) -> None:
    """Commit a plan; puts what it took into a queue. Runs in a process of its own."""
    before, started, processor = read_peak(), time.perf_counter(), time.process_time()
    with KNNStore.open(home, "a") as store:
        committed = commit_plan(store, PlanFolder(folder))
    results.put(
        {
            "documents": committed.documents,
            "commit_seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - processor,
            "peak_mib": read_peak(),
            "peak_mib_before": before,
        }
    )


def read_peak() -> int:
    """Return the largest memory that this process had, mapped files that it read included, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["workers", "commit"], nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--documents", type=Path, help="JSON Lines with id and text, for `workers`")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to encode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--shard-tokens", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the plan and the store are made")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.smoke:
            options.documents = Path(folder) / "words.jsonl"
            rows = write_words(load_text_parts(options.model).tokenizer, 4_000)
            options.documents.write_text("\n".join(map(json.dumps, rows)))
            options.rounds, options.shards, options.shard_tokens = 1, 3, 12_000
            result = {
                "workers": measure_workers(options, Path(folder) / "workers"),
                "commit": measure_commit(options, Path(folder) / "commit"),
            }
        elif options.what == "workers" and options.documents:
            result = measure_workers(options, Path(folder))
        elif options.what == "commit":
            result = measure_commit(options, Path(folder))
        else:
            parser.error("choose `workers --documents FILE.jsonl`, `commit` or --smoke")
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
