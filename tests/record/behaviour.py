"""Records what the whole product computes, as numbers that must not change.

Three kinds of store hold the documents of `examples/workshop` with the model of `examples/tiny-lm`: keys of
one state, keys of several joined states, and n-grams without keys. `record_predictions` collects evaluation,
token log-probabilities, generated tokens and explanations; with fixed weights, weights by distance, weights
by domain, a cache, and the gate over all components. `record_calibration` collects what `calibrate` finds and
saves. The records lie beside this file as JSON; write them again with

    python -m tests.record.behaviour

after a change that is meant to alter predictions.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import knnstore
from knnstore import KNNSettings
from knnstore.documents import read_documents
from knnstore.lm import (
    CacheSettings,
    DomainWeights,
    KNNLMForCausalLM,
    NGramSettings,
    TokenTable,
    settings_for,
)
from knnstore.lm.mixing import load_plugin_mixers

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "examples" / "tiny-lm"
WORKSHOP = ROOT / "examples" / "workshop"
ENGINES: dict[str, dict[str, Any]] = {
    "cells": {"store": "cells", "params": {"cells": 24}},
    "faiss": {"store": "faiss"},
}
SCORED_TOKENS = 200
GENERATED_TOKENS = 20
PROMPT = "The brakes are checked before a bicycle leaves the"
NGRAMS = NGramSettings(order=6, lam=0.25)


def weigh_cache(lm: KNNLMForCausalLM) -> KNNSettings:
    """Settings with every component, each with a fixed weight."""
    own = NGramSettings(order=5, lam=0.2)
    cache = CacheSettings(120, settings_for(lm.store).temperature, 0.2, own)
    return KNNSettings(lam=0.3, cache=cache, ngrams=NGRAMS)


Choose = Callable[[KNNLMForCausalLM], KNNSettings]

STORES: dict[str, tuple[dict[str, Any], dict[str, Choose]]] = {
    "keys": ({"states": 1}, {"keys": lambda _: KNNSettings(lam=0.3)}),
    "joined": (
        {},
        {
            "joined": lambda _: KNNSettings(),
            "cache": weigh_cache,
            "domains": lambda _: KNNSettings(mixer=DomainWeights(("handbook", "log"), (0.3, 0.1))),
        },
    ),
    "ngrams": ({"key": None}, {"ngrams": lambda _: KNNSettings(lam=0.0, ngrams=NGRAMS)}),
}
"""For each kind of store: arguments of `knnstore.create`, and by name the settings that it is tried with."""

CASES = [("keys", "cells"), ("keys", "faiss"), ("joined", "cells"), ("joined", "faiss"), ("ngrams", "none")]
"""Every kind of store on every engine; a store without keys has no engine."""


def read_held_out(part: str) -> list[Any]:
    return list(read_documents([WORKSHOP / part]))


@contextmanager
def make_store(kind: str, engine: str, home: Path) -> Iterator[KNNLMForCausalLM]:
    """Create a store of one kind with the workshop's handbook and log, and close it at the end."""
    torch.set_num_threads(1)
    options, _ = STORES[kind]
    with knnstore.create(home, str(MODEL), **ENGINES.get(engine, {}), **options) as lm:
        lm.add(read_documents([WORKSHOP / "handbook"]), domain="handbook")
        lm.add(read_documents([WORKSHOP / "log.jsonl"]), domain="log")
        yield lm


def record_predictions(lm: KNNLMForCausalLM, knn: KNNSettings) -> dict[str, Any]:
    """Evaluate, score, generate and explain with the given settings.

    Returns:
        JSON values: ``ppl`` (perplexity of model and mixture, mean T and λ), ``tokens`` (by `evaluate`:
        token, log p of model and mixture, λ), ``forward`` (log p of the mixture by one pass), ``generated``
        (token ids by decoding method), ``explained`` (three tokens).
    """
    lm.knn = knn
    held_out, table = read_held_out("test"), TokenTable()
    evaluated = lm.evaluate(held_out, table=table)
    rows = list(table.rows(lm.tokenizer))[:SCORED_TOKENS]
    return {
        "ppl": [evaluated.base_ppl, evaluated.knn_ppl, evaluated.temperature, evaluated.lam],
        "tokens": [
            [row["token"], *(float(torch.tensor(row[name]).log()) for name in ("p_lm", "p")), row["lambda"]]
            for row in rows
        ],
        "forward": score_with_forward(lm, [row["token"] for row in rows][:80]),
        "generated": generate_in_all_ways(lm),
        "explained": explain_three_tokens(lm),
    }


def score_with_forward(lm: KNNLMForCausalLM, tokens: list[int]) -> list[float]:
    """Log-probability of each token but the first, by one pass of the wrapped model."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        log_probs = lm(ids).logits.log_softmax(-1)
    return log_probs[0, :-1].gather(1, ids[0, 1:, None])[:, 0].tolist()


def generate_in_all_ways(lm: KNNLMForCausalLM) -> dict[str, list[int]]:
    """Token ids of a continuation by each decoding method."""
    prompt = lm.tokenizer(PROMPT, return_tensors="pt").input_ids
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "beam": {"do_sample": False, "num_beams": 3},
        "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 40},
        "drafted": {"do_sample": False, "draft": True},
    }
    generated = {}
    for name, options in ways.items():
        torch.manual_seed(7)
        ids = lm.generate(prompt, max_new_tokens=GENERATED_TOKENS, min_new_tokens=GENERATED_TOKENS, **options)
        generated[name] = ids[0, prompt.shape[1] :].tolist()
    return generated


def explain_three_tokens(lm: KNNLMForCausalLM) -> list[dict[str, Any]]:
    """The last three tokens of a prompt: probabilities, components and the two nearest sources."""
    explained = lm.explain(PROMPT, neighbors=2)
    return [
        {
            "token": one.token,
            "p": [one.p_lm, one.p_knn, one.lam, one.p],
            "parts": {part.name: [part.weight, part.p] for part in one.parts},
            "sources": [[source.document, source.position, source.share] for source in one.neighbors],
        }
        for one in explained[-3:]
    ]


def record_calibration(lm: KNNLMForCausalLM) -> dict[str, Any]:
    """Calibrate on the workshop's held-out documents, and predict with what is in force then.

    Returns:
        JSON values: perplexity of each candidate and of the choice, the main values of the saved settings,
        and ``calibrated``, the predictions with these; in a store with keys they are those of the gate.
    """
    found = lm.calibrate(read_held_out("dev"))
    knn = lm.knn
    return {
        "candidates": {
            one.name: one.held_out.ppl
            for one in found.comparison.candidates
            if one.name not in load_plugin_mixers()  # of packages that may be installed
        },
        "best": found.comparison.best.name,
        "expected": found.comparison.expected.ppl,
        "is_saved": found.record is not None,
        "has_gate": knn.gate is not None,
        "k": knn.k,
        "probes": knn.probes,
        "temperature": knn.temperature,
        "components": list(knn.components),
        "scoring_only": list(knn.scoring_only),
        "ngrams": None if knn.ngrams is None else [knn.ngrams.order, knn.ngrams.lam],
        "cache": None if knn.cache is None else [knn.cache.size, knn.cache.temperature, knn.cache.lam],
        "calibrated": record_predictions(lm, knn),
    }


def record_given_settings(kind: str, lm: KNNLMForCausalLM) -> dict[str, Any]:
    """The predictions with each of the settings that a kind of store is tried with, by name."""
    _, settings = STORES[kind]
    return {name: record_predictions(lm, choose(lm)) for name, choose in settings.items()}


def path_of(kind: str, engine: str) -> Path:
    return Path(__file__).parent / f"{kind}-{engine}.json"


if __name__ == "__main__":
    for kind, engine in CASES:
        with tempfile.TemporaryDirectory() as folder, make_store(kind, engine, Path(folder) / "home") as lm:
            found = {"given": record_given_settings(kind, lm), "calibration": record_calibration(lm)}
        path_of(kind, engine).write_text(json.dumps(found, indent=1) + "\n")
        print(path_of(kind, engine).name, file=sys.stderr)
