"""How much greedily written text repeats itself: of the model alone, and with components beside it.

    python benchmarks/repetition.py DATA --model DIR [--domain NAME ...] [--records 100000] [--codes pq32]
    python benchmarks/repetition.py --smoke         a few seconds, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``. Settings are
calibrated on the beginnings of documents of ``dev``, and up to 64 beginnings of documents of ``test`` are
continued by 96 tokens. Each side is what was calibrated, without the components that it does not name;
``writing`` is what is used for writing, ``text`` how the documents go on themselves. Of each: the share of
distinct bigrams; that of 4-grams that stood earlier in the continuation; and by how much both are worse than
the model's, with the standard error of that. JSON goes to stdout.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import TINY_LM, Parts, documents, smoke_parts

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import CacheSettings, KNNLMForCausalLM, KNNSettings, NGramSettings, Purpose
from knnstore.lm.calibration import scoring_only
from knnstore.lm.calibration.scoring_only import Beginnings, Repeated

WITHOUT: dict[str, tuple[str, ...]] = {
    "keys": ("cache", "n-grams"),
    "n-grams": ("cache", "keys"),
    "keys + n-grams": ("cache",),
    "keys + cache": ("n-grams",),
    "all": (),
}
DIGITS = 3
LONGEST = 6000
"""Characters of a document to calibrate on, so that there are enough of them."""


def measure(lm: KNNLMForCausalLM, parts: Parts, settings: KNNSettings) -> dict[str, Any]:
    """Continue the beginnings of the documents of `test` in each way."""
    begun = Beginnings.from_documents(lm.reader, parts["test"])
    everything = replace(settings, scoring_only=())
    sides = {name: everything.without_components(*left) for name, left in WITHOUT.items()}
    left_out = set(settings.scoring_only)
    of_writing = next((name for name, left in WITHOUT.items() if set(left) == left_out), "writing")
    if settings.model_generates_alone:
        of_writing = "model"
    else:
        sides.setdefault(of_writing, lm.resolve_settings(settings, Purpose.GENERATION))
    written = {"model": Repeated.from_texts(begun.generate_continuations(lm, KNNSettings(k=1, lam=0.0)))}
    seconds = {}
    for name, side in sides.items():
        started = time.perf_counter()
        written[name] = Repeated.from_texts(begun.generate_continuations(lm, side))
        seconds[name] = round(time.perf_counter() - started, 1)
    rows: dict[str, Any] = {}
    if begun.ends:
        rows["text"] = shown(Repeated.from_texts(begun.ends))
    for name, found in written.items():
        rows[name] = shown(found)
        if name != "model":
            rows[name]["worse_by"] = [worse(*pair) for pair in zip(found, written["model"], strict=True)]
            rows[name]["seconds"] = seconds[name]
    rows["writing"] = rows[of_writing]
    return rows


def beginnings(texts: Sequence[TextDocument], tokens: int, lm: KNNLMForCausalLM) -> list[TextDocument]:
    """Return the beginnings of some documents, about so many tokens."""
    chosen: list[TextDocument] = []
    for text in texts:
        if tokens <= 0:
            break
        chosen.append(replace(text, text=text.text[:LONGEST]))
        tokens -= lm.reader.count_predicted(chosen[-1:])
    return chosen


def shown(found: Repeated) -> dict[str, Any]:
    """Return the means."""
    means = found.mean_shares("")
    return {
        "continuations": means.continuations,
        "distinct_bigrams": round(means.distinct_bigrams, DIGITS),
        "repeated_4grams": round(means.repeated_4grams, DIGITS),
    }


def worse(ours: Any, theirs: Any) -> list[float]:
    """By how much some shares are larger than others in pairs, and the standard error."""
    more = ours - theirs
    return [round(float(one), DIGITS) for one in (more.mean(), more.std(ddof=1) / np.sqrt(len(more)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--domain", action="append")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--held-out", type=int, default=20_000, help="tokens to calibrate on")
    parser.add_argument("--codes", default="pq32", help="what keys are kept as")
    parser.add_argument("--no-networks", action="store_true", help="calibrate without")
    parser.add_argument("--smoke", action="store_true", help="settings as they come, not calibrated")
    options = parser.parse_args()
    if not options.smoke and options.data is None:
        parser.error("name the folder of the data, or --smoke")
    if options.smoke:
        scoring_only.NEW_TOKENS = 16
    limits = {"store": options.records, "dev": 20 * options.held_out, "test": 200_000}
    names = (
        ["help"] if options.smoke else options.domain or sorted(one.name for one in options.data.iterdir())
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            lm = knnstore.create(Path(folder) / name, options.model, params={"codes": options.codes})
            parts = smoke_parts() if options.smoke else documents(options.data / name, limits, lm)
            lm.add(parts["store"][:3] if options.smoke else parts["store"], domain="d")
            result: dict[str, Any] = {"tokens": lm.store.record_count()}
            settings = KNNSettings(
                temperature=lm.knn.temperature, probes=lm.knn.probes, ngrams=NGramSettings(),
                cache=CacheSettings(200, lm.knn.temperature, 0.5), scoring_only=("cache",),
            )  # fmt: skip
            if not options.smoke:
                held_out = beginnings(parts["dev"], options.held_out, lm)
                found = lm.calibrate(held_out, networks=not options.no_networks)
                assert found.record is not None
                settings = lm.knn
                result |= {"mixer": found.record.mixer, "ppl": round(found.record.knn_ppl, 2)}
            result |= {"scoring_only": settings.scoring_only, "written": measure(lm, parts, settings)}
            results[name] = result
            print(json.dumps({name: result}), file=sys.stderr, flush=True)
            lm.store.close()
    print(json.dumps({"threads": torch.get_num_threads(), "domains": results}, indent=2))


if __name__ == "__main__":
    main()
