"""Greedy writing with drafts, without, and without a store.

    python benchmarks/drafts.py DATA --model DIR [--domain NAME ...] [--foreign NAME]
    python benchmarks/drafts.py --smoke             a few seconds, with the demo's model

DATA holds a folder for each domain with ``store.jsonl`` and ``dev.jsonl``. The beginnings of documents of
``dev`` are continued: of the domain that is stored, and with ``--foreign`` of another one. The three sides
take turns; figures are medians over the prompts of tokens a second, as multiples of the model's alone. What
is written must be the same. JSON goes to stdout.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import TINY_LM, documents, smoke_parts

import knnstore
from knnstore.lm import FixedLambda, KNNLMForCausalLM
from knnstore.lm.model import drafting

PROMPT, NEW = 80, 64
"""Tokens."""


def measure(lm: KNNLMForCausalLM, texts: Sequence[Any], prompts: int) -> dict[str, Any]:
    """Continue the beginnings of texts in each way."""
    made: list[drafting.Drafts] = []

    class Kept(drafting.Drafts):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    drafting.Drafts = Kept  # type: ignore[misc]
    alone = replace(lm.knn, mixer=FixedLambda(0.0))
    sides: dict[str, dict[str, Any]] = {"alone": {"knn": alone}, "undrafted": {}, "drafted": {"draft": True}}
    lm.store.ngrams()  # counted once, as by a service
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for text in texts[:prompts]:
        ids = lm.reader.tokens(text["text"] if isinstance(text, dict) else text.text)[:PROMPT].tolist()
        prompt = torch.tensor([ids if lm.reader.prefix is None else [lm.reader.prefix, *ids]])
        options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        written = {}
        for name, side in sides.items():
            started = time.perf_counter()
            written[name] = lm.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **side)
            seconds = time.perf_counter() - started
            speeds[name].append((written[name].shape[1] - prompt.shape[1]) / seconds)
        assert torch.equal(written["undrafted"], written["drafted"])
    return {
        "prompts": len(made),
        "tokens_a_pass": round(sum(one.tokens for one in made) / sum(one.passes for one in made), 2),
        **{
            name: round(
                statistics.median(a / b for a, b in zip(speeds[name], speeds["alone"], strict=True)), 2
            )
            for name in ("undrafted", "drafted")
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--domain", action="append")
    parser.add_argument("--foreign", help="another domain, whose prompts are continued too")
    parser.add_argument("--records", type=int, default=275_000)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--probes", type=int, help="in place of the default")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and options.data is None:
        parser.error("name the folder of the data, or --smoke")
    if options.smoke:
        options.prompts = 2
    limits = {"store": options.records, "dev": 100_000, "test": 1}
    names = (
        ["help"] if options.smoke else options.domain or sorted(one.name for one in options.data.iterdir())
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            lm = knnstore.create(Path(folder) / name, options.model)
            parts = smoke_parts() if options.smoke else documents(options.data / name, limits, lm)
            lm.add(parts["store"], domain="d")
            if options.probes:
                lm.knn = replace(lm.knn, probes=options.probes)
            results[name] = measure(lm, parts["dev"], options.prompts)
            if options.foreign:
                foreign = documents(options.data / options.foreign, limits, lm)["dev"]
                results[name]["foreign"] = measure(lm, foreign, options.prompts)
            print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
            lm.store.close()
    print(json.dumps({"threads": torch.get_num_threads(), "domains": results}, indent=2))


if __name__ == "__main__":
    main()
