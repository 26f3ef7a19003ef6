"""Measure the cost that a store adds to a decoding step: processor time of each part, and number of calls.

    OMP_NUM_THREADS=1 python benchmarks/step_cost.py HOME --texts FILE.jsonl [--prompts 6] [--rows 1 8]
    python benchmarks/step_cost.py --smoke          a few seconds, with the demo's model

HOME is a store, calibrated or not, whose settings in force are used. FILE holds documents that are not
stored: their beginnings are continued greedily, by the model alone (`base.generate`) and with the store, in
turn.

- ``step ÷ bare``: speed with the store ÷ speed of the model alone, from the medians of their steps.
- ``own``: milliseconds of a step outside the base model's forward pass, less the same without a store.
- ``parts``: microseconds of each part, without the parts that it calls; ``bookkeeping`` is what remains.
- ``torch operations`` and ``calls``: number of operators that torch dispatches, and of calls of functions
  (of Python and of C), in one step outside the base model; counted apart, since counting takes time.

Times are of the processor, of all threads, and medians over the steps. JSON goes to stdout.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cells import TINY_LM, smoke_parts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, Purpose, mixture, row_mixer
from knnstore.lm.components import Keys, NGrams, OwnNGrams, RecentText

PROMPT = 80
"""Tokens of a beginning."""
PARTS: dict[str, list[tuple[Any, str]]] = {
    "search": [(Keys, "look_up")],
    "n-grams": [(NGrams, "look_up")],
    "recent text": [(RecentText, "look_up"), (OwnNGrams, "look_up")],
    "gate": [(mixture, "weigh_by_gate")],
    "mixture": [(row_mixer.RowMixer, "mix")],
    "keys and texts": [(KNNLMForCausalLM, "extend_texts")],
}
"""The functions that are timed as each part."""


class StepClock:
    """Processor nanoseconds of each part in each step. A step begins where the base model's pass ends."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._open = ["bookkeeping"]
        self._since = time.process_time_ns()

    def _charge(self) -> None:
        """Add the time since the last call to the part that is running."""
        now = time.process_time_ns()
        if self.steps:
            self.steps[-1][self._open[-1]] += now - self._since
        self._since = now

    def time_part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time charged to a part; ``base`` also begins a step."""

        @wraps(function)  # the model's signature tells the name of its cache
        def call_timed(*args: Any, **options: Any) -> Any:
            self._charge()
            if name == "base":
                self.steps.append(defaultdict(int))
            self._open.append(name)
            try:
                return function(*args, **options)
            finally:
                self._charge()
                self._open.pop()

        return call_timed

    def median(self, *, without: tuple[str, ...] = ()) -> float:
        """Return the median milliseconds of a step, without some parts; prefill and last step not counted."""
        sums = (sum(ns for name, ns in step.items() if name not in without) for step in self.steps[1:-1])
        return statistics.median(sums) / 1e6

    def parts(self) -> dict[str, float]:
        """Return the median microseconds of each part but the base model."""
        names = {name: None for step in self.steps for name in step if name != "base"}
        return {name: statistics.median(step[name] for step in self.steps[1:-1]) / 1e3 for name in names}


@contextmanager
def timed_parts(lm: KNNLMForCausalLM) -> Iterator[StepClock]:
    """Time all parts of the steps in the context."""
    clock = StepClock()
    with ExitStack() as patches:
        for name, functions in {"base": [(lm.base, "forward")], **PARTS}.items():
            for owner, attribute in functions:
                function = getattr(owner, attribute)
                patches.enter_context(mock.patch.object(owner, attribute, clock.time_part(name, function)))
        yield clock


class CountedOperations(TorchDispatchMode):
    """Counts the operators that torch dispatches, and the calls of functions, outside the base model."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.calls = 0
        self.is_paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count an operator of torch, and run it."""
        self.operations += not self.is_paused
        return function(*args, **kwargs or {})

    def count_call(self, _: Any, event: str, __: Any) -> None:
        """Count a call; an event of `sys.setprofile`."""
        self.calls += event in ("call", "c_call") and not self.is_paused


def continue_texts(model: Any, prompts: Tensor, steps: int, **options: Any) -> Tensor:
    """Return the greedy continuation of each row by as many tokens, whether or not it would have ended."""
    continued: Tensor = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=steps, min_new_tokens=steps,
        do_sample=False, use_cache=True, pad_token_id=0, **options,
    )  # fmt: skip
    return continued


def count_calls(lm: KNNLMForCausalLM, prompts: Tensor, steps: int) -> dict[str, int]:
    """Return how many operators of torch and how many calls a step has more than the model's own."""
    counts = []
    for model in (lm, lm.base):
        of_steps = []
        for more in (2, 2 + steps):
            counted, forward = CountedOperations(), lm.base.forward

            @wraps(forward)
            def run_uncounted(
                *args: Any, counted: Any = counted, forward: Any = forward, **options: Any
            ) -> Any:
                counted.is_paused = True
                try:
                    return forward(*args, **options)
                finally:
                    counted.is_paused = False

            with mock.patch.object(lm.base, "forward", run_uncounted):
                with counted:
                    continue_texts(model, prompts, more)
                sys.setprofile(counted.count_call)
                try:
                    continue_texts(model, prompts, more)
                finally:
                    sys.setprofile(None)
            of_steps.append((counted.operations, counted.calls))
        counts.append([(after - before) / steps for before, after in zip(*of_steps, strict=True)])
    own = [round(with_store - bare) for with_store, bare in zip(*counts, strict=True)]
    return {"torch operations": own[0], "calls": own[1]}


def measure_rows(lm: KNNLMForCausalLM, prompts: Tensor, rows: int, steps: int) -> dict[str, Any]:
    """Time steps of some rows at a time, by the model alone and with the store in turn."""
    batches = [batch for batch in prompts.split(rows) if len(batch) == rows]
    continue_texts(lm, batches[0], steps)  # loads what is read once
    ratios, own, seconds, parts = [], [], [], defaultdict[str, list[float]](list)
    for batch in batches:
        with timed_parts(lm) as bare:
            continue_texts(lm.base, batch, steps)
        with timed_parts(lm) as mixed:
            continue_texts(lm, batch, steps)
        ratios.append(bare.median() / mixed.median())
        seconds.append(bare.median())
        bare_outside = bare.median(without=("base",))
        own.append(mixed.median(without=("base",)) - bare_outside)
        for name, microseconds in mixed.parts().items():
            parts[name].append(microseconds - (bare_outside * 1e3 if name == "bookkeeping" else 0))
    return {
        "rows": rows,
        "prompts": len(batches) * rows,
        "step ÷ bare": round(statistics.median(ratios), 3),
        "bare, ms": round(statistics.median(seconds), 2),
        "own, ms": round(statistics.median(own), 2),
        "parts, µs": {name: round(statistics.median(values)) for name, values in parts.items()},
        **count_calls(lm, batches[0], 4),
    }


def read_prompts(lm: KNNLMForCausalLM, texts: list[TextDocument], count: int) -> Tensor:
    """Return the first tokens of texts that are long enough, after the prefix, shape (n, t)."""
    begun = [ids for text in texts if len(ids := lm.reader.tokenize(text.text)[:PROMPT].tolist()) == PROMPT]
    return torch.tensor([[*lm.reader.prefix, *ids] for ids in begun[:count]])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--texts", type=Path, help="JSON Lines of documents that are not stored")
    parser.add_argument("--prompts", type=int, default=6, help="batches for each number of rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48, help="steps of each batch")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and (options.home is None or options.texts is None):
        parser.error("name a store and --texts, or --smoke")
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.home, options.prompts, options.rows, options.tokens = Path(scratch) / "home", 1, [1, 2], 8
            with knnstore.create(options.home, str(TINY_LM), device="cpu") as lm:
                lm.add(smoke_parts()["store"], domain="help")
            texts = list(smoke_parts(3)["dev"])
        else:
            texts = list(islice(read_documents([options.texts]), 2 * options.prompts * max(options.rows)))
        with knnstore.load(options.home, device="cpu") as lm:
            prompts = read_prompts(lm, texts, options.prompts * max(options.rows))
            settings = lm.resolve_settings(None, Purpose.GENERATION)
            results = [
                measure_rows(lm, prompts[: options.prompts * rows], rows, options.tokens)
                for rows in options.rows
            ]
        print(
            json.dumps(
                {
                    "threads": torch.get_num_threads(),
                    "components": settings.components,
                    "gate": settings.gate is not None,
                    "probes": settings.probes,
                    "results": results,
                },
                indent=2,
                ensure_ascii=False,
            )
        )


if __name__ == "__main__":
    main()
