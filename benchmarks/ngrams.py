"""N-grams of the stored text beside keys: perplexity, seconds to count them, memory, and speed.

    python benchmarks/ngrams.py DATA --model DIR [--domain NAME ...] [--records 275000] [--engine cells]
    python benchmarks/ngrams.py DATA --model DIR --calibrated [--states 1 3] [--domain NAME ...]
    python benchmarks/ngrams.py --smoke             a few seconds, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``. A temperature
and one weight of each component are fitted on ``dev``, the weights by EM; perplexity is of ``test``. Speeds
are ratios to the model alone, sides run in turn, medians of their rounds; ``--rounds 0`` leaves them out.
With ``--calibrated`` everything is fitted by `calibrate` on ``dev`` instead, components in turn, of which the
best candidate is taken, and one gate over all of them: with n-grams and without, with the cache and
without, for keys of one state and of several. JSON goes to stdout.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from cells import FACTORS, ROUNDS, STEPS, TINY_LM, Parts, documents, gold_probs, in_turn, ratios, smoke_parts
from cells import writing as writes
from torch import Tensor

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import FixedLambda, KNNLMForCausalLM, KNNSettings, NGramSettings
from knnstore.lm.scoring.token_scores import score_documents

EM_ROUNDS = 100
SIDES = {"lm": (0,), "lm + kNN": (0, 1), "lm + n-grams": (0, 2), "all": (0, 1, 2)}


def weights_of(probs: Tensor) -> Tensor:
    """Return the likeliest weight of each distribution, given their probabilities, shape (n, components)."""
    weights = torch.ones(probs.shape[1], dtype=torch.float64) / probs.shape[1]
    for _ in range(EM_ROUNDS):
        shares = probs * weights
        weights = (shares / shares.sum(1, keepdim=True)).mean(0)
    return weights


def perplexity(probs: Tensor, weights: Tensor) -> float:
    """Of n tokens with these weights."""
    return math.exp(-float((probs @ weights).log().mean()))


def probs_of(
    lm: KNNLMForCausalLM, texts: Sequence[Any], settings: KNNSettings, temperatures: list[float]
) -> list[Tensor]:
    """Return each component's probability of each token: a matrix for each temperature, float64, (n, 3)."""
    base, knn = gold_probs(lm, list(texts), replace(settings, ngrams=None), temperatures)
    parts = score_documents(lm.store, lm.reader, texts, replace(settings, k=1, lam=0.0))
    ngrams = torch.cat([part.evidence.found["n-grams"].probs for part in parts])
    return [torch.stack([base.exp(), column, ngrams], 1).double() for column in knn.T]


def measure(lm: KNNLMForCausalLM, parts: Parts, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one domain."""
    lm.add(parts["store"], domain="d")
    started = time.perf_counter()
    counts = lm.store.ngrams()
    seconds = time.perf_counter() - started
    tokens = lm.store.record_count()
    settings = replace(lm.knn, ngrams=NGramSettings(options.order))
    if options.probes:
        settings = replace(settings, probes=options.probes)
    temperatures = [factor * lm.knn.temperature for factor in FACTORS]
    dev, test = (probs_of(lm, parts[part], settings, temperatures) for part in ("dev", "test"))
    knn = list(SIDES["lm + kNN"])
    fitted = [perplexity(probs[:, knn], weights_of(probs[:, knn])) for probs in dev]
    best = fitted.index(min(fitted))
    result: dict[str, Any] = {
        "tokens": tokens,
        "test_tokens": len(test[best]),
        "count_seconds": round(seconds, 3),
        "bytes_a_token": round(counts.nbytes / tokens, 1),
    }
    for name, components in SIDES.items():
        weights = weights_of(dev[best][:, list(components)])
        ppl = perplexity(test[best][:, list(components)], weights)
        result[name] = {"ppl": round(ppl, 2), "weights": [round(one, 3) for one in weights.tolist()]}
    settings = replace(settings, temperature=temperatures[best], mixer=FixedLambda(0.5))
    sides = {
        "alone": KNNSettings(lam=0.0),
        "n-grams": replace(settings, mixer=FixedLambda(0.0)),
        "kNN": replace(settings, ngrams=None),
        "all": settings,
    }
    if options.rounds:
        scoring = {name: lambda side=side: lm.evaluate(parts["test"], side) for name, side in sides.items()}
        steps = {name: writes(lm, side, 1, options.steps) for name, side in sides.items()}
        result["scoring"] = dict(ratios(in_turn(scoring, options.rounds)))
        result["step"] = dict(ratios(in_turn(steps, options.rounds)))
    return result


def calibrated(lm: KNNLMForCausalLM, parts: Parts) -> dict[str, Any]:
    """Perplexity of test with settings that were fitted on dev, in turn and by one gate."""
    lm.add(parts["store"], domain="d")
    result: dict[str, Any] = {"tokens": lm.store.record_count()}
    for ngrams in (False, True):
        found = lm.calibrate(parts["dev"], ngrams=ngrams)
        candidates = found.comparison.candidates
        without_gate = [one for one in candidates if one.settings.gate is None]
        gate = next(one.settings for one in candidates if one.settings.gate is not None)
        in_turn = min(without_gate, key=lambda one: one.held_out.ppl)
        no_cache = min(
            (one for one in without_gate if one.settings.cache is None), key=lambda one: one.held_out.ppl
        )
        sides = {
            f"cache, in turn ({in_turn.name})": in_turn.settings,
            "cache, one gate": gate,
            f"in turn ({no_cache.name})": no_cache.settings,
            "one gate": replace(gate, cache=None),
        }
        ppls = {name: round(lm.evaluate(parts["test"], side).knn_ppl, 2) for name, side in sides.items()}
        seconds = round(found.scoring_seconds, 1), round(found.fitting_seconds, 1)
        result["with n-grams" if ngrams else "without"] = {**ppls, "seconds": seconds}
    return result


def calibration_parts() -> Parts:
    """As `smoke_parts`, with enough to calibrate on."""
    texts = [TextDocument(name, text) for name, text in sorted(topics.items()) if 1000 < len(text) < 2000]
    return {"store": texts[:5], "dev": texts[5:14], "test": texts[14:16]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--domain", action="append")
    parser.add_argument("--records", type=int, default=275_000)
    parser.add_argument("--held-out", type=int, default=20_000, help="tokens of dev and of test")
    parser.add_argument("--engine", default="cells")
    parser.add_argument("--probes", type=int, help="of the engine's cells, in place of the default")
    parser.add_argument("--order", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--calibrated", action="store_true", help="fit by calibrate: in turn, and by one gate"
    )
    parser.add_argument("--states", type=int, nargs="+", default=[1], help="of the keys, with --calibrated")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and options.data is None:
        parser.error("name the folder of the data, or --smoke")
    if options.smoke:
        options.rounds, options.steps = 1, 4
    limits = {"store": options.records, "dev": options.held_out, "test": options.held_out}
    names = (
        ["help"] if options.smoke else options.domain or sorted(one.name for one in options.data.iterdir())
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            lm = knnstore.create(Path(folder) / name, options.model, store=options.engine)
            parts = smoke_parts() if options.smoke else documents(options.data / name, limits, lm)
            results[name] = {} if options.calibrated else measure(lm, parts, options)
            print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
            lm.store.close()
            for states in options.states if options.calibrated or options.smoke else ():
                home = Path(folder) / f"{name}, {states} states"
                lm = knnstore.create(home, options.model, store=options.engine, states=states)
                found = calibrated(lm, calibration_parts() if options.smoke else parts)
                results[name][f"{states} states"] = found
                print(json.dumps({name: found}), file=sys.stderr, flush=True)
                lm.store.close()
    print(json.dumps({"threads": torch.get_num_threads(), "domains": results}, indent=2))


if __name__ == "__main__":
    main()
