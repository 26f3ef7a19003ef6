"""The speed of writing and scoring with a store, as multiples of the model's own.

    python benchmarks/speeds.py HOME --texts FILE.jsonl [--foreign FILE.jsonl] [--prompts 50]
    python benchmarks/speeds.py --smoke             a few seconds, with the demo's model

HOME is a store, calibrated or not, whose settings in force are used. FILE holds documents that are not
stored: their beginnings of 80 tokens are continued greedily by 64, with --foreign those of other text too.
The model alone and the store take turns; a figure is the median of the ratios of their tokens a second.

- ``step``: one row, without drafts (`benchmarks/drafts.py` measures drafts);
- ``eight``: eight rows at a time;
- ``scoring``: of `evaluate`.

JSON goes to stdout.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cells import TINY_LM, smoke_parts
from torch import Tensor

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings, Purpose

PROMPT, NEW, ROWS = 80, 64, 8
"""Tokens, tokens, rows."""
SCORED, LONGEST = 12_000, 8_000
"""Tokens in all, and characters of a document: its beginning."""
ALONE = KNNSettings(k=1, lam=0.0)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    started = time.perf_counter()
    done = work()
    return time.perf_counter() - started, done


def continued(lm: KNNLMForCausalLM, prompts: Tensor, **options: Any) -> Callable[[], Tensor]:
    """Return the greedy continuation of each row by as many tokens, whether or not it would have ended."""
    return lambda: lm.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, use_cache=True, pad_token_id=0, **options,
    )  # fmt: skip


def writing(lm: KNNLMForCausalLM, texts: list[TextDocument], most: int) -> dict[str, Any]:
    """Continue the beginnings of texts, one by one and eight at a time."""
    begun = [ids for text in texts if len(ids := lm.reader.tokenize(text.text)[:PROMPT].tolist()) == PROMPT]
    prefix = [*lm.reader.prefix]
    prompts = torch.tensor([[*prefix, *ids] for ids in begun[:most]])
    ratios: dict[str, list[float]] = {"step": [], "eight": []}
    continued(lm, prompts[:1])()  # what is read and counted once, as by a service
    for prompt in prompts.split(1):
        alone, _ = timed(continued(lm, prompt, knn=ALONE))
        ratios["step"].append(alone / timed(continued(lm, prompt))[0])
    for rows in prompts.split(ROWS):
        alone, _ = timed(continued(lm, rows, knn=ALONE))
        ratios["eight"].append(alone / timed(continued(lm, rows))[0])
    return {
        "prompts": len(prompts),
        **{name: round(statistics.median(values), 2) for name, values in ratios.items()},
    }


def scoring(lm: KNNLMForCausalLM, texts: list[TextDocument], rounds: int) -> float:
    """How fast texts are evaluated."""
    begun, tokens = list[TextDocument](), 0
    while tokens < SCORED and len(begun) < len(texts):
        begun.append(replace(texts[len(begun)], text=texts[len(begun)].text[:LONGEST]))
        tokens += lm.reader.count_predicted(begun[-1:])
    lm.evaluate(begun[:2])
    sides = [lambda: lm.evaluate(begun, ALONE), lambda: lm.evaluate(begun)]
    seconds = [[timed(side)[0] for side in sides] for _ in range(rounds)]
    return round(statistics.median(of_model / of_store for of_model, of_store in seconds), 2)


def measure(lm: KNNLMForCausalLM, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a store."""
    settings = lm.knn
    if options.smoke:
        texts = [*smoke_parts()["dev"], *smoke_parts()["test"]]
    else:
        texts = list(islice(read_documents([options.texts]), 4 * options.prompts))
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "writes_with": lm.resolve_settings(settings, Purpose.GENERATION).components,
        "scores_with": settings.components,
        "writing": writing(lm, texts, options.prompts),
        "scoring": scoring(lm, texts, options.rounds),
    }
    if options.foreign:
        foreign = list(islice(read_documents([options.foreign]), 4 * options.prompts))
        result["writing on foreign text"] = writing(lm, foreign, options.prompts)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--texts", type=Path, help="JSON Lines of documents that are not stored")
    parser.add_argument("--foreign", type=Path, help="likewise, of another domain")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="of scoring")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and (options.home is None or options.texts is None):
        parser.error("name a store and --texts, or --smoke")
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.home, options.prompts, options.rounds = Path(scratch) / "home", 2, 1
            lm = knnstore.create(options.home, str(TINY_LM), device="cpu")
            lm.add(smoke_parts()["store"], domain="help")
            lm.store.close()
        lm = knnstore.load(options.home, device="cpu")
        print(json.dumps(measure(lm, options), indent=2))
        lm.store.close()


if __name__ == "__main__":
    main()
