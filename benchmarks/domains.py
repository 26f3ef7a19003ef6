"""What a store gives a model in each domain: before it is calibrated, after, and to text of another domain.

    python benchmarks/domains.py DATA --model DIR [--domain NAME ...] [--homes FOLDER] [--max-length TOKENS]
                                 [--states N] [--codes KIND]
    python benchmarks/domains.py --smoke            a few seconds, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``, split by
document. The texts of ``store`` are stored with joined keys (of --states, in --codes), settings are
calibrated on ``dev``, and every figure is a perplexity on ``test``; "other" is the beginning of the next
domain's ``test``. The sides are the model alone, stores with keys and without by default, a classic kNN-LM
(keys, one λ and one T, as `calibrate` fits them), what `calibrate` chose, with each of its components alone,
and whatever it tried ("candidates"; "gate" is of keys alone). With --homes the stores are kept, to be timed
by ``speeds.py``, and one that is there is taken as it is. JSON goes to stdout.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import texts
from cells import TINY_LM, Parts, smoke_parts

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.settings import derive_default

DIGITS = 3
PARTS = ("test", "other")
OTHER = 3
"""The text of another domain is so much less than `test`."""


def opened(home: Path, model: str, stored: list[TextDocument], **options: Any) -> KNNLMForCausalLM:
    """Return a store of a domain's text; make it where it is missing."""
    if home.exists():
        return knnstore.load(home, "a", device="cpu")
    lm = knnstore.create(home, model, device="cpu", dtype="float32", **options)
    added = lm.add(stored, domain="domain")
    print(home.name, f"{added.tokens:,} tokens in {added.seconds:.0f} s", file=sys.stderr, flush=True)
    return lm


def measure(folder: Path, parts: Parts, options: argparse.Namespace) -> dict[str, Any]:
    """Judge both stores of a domain."""
    model, max_length = options.model, options.max_length
    keyless = opened(folder / "n-grams", model, parts["store"], key=None, max_length=max_length)
    ngrams = derive_default(keyless.store)
    result: dict[str, Any] = {"n-grams, by default": both(keyless, ngrams, parts)}
    keyless.store.close()

    asked = {"states": options.states, "params": options.codes and {"codes": options.codes}}
    asked = {name: value for name, value in asked.items() if value is not None}
    name = "-".join(["keys", *(str(one) for one in (options.states, options.codes) if one is not None)])
    lm = opened(folder / name, model, parts["store"], max_length=max_length, **asked)
    result["by default"] = both(lm, derive_default(lm.store), parts)
    calibrated = lm.calibrate(parts["dev"])
    fixed = next(one for one in calibrated.comparison.candidates if one.name == "fixed")
    classic = replace(fixed.settings, cache=None, ngrams=None, probes=calibrated.settings.probes)
    result["classic"] = both(lm, classic, parts)
    chosen, foreign = (lm.evaluate(parts[part]) for part in PARTS)
    result["model"] = {"test": chosen.base_ppl, "other": foreign.base_ppl}
    result["calibrated"] = {
        "test": chosen.knn_ppl,
        "other": foreign.knn_ppl,
        "keys": chosen.store_ppl,
        "n-grams": chosen.ngram_ppl,
        "cache": chosen.cache_ppl,
        "interval": [chosen.intervals.change.low, chosen.intervals.change.high],
        "mixer": chosen.mixer,
        "probes": chosen.probes,
        "scoring_only": calibrated.settings.scoring_only,
        "seconds": calibrated.scoring_seconds + calibrated.fitting_seconds,
    }
    tried = calibrated.comparison.candidates
    result["candidates"] = {one.name: lm.evaluate(parts["test"], one.settings).knn_ppl for one in tried}
    info = lm.store.info()
    result["tokens"] = {"stored": info["tokens"], "test": chosen.tokens, "codes": info["codes"]}
    lm.store.close()
    return result


def both(lm: KNNLMForCausalLM, settings: KNNSettings, parts: Parts) -> dict[str, float]:
    """Perplexity on the domain's own text and on another's."""
    return {part: lm.evaluate(parts[part], settings).knn_ppl for part in PARTS}


def rounded(value: Any) -> Any:
    """Return the table with few digits, for people."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def read(options: argparse.Namespace) -> dict[str, Parts]:
    """Each domain's documents, and of the one after it."""
    if options.smoke:
        return {"help": smoke_parts(dev=3) | {"other": smoke_parts()["dev"]}}
    limits = texts.Limits(store_tokens=options.stored, held_out_tokens=options.held_out)
    names = texts.domains_in(options.data)
    found = texts.read(options.data, names, options.model, limits)
    return {
        name: {**found[name], "other": of_next["test"][: max(1, len(of_next["test"]) // OTHER)]}
        for name, of_next in zip(names, [found[one] for one in [*names[1:], names[0]]], strict=True)
        if name in (options.domain or names)
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of domains")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--domain", action="append", help="default is all; repeatable")
    parser.add_argument("--stored", type=int, default=272_000, metavar="TOKENS")
    parser.add_argument("--held-out", type=int, default=15_000, metavar="TOKENS", help="of dev, of test")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="of a window")
    parser.add_argument("--states", type=int, metavar="N", help="that a key joins; default as `init`")
    parser.add_argument("--codes", metavar="KIND", help="pq32, pq64, int8 or none; default as `init`")
    parser.add_argument("--homes", type=Path, metavar="FOLDER", help="keep the stores here")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args()
    if options.data is None and not options.smoke:
        parser.error("name a data folder, or use --smoke")
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, parts in read(options).items():
            folder = (options.homes or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = rounded(measure(folder, parts, options))
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    print(json.dumps({"model": options.model, "domains": results}, indent=2))


if __name__ == "__main__":
    main()
