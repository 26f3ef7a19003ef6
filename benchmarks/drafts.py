"""Drafts: how much faster a store generates with them than without, and than the model alone.

    python benchmarks/drafts.py HOME --texts NAME=FILE.jsonl ... [--prompts 20] [--rows 4 | --served DOMAIN]
    python benchmarks/drafts.py --smoke             a few seconds, with the demo's model

HOME is a store whose settings in force are used. Each FILE holds documents that are not stored, for example
one like the stored text and one of another kind. Their beginnings of 200 tokens are continued greedily by 64
tokens, by three sides in turn: the model alone, the store, and the store with drafts. The model alone
generates only the first line of 20 tokens, because each of its tokens takes the same time. Both other sides
must generate the same text. Seconds are processor time, so a shared machine disturbs them little. Figures
of a file:

- ``tokens_a_pass``: tokens that a pass of the model gives with drafts;
- ``undrafted``, ``drafted``: speed ÷ speed of the model alone, after the first token, and ``slowest``, the
  lowest ``drafted`` of a text;
- ``line``: seconds of the first 20 tokens, drafted ÷ model alone, with the prompt; ``line_known_prompt``: the
  same without the prompt, as in a server that has its states already.

With ``--rows N`` the server's engine continues the beginnings, N at a time, and the figures of a file are:

- ``drafted_to_undrafted``: tokens a second ÷ those without drafts, without the time of the prompts;
- ``tokens_a_pass``: tokens that a pass gives each text that it decodes.

With ``--served DOMAIN``, ``knnstore serve`` answers requests to ``/v1/completions``, one at a time. ``line``
is the processor time of the server for 20 tokens with the domain ÷ for the model alone, with the prompt.

Without both, the first figures are durations of a pass over several positions ÷ a pass over one. Ratios of
durations are medians of texts, and of the rounds of passes. JSON goes to stdout.
"""

import argparse
import json
import os
import queue
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from cells import TINY_LM, smoke_parts
from serving import served
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.drafts import Drafts
from knnstore.lm.model import drafting
from knnstore.server.engine import Engine, Observed, Piece, Prompt, Sampling, Task, Ticket, batch
from knnstore.server.engine.admission import Admission

PROMPT, NEW, LINE = 200, 64, 20
"""Tokens."""
POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16)
ALONE = KNNSettings(lam=0.0)


class TokenClock(BaseStreamer):
    """The processor time at which each token of a text was generated."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """Seconds at the start, and after each generated token."""

    def put(self, value: Tensor) -> None:
        """Note the time: `generate` puts the prompt first, then each token."""
        self.times.append(time.process_time())

    def end(self) -> None:
        """Do nothing."""


class CountedDrafts(Drafts):
    """The drafts of a text; the last object made is kept, so that its passes can be counted."""

    last: Drafts

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        CountedDrafts.last = self


def generate(lm: KNNLMForCausalLM, prompt: Tensor, count: int, **options: Any) -> tuple[Tensor, list[float]]:
    """Generate tokens greedily, whether or not the text would have ended; return the text and the times."""
    clock = TokenClock()
    text = lm.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, use_cache=True, pad_token_id=0, streamer=clock, **options,
    )  # fmt: skip
    return text, [at - clock.times[0] for at in clock.times[1:]]


def measure_text(lm: KNNLMForCausalLM, prompt: Tensor) -> dict[str, float]:
    """Continue one beginning with each side, and return the ratios and the number of passes with drafts."""
    _, alone = generate(lm, prompt, LINE, knn=ALONE)
    text, undrafted = generate(lm, prompt, NEW)
    same, drafted = generate(lm, prompt, NEW, draft=True)
    assert torch.equal(text, same)
    step = (alone[-1] - alone[0]) / (LINE - 1)
    return {
        "undrafted": step * (NEW - 1) / (undrafted[-1] - undrafted[0]),
        "drafted": step * (NEW - 1) / (drafted[-1] - drafted[0]),
        "line": drafted[LINE - 1] / alone[-1],
        "line_known_prompt": (drafted[LINE - 1] - drafted[0]) / (alone[-1] - alone[0]),
        "passes": CountedDrafts.last.passes,  # the prompt counts, and the last pass is not reported
    }


def choose_beginnings(lm: KNNLMForCausalLM, texts: list[TextDocument]) -> list[list[int]]:
    """Return the beginnings of the documents that are long enough, as tokens."""
    beginnings = [lm.reader.tokenize(document.text)[:PROMPT].tolist() for document in texts]
    return [ids for ids in beginnings if len(ids) == PROMPT]


def measure_texts(lm: KNNLMForCausalLM, texts: list[TextDocument], options: Any) -> dict[str, float]:
    """Measure the beginnings of the documents that are long enough."""
    prompts = [[*lm.reader.prefix, *ids] for ids in choose_beginnings(lm, texts)[: options.prompts]]
    if options.rows > 1:
        return measure_together(lm, prompts, options.rows)
    measured = []
    for prompt in prompts:
        measured.append(measure_text(lm, torch.tensor([prompt])))
        print(json.dumps(measured[-1]), file=sys.stderr, flush=True)
    return summarize(measured)


def summarize(measured: list[dict[str, float]]) -> dict[str, float]:
    """Return the figures of a file from those of its texts."""
    ratios = ("undrafted", "drafted", "line", "line_known_prompt")
    return {
        "texts": len(measured),
        "tokens_a_pass": round((NEW - 1) / statistics.mean(one["passes"] for one in measured), 2),
        **{name: round(statistics.median(one[name] for one in measured), 2) for name in ratios},
        "slowest": round(min(one["drafted"] for one in measured), 2),
    }


def decode_together(
    lm: KNNLMForCausalLM, prompts: list[list[int]], rows: int, *, is_drafted: bool
) -> tuple[list[str], float, float]:
    """Continue texts in the server's engine, some at a time; the next text begins when one has ended.

    Returns:
        The texts, the seconds of all steps, without those of the prompts, divided by the number of tokens,
        and the tokens that a pass gave to a text.
    """
    seen: list[Observed] = []
    engine = Engine(lm, lambda _: lm.knn, max_rows=rows, observe=seen.append)
    propose, prefill = batch.propose_together, Admission.prefill_and_start
    texts, ended, of_prompts = [""] * len(prompts), queue.SimpleQueue[int](), 0.0

    def tell(piece: Piece | Exception) -> None:
        """Collect the text of a piece."""
        assert isinstance(piece, Piece), piece
        texts[piece.index] += piece.text
        if piece.finish:
            ended.put(piece.index)

    def time_prefill(*args: Any) -> None:
        """Read prompts, and add up the seconds."""
        nonlocal of_prompts
        started = time.process_time()
        prefill(*args)
        of_prompts += time.process_time() - started

    Admission.prefill_and_start = time_prefill  # type: ignore[method-assign]
    if not is_drafted:
        batch.propose_together = lambda each, texts, most: [text[:0] for text in texts]
    try:
        started = time.process_time()
        engine.start()
        task = Task(tuple(Prompt(tuple(ids)) for ids in prompts), None, NEW, sampling=Sampling(0))
        engine.submit(Ticket(task, tell))
        for _ in prompts:
            ended.get(timeout=3600)
        seconds = time.process_time() - started - of_prompts
    finally:
        engine.stop()
        batch.propose_together, Admission.prefill_and_start = propose, prefill  # type: ignore[method-assign]
    tokens = sum(step.tokens for step in seen) - len(prompts)  # the first is of the prompt
    return texts, seconds / tokens, tokens / sum(step.rows for step in seen)


def measure_together(lm: KNNLMForCausalLM, prompts: list[list[int]], rows: int) -> dict[str, float]:
    """Continue the beginnings, `rows` of them at a time, with each side, and return the figures."""
    texts, undrafted, _ = decode_together(lm, prompts, rows, is_drafted=False)
    same, drafted, tokens_a_pass = decode_together(lm, prompts, rows, is_drafted=True)
    assert texts == same
    return {
        "texts": len(prompts),
        "drafted_to_undrafted": round(undrafted / drafted, 2),
        "tokens_a_pass": round(tokens_a_pass, 2),
    }


def measure_served(
    home: Path, files: dict[str, list[str]], domain: str, count: int
) -> dict[str, dict[str, float]]:
    """Measure the first line from a server: processor seconds with the domain ÷ those of the model alone."""
    ticks = os.sysconf("SC_CLK_TCK")

    def ask(model: str, prompt: str) -> float | None:
        """Return the seconds of a request; None if the text ended early."""
        before = Path(f"/proc/{pid}/stat").read_text().split()
        body = {"model": model, "prompt": prompt, "max_tokens": LINE, "temperature": 0}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        after = Path(f"/proc/{pid}/stat").read_text().split()
        seconds = sum(int(after[field]) - int(before[field]) for field in (13, 14)) / ticks
        return seconds if answer["usage"]["completion_tokens"] == LINE else None

    found = {}
    with served(home) as (url, pid), httpx.Client(base_url=url, timeout=3600) as client:
        for name, prompts in files.items():
            ask("m", prompts[0]), ask(f"m+{domain}", prompts[0])  # the first requests load n-grams
            pairs = [(ask("m", prompt), ask(f"m+{domain}", prompt)) for prompt in prompts[:count]]
            ratios = [stored / alone for alone, stored in pairs if stored is not None and alone is not None]
            print(json.dumps(ratios), file=sys.stderr, flush=True)
            found[name] = {"texts": len(ratios), "line": round(statistics.median(ratios), 2)}
    return found


def time_passes(lm: KNNLMForCausalLM, document: TextDocument, rounds: int) -> dict[str, list[float]]:
    """Time passes over several positions after a prompt, as multiples of a pass over one position."""
    ids = torch.from_numpy(lm.reader.tokenize(document.text)[: PROMPT + max(POSITIONS)]).long()[None]
    ratios: dict[str, list[float]] = {}
    for name, knn in {"model": ALONE, "store": lm.knn}.items():
        seconds: list[list[float]] = []
        with torch.inference_mode():
            cache = lm(ids[:, :PROMPT], use_cache=True, knn=knn, logits_to_keep=1).past_key_values
            cache.activate_past_recording()
            for _ in range(rounds):
                seconds.append([])
                for count in POSITIONS:
                    started = time.process_time()
                    lm(ids[:, PROMPT : PROMPT + count], cache=cache, use_cache=True, knn=knn)
                    seconds[-1].append(time.process_time() - started)
                    cache.crop(-count)
        columns = zip(*([each / row[0] for each in row] for row in seconds), strict=True)
        ratios[name] = [round(statistics.median(column), 2) for column in columns]
    return ratios


def measure(lm: KNNLMForCausalLM, files: dict[str, list[TextDocument]], options: Any) -> dict[str, Any]:
    """Measure the passes, then the texts of each file."""
    drafting.Drafts = CountedDrafts  # type: ignore[misc]
    long = next(text for texts in files.values() for text in texts if len(text.text) > 8 * PROMPT)
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "components": lm.knn.components,
        "rows": options.rows,
    }
    if options.rows == 1:
        result |= {"positions": POSITIONS, "passes": time_passes(lm, long, options.rounds)}
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result | {name: measure_texts(lm, texts, options) for name, texts in files.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--texts", action="append", default=[], help="NAME=FILE.jsonl; repeatable")
    parser.add_argument("--prompts", type=int, default=20, help="beginnings of each file")
    parser.add_argument("--rows", type=int, default=1, help="texts that are generated together")
    parser.add_argument("--served", metavar="DOMAIN", help="of the store, for a server")
    parser.add_argument("--rounds", type=int, default=5, help="of passes over several positions")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and (options.home is None or not options.texts):
        parser.error("name a store and --texts, or --smoke")
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.home, options.prompts, options.rounds = Path(scratch) / "home", 2, 1
            lm = knnstore.create(options.home, str(TINY_LM), device="cpu", key=None)
            lm.add(smoke_parts()["store"], domain="help")
            lm.store.close()
            files = {"help": [*smoke_parts()["dev"], *smoke_parts()["test"]]}
        else:
            named = (one.partition("=")[::2] for one in options.texts)
            files = {
                name: list(islice(read_documents([Path(file)]), 4 * options.prompts)) for name, file in named
            }
        lm = knnstore.load(options.home, device="cpu")
        if options.served:
            prompts = {
                name: [lm.reader.decode(ids) for ids in choose_beginnings(lm, texts)]
                for name, texts in files.items()
            }
            lm.store.close()
            print(
                json.dumps(measure_served(options.home, prompts, options.served, options.prompts), indent=2)
            )
            return
        print(json.dumps(measure(lm, files, options), indent=2))
        lm.store.close()


if __name__ == "__main__":
    main()
