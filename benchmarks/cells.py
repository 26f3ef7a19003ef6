"""Sums over whole cells beside the k nearest: perplexity, speed of scoring and of one step, size.

    python benchmarks/cells.py DATA --model DIR [--domain NAME ...] [--records 275000] [--probes 8 16]
        [--codes none pq32 pq64] [--states 3] [--cells-only] [--device none]
    python benchmarks/cells.py --smoke              a few seconds, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``. Each side has a
store of its own with the same records: FAISS exact and by default with k = 1,024, and cells with each kind
of codes, moved from the first or, with ``--cells-only``, each made by itself. One temperature and one λ are
chosen on ``dev`` for each; perplexity is of ``test``. Speeds, but of exact search, are of sides that are run
in turn, as ratios to the model alone, medians of their rounds; ``--rounds 0`` leaves them out. With
``--states`` all of it once more with joined keys, and the ratio of their perplexity to that of single keys.
JSON goes to stdout, a table to stderr.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from knnstore_research.one_weight import fit_one_weight

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.scoring.token_scores import score_documents

TINY_LM = Path(__file__).parent.parent / "examples" / "tiny-lm"
K = 1024
ROUNDS = 5
STEPS = 48
FACTORS = [2 ** (quarter / 4) for quarter in range(-8, 7)]
"""Temperatures that are tried, as multiples of the default one."""

Parts = dict[str, list[TextDocument]]


def documents(folder: Path, limits: dict[str, int], lm: KNNLMForCausalLM) -> Parts:
    """Return the documents of a domain, up to a number of tokens of each part."""
    parts: Parts = {}
    for part, limit in limits.items():
        parts[part], tokens = [], 0
        for document in read_documents([folder / f"{part}.jsonl"]):
            tokens += lm.reader.count_predicted([document])
            if tokens > limit and parts[part]:
                break
            parts[part].append(document)
    return parts


def smoke_parts(dev: int = 1) -> Parts:
    """Python's own help, a few topics a part; 3 of `dev` are enough to calibrate on."""
    texts = [TextDocument(name, text) for name, text in sorted(topics.items()) if 2000 < len(text) < 6000]
    return {"store": texts[:8], "dev": texts[8 : 8 + dev], "test": texts[8 + dev : 9 + dev]}


def gold_probs(
    lm: KNNLMForCausalLM, texts: list[TextDocument], settings: KNNSettings, temperatures: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p_LM of each token, shape (n,), and p_kNN at each temperature, shape (n, m)."""
    base, found = [], []
    for part in score_documents(lm.store, lm.reader, texts, settings):
        base.append(part.lm_log_probs)
        (search,) = part.evidence.searches
        assert search.hits is not None
        found.append(torch.stack([(search.weights(one) * search.hits).sum(1) for one in temperatures], 1))
    return torch.cat(base), torch.cat(found).clamp(max=1.0)


def fitted(lm: KNNLMForCausalLM, parts: Parts, settings: KNNSettings) -> dict[str, float]:
    """Choose T and λ on dev; the perplexity of test."""
    temperatures = [factor * lm.knn.temperature for factor in FACTORS]
    base, knn = gold_probs(lm, parts["dev"], settings, temperatures)
    best = (math.inf, 0.0, 0.0)
    for column, temperature in enumerate(temperatures):
        lam = fit_one_weight(base, knn[:, column].log())
        loss = -float((lam * knn[:, column] + (1 - lam) * base.exp()).log().mean())
        best = min(best, (loss, temperature, lam))
    _, temperature, lam = best
    chosen = replace(settings, temperature=temperature, mixer=knnstore.KNNSettings(lam=lam).mixer)
    evaluation = lm.evaluate(parts["test"], chosen)
    return {"temperature": temperature, "lambda": lam, "base": evaluation.base_ppl, "ppl": evaluation.knn_ppl}


def in_turn(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round; the first does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round in range(rounds + 1):
        for name in names[round % len(names) :] + names[: round % len(names)]:
            start = time.perf_counter()
            sides[name]()
            if round:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    """Return the speed of each side as a multiple of the model's alone."""
    for name, times in seconds.items():
        yield (
            name,
            round(statistics.median(a / b for a, b in zip(seconds["alone"], times, strict=True)), 3),
        )


def writing(lm: KNNLMForCausalLM, settings: KNNSettings, batch: int, steps: int) -> Callable[[], Any]:
    """Write greedily after a prompt, in so many rows."""
    prompt = torch.tensor(
        [lm.reader.tokenize(f"It is {row} o'clock, and").tolist()[:4] for row in range(batch)]
    )

    def write() -> Any:
        return lm.generate(
            prompt, attention_mask=torch.ones_like(prompt), knn=settings, max_new_tokens=steps,
            min_new_tokens=steps, do_sample=False, pad_token_id=0,
        )  # fmt: skip

    return write


def key_bytes(lm: KNNLMForCausalLM) -> float:
    """Bytes of the key files for each record."""
    folder = lm.store.home.path / lm.store.info()["location"]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return round(size / max(1, lm.store.record_count()), 1)


def moved(
    folder: Path, first: KNNLMForCausalLM, name: str, engine: str, params: dict[str, Any]
) -> KNNLMForCausalLM:
    """Return a copy of a store with its keys in another engine."""
    shutil.copytree(first.store.home.path, folder / name)
    with knnstore.open(folder / name, "a", copied=True) as store:
        store.move(engine, "keys-2", params=params)
    return knnstore.load(folder / name)


def measure(folder: Path, model: str, parts_of: Callable[[KNNLMForCausalLM], Parts], options: Any) -> Any:
    """All figures of one domain."""
    made: dict[str, KNNLMForCausalLM] = {}
    result: dict[str, Any] = {}
    sides: dict[str, tuple[str, KNNSettings]] = {}
    parts: Parts = {}
    for states in (1, *options.states):
        label = "" if states == 1 else f"{states} states, "
        if not options.cells_only:
            exact = knnstore.create(
                folder / f"{label}exact", model, store="faiss", params={"index": "exact"}, states=states
            )
            parts = parts or parts_of(exact)
            added = exact.add(parts["store"], domain="d")
            exact.store.close()
            made[f"{label}exact"] = knnstore.load(exact.store.home.path)
            made[f"{label}faiss"] = moved(folder, exact, f"{label}faiss", "faiss", {})
            sides |= {f"{label}{name}": (f"{label}{name}", KNNSettings(k=K)) for name in ("exact", "faiss")}
        for codes in options.codes:
            name = f"{label}cells {codes}"
            params = {"codes": codes, "device": options.device}
            if options.cells_only:
                made[name] = knnstore.create(folder / name, model, params=params, states=states)
                parts = parts or parts_of(made[name])
                added = made[name].add(parts["store"], domain="d")
            else:
                made[name] = moved(folder, exact, name, "cells", params)
            sides |= {f"{name} {probes}": (name, KNNSettings(probes=probes)) for probes in options.probes}
    for name, lm in made.items():
        result[name] = {"records": added.tokens, "bytes_a_record": key_bytes(lm)}
    speeds: dict[str, Callable[[], Any]] = {}
    steps: dict[int, dict[str, Callable[[], Any]]] = {1: {}, 8: {}}
    alone = KNNSettings(lam=0.0)
    any_lm = next(iter(made.values()))
    speeds["alone"] = lambda: any_lm.evaluate(parts["test"], alone)
    for batch, of_batch in steps.items():
        of_batch["alone"] = writing(any_lm, alone, batch, options.steps)
    for side, (name, settings) in sides.items():
        lm = made[name]
        found = fitted(lm, parts, settings)
        single = side.partition("states, ")[2]
        if single:
            found["ratio"] = found["ppl"] / result[single]["ppl"]
        result[side] = {**result.get(side, {}), **found}
        print(side, json.dumps(found), file=sys.stderr, flush=True)
        chosen = replace(
            settings, temperature=found["temperature"], mixer=KNNSettings(lam=found["lambda"]).mixer
        )
        if not side.endswith("exact"):
            speeds[side] = lambda lm=lm, chosen=chosen: lm.evaluate(parts["test"], chosen)
            for batch, of_batch in steps.items():
                of_batch[side] = writing(lm, chosen, batch, options.steps)
    measured = {}
    if options.rounds:
        measured["scoring"] = in_turn(speeds, options.rounds)
        for batch, of_batch in steps.items():
            measured[f"step, batch {batch}"] = in_turn(of_batch, options.rounds)
    for what, seconds in measured.items():
        for side, ratio in ratios(seconds):
            result.setdefault(side, {})[what] = ratio
    for lm in made.values():
        lm.store.close()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--domain", action="append")
    parser.add_argument("--records", type=int, default=275_000)
    parser.add_argument("--held-out", type=int, default=12_000, help="tokens of dev and of test")
    parser.add_argument("--probes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--codes", nargs="+", default=["none", "pq32", "pq64"])
    parser.add_argument(
        "--states", type=int, nargs="+", default=[], help="of joined keys, beside single ones"
    )
    parser.add_argument("--device", default="auto", help="that holds the cells' keys")
    parser.add_argument("--cells-only", action="store_true", help="leave FAISS out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.rounds, options.steps, options.probes, options.codes = 1, 4, [2], ["pq8"]
            options.states = [2]
            results["help"] = measure(Path(folder) / "help", str(TINY_LM), lambda _: smoke_parts(), options)
        else:
            if options.data is None:
                parser.error("name the folder of the data, or --smoke")
            limits = {"store": options.records, "dev": options.held_out, "test": options.held_out}
            for domain in options.domain or sorted(path.name for path in options.data.iterdir()):
                results[domain] = measure(
                    Path(folder) / domain, options.model,
                    lambda lm, domain=domain: documents(options.data / domain, limits, lm), options,
                )  # fmt: skip
                print(json.dumps({domain: results[domain]}), file=sys.stderr, flush=True)
    names = ("ppl", "ratio", "scoring", "step, batch 1", "step, batch 8", "bytes_a_record")
    for domain, result in results.items():
        print(f"\n{domain}\n{'':24}" + "".join(f"{name:>15}" for name in names), file=sys.stderr)
        for side, row in result.items():
            cells = (row.get(name) for name in names)
            print(
                f"{side:24}" + "".join(f"{'' if one is None else round(one, 3)!s:>15}" for one in cells),
                file=sys.stderr,
            )
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "torch": torch.__version__,
                "domains": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
