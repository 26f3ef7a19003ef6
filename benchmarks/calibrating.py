"""The cost of `calibrate`, as a multiple of one scoring pass by the model alone over the same text.

    python benchmarks/calibrating.py HOME --texts FILE.jsonl [--tokens 8000 20000] [--rounds 1]
    python benchmarks/calibrating.py --smoke        a few seconds, with the demo's model

HOME is a store; each calibration changes a copy of it. FILE holds documents that are not stored; their
beginnings are used. For each number of tokens the two sides take turns: `evaluate` by the model alone, and
`calibrate`. Seconds of processor time are those of all threads. The phases are those of the progress display;
``other`` is the time outside of them.

JSON goes to stdout.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import TINY_LM, smoke_parts

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.progress import Progress

LONGEST = 8_000
"""Characters of a document: its beginning."""
ALONE = KNNSettings(k=1, lam=0.0)


class Phases(Progress):
    """Processor seconds of each phase that the progress display is told of, and of the time between them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._name, self._since = "other", time.process_time()

    def _switch(self, name: str) -> None:
        """End the phase, and begin the phase `name`."""
        now = time.process_time()
        self.seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """Begin a phase."""
        self._switch(title)

    def finish(self) -> None:
        """End a phase."""
        self._switch("other")


def take_tokens(lm: KNNLMForCausalLM, texts: list[TextDocument], count: int) -> list[TextDocument]:
    """Return the first documents that together have at least `count` tokens to predict."""
    chosen, tokens = list[TextDocument](), 0
    for text in texts:
        if tokens >= count:
            break
        chosen.append(text)
        tokens += lm.reader.count_predicted([text])
    return chosen


def measure_once(home: Path, texts: list[TextDocument], count: int, scratch: Path) -> dict[str, Any]:
    """Score and calibrate once each on a copy of the store; return seconds, phases and what was chosen."""
    copy = scratch / "copy"
    shutil.copytree(home, copy)
    try:
        with knnstore.load(copy, "a", device="cpu") as lm:
            chosen = take_tokens(lm, texts, count)
            lm.evaluate(chosen[:1], ALONE)  # a pass that nothing is measured in
            cpu, wall = time.process_time(), time.perf_counter()
            bare = lm.evaluate(chosen, ALONE)
            scoring = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            phases, cpu, wall = Phases(), time.process_time(), time.perf_counter()
            found = lm.calibrate(chosen, progress=phases)
            phases.finish()
            calibrating = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            best = found.comparison.best
            return {
                "tokens": bare.tokens,
                "scoring": scoring,
                "calibrate": calibrating,
                "phases": {name: round(seconds, 2) for name, seconds in phases.seconds.items()},
                "chosen": best.name,
                "probes": best.probes,
                "scoring_only": found.settings.scoring_only if found.settings else None,
                "ppl": {"alone": bare.base_ppl, "held_out": found.comparison.expected.ppl},
            }
    finally:
        shutil.rmtree(copy)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--texts", type=Path, help="JSON Lines of documents that are not stored")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 20_000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and (options.home is None or options.texts is None):
        parser.error("name a store and --texts, or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.smoke:
            options.home, options.tokens = scratch / "home", [4_000]
            with knnstore.create(options.home, str(TINY_LM), device="cpu") as lm:
                lm.add(smoke_parts()["store"], domain="help")
            texts = [*smoke_parts()["dev"], *smoke_parts()["test"]]
        else:
            texts = [replace(text, text=text.text[:LONGEST]) for text in read_documents([options.texts])]
        results = []
        for count in options.tokens:
            rounds = [measure_once(options.home, texts, count, scratch) for _ in range(options.rounds)]
            ratios = {
                unit: round(
                    statistics.median(one["calibrate"][unit] / one["scoring"][unit] for one in rounds), 2
                )
                for unit in ("cpu", "wall")
            }
            results.append({"calibrate ÷ scoring": ratios, "rounds": rounds})
        print(json.dumps({"threads": torch.get_num_threads(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
