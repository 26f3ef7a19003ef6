"""How much of the bare forward pass's speed is left when everything is stored, and of scoring's parts.

    python benchmarks/ingest.py [--model DIR] [--documents FILE.jsonl] [--tokens N] [--engine cells]

Two comparisons, each with both sides in turn in one process, JSON on standard output:

* adding documents (tokenizing, forward pass, copying, hashing, fsync, SQL; with cells also codes and
  finding the cells) against the forward pass alone, without the output head, over the same batches;
* what p_kNN of the gold token and mixing cost within a scoring step of model, search and mixing.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch

import knnstore
from knnstore.datastore import tokens_from_ids
from knnstore.documents import TextDocument, read_documents
from knnstore.lm.mixing import Contribution, Mixture, compute_neighbor_weights
from knnstore.store import EVERYTHING

PARAMS: dict[str, dict[str, object]] = {
    "faiss": {"index": "exact"},  # what is compared is storing, not the training of an index
    "cells": {"codes": "pq32", "coded_from": 8_192},
}
TINY_LM = Path(__file__).parent.parent / "examples" / "tiny-lm"


def documents_of(path: Path | None) -> list[TextDocument]:
    if path is not None:
        return list(read_documents([path]))
    return [TextDocument(name, text) for name, text in sorted(topics.items()) if text.strip()]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--documents", type=Path, help="JSON Lines; default is Python's language reference")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens stored in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-k", type=int, default=1024)
    parser.add_argument("--engine", choices=PARAMS, default="faiss")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.rounds = 8_192, 2

    with tempfile.TemporaryDirectory() as folder:
        home, params = Path(folder) / "home", PARAMS[options.engine]
        lm = knnstore.create(home, model=options.model, store=options.engine, device="cpu", params=params)
        identity, chosen, tokens = lm.store.identity, [], []
        for document in documents_of(options.documents):
            chosen.append(document)
            tokens.append(lm.reader.tokenize(document.text))
            if sum(map(len, tokens)) >= options.tokens:
                break
        batches = list(lm.reader.batch_windows(tokens))
        stored = sum(len(batch.at) for batch in batches)

        def forward() -> None:
            with torch.inference_mode():
                for batch in batches:
                    lm.base.base_model(torch.from_numpy(batch.input_ids), use_cache=False)

        def ingest() -> None:
            added = lm.add(chosen, domain=f"round {len(adding)}")
            assert added.tokens == stored

        bare: list[float] = []
        adding: list[float] = []
        forward()  # warm up
        for _ in range(options.rounds):
            bare.append(timed(forward))
            adding.append(timed(ingest))
            lm.store.remove_domain(f"round {len(adding) - 1}")

        lm.add(chosen, domain="all")
        parts: dict[str, list[float]] = {"model": [], "search": [], "gold": []}
        for batch in islice(batches, 2 if options.smoke else 8):
            started = time.perf_counter()
            encoded = lm.key_encoder.encode(batch.input_ids, batch.at)
            log_probs = lm.key_encoder.target_log_probs(encoded.states, batch.gold)
            modeled = time.perf_counter()
            found = lm.store.search(encoded.keys.numpy(), options.k, EVERYTHING)
            searched = time.perf_counter()
            weights = compute_neighbor_weights(torch.from_numpy(found.distances), 20.0)
            neighbors = torch.from_numpy(tokens_from_ids(found.ids))
            mixture = Mixture([Contribution(weights, torch.full((len(weights),), 0.5), neighbors)])
            mixture.target_log_probs(log_probs, torch.from_numpy(batch.gold))
            mixed = time.perf_counter()
            for name, seconds in zip(
                parts, (modeled - started, searched - modeled, mixed - searched), strict=True
            ):
                parts[name].append(seconds)
        totals = {name: sum(seconds) for name, seconds in parts.items()}
        lm.store.close()

    ratios = [b / a for a, b in zip(adding, bare, strict=True)]
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "engine": options.engine,
        "model": identity.model_fingerprint[:12],
        "tokens_a_round": stored,
        "forward_tokens_per_s": spread([stored / seconds for seconds in bare]),
        "ingest_tokens_per_s": spread([stored / seconds for seconds in adding]),
        "ingest_over_forward": spread(ratios),
        "k": options.k,
        "scoring_seconds": totals,
        "gold_and_mixing_share": totals["gold"] / sum(totals.values()),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
