"""Tokens a second of two workers of a plan, and of one.

    python benchmarks/workers.py --model DIR --documents FILE.jsonl --tokens 20000
    python benchmarks/workers.py --smoke               seconds, with the demo's model

The same plan is encoded with one process of one thread and with two, in turn. The time runs from the first
batch to the last, so starting processes and loading the model are left out; `seconds` has them. JSON goes to
stdout. `large.py --planned` measures the commit.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from large import TINY_LM, write_words

import knnstore
from knnstore.distributed import PlanFolder, encode_shards_in_processes, make_plan
from knnstore.documents import read_documents
from knnstore.lm import load_text_parts
from knnstore.progress import Progress


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
        tokens += len(lm.reader.tokenize(document.text))
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
            encode_shards_in_processes(
                plan_folder, workers, model=options.model, device="cpu", progress=clock
            )
            rates[workers].append(clock.rate)
            seconds[workers].append(time.perf_counter() - started)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "tokens": plan.tokens, "shards": len(plan.shards), "two_workers_to_one": statistics.median(ratios),
        "ratios": ratios, "tokens_a_second": rates, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--documents", type=Path, help="JSON Lines with id and text")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to encode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.documents = Path(folder) / "words.jsonl"
            tokenizer = load_text_parts(options.model).tokenizer
            assert tokenizer is not None
            options.documents.write_text("\n".join(map(json.dumps, write_words(tokenizer, 0, 4_000))))
            options.rounds = 1
        elif options.documents is None:
            parser.error("choose --documents FILE.jsonl or --smoke")
        result = measure_workers(options, Path(folder))
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
