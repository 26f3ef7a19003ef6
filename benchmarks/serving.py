"""Load on a server, beside the same work in this process.

    python benchmarks/serving.py HOME --texts FILE.jsonl --domain NAME [--rounds 5] [--minutes 10]
    python benchmarks/serving.py --smoke            a few seconds, with the demo's model

HOME is a store that nobody else writes to; `knnstore serve` is started over it, and the mixed load adds
documents to a domain ``load`` and removes them. FILE holds documents that are not stored: their beginnings
are continued, and those that fit the window are scored as evaluation harnesses do it. Sides take turns;
ratios are medians of the rounds.

- ``start``: seconds from the start of the process to ready, and then of the page's files with a first
  explanation of 200 tokens, and with a second one.
- ``streams``: tokens a second of 8 streams to those of one; of one stream to those of `generate`.
- ``scoring``: tokens a second of 8 requests with ``echo`` at a time to those of `evaluate`.
- ``first``: seconds to the first token of a stream, alone; beside 7 others that are being written; and beside
  7 that end and begin together, so that some prompts are read at the same time as seven others.
- ``mixed``: with ``--minutes``, requests of all kinds at random times, half as many as the server can answer:
  errors, and how much its memory grows after the first five minutes, or the first half.

JSON goes to stdout, with all ratios once more in ``summary``.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cells import TINY_LM, smoke_parts
from load import MANY, NEW, PROMPT, Body, Load, Mixture, mixed

import knnstore
from knnstore import Selection
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings, Purpose, resolve

EXPLAINED = 200
"""Tokens."""
PARTS = ["start", "streams", "scoring", "first", "mixed"]
SUMMARY = {
    "seconds_from_page_to_explanation": ("start", "explained"),
    "streams_8_to_1": ("streams", "many_to_one"),
    "stream_to_generate": ("streams", "one_to_in_process"),
    "scoring_to_evaluate": ("scoring", "to_in_process"),
    "first_token_p99_to_alone": ("first", "beside_p99_to_alone"),
    "first_token_p99_where_all_begin_to_alone": ("first", "together_p99_to_alone"),
    "failed": ("mixed", "failed"),
    "memory_growth": ("mixed", "growth"),
}

SERVE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


async def streams(load: Load, lm: KNNLMForCausalLM, settings: Any, prompts: list[str], rounds: int) -> Body:
    """Tokens a second of 8 streams, of one, and of `generate`."""

    def writing(prompt: str) -> Callable[[], Coroutine[Any, Any, int]]:
        async def work() -> int:
            return (await load.stream(prompt))[1]

        return work

    def generated(some: list[str]) -> float:
        started, tokens = time.perf_counter(), 0
        for prompt in some:
            ids = lm.reader.tokenize(prompt).tolist()
            given = torch.tensor([[*lm.reader.prefix, *ids]])
            generating = lm.resolve_settings(settings, Purpose.GENERATION)
            written = lm.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False,
                pad_token_id=0, knn=settings, draft=generating.ngrams is not None,
            )  # fmt: skip
            tokens += written.shape[1] - given.shape[1]
        return tokens / (time.perf_counter() - started)

    rows = []
    for round in range(rounds + 1):
        few = random.Random(round).sample(prompts, min(6, len(prompts)))
        row = {
            "in_process": generated(few),
            "one": await load.at_once(1, [writing(prompt) for prompt in few]),
            "many": await load.at_once(MANY, [writing(prompt) for prompt in few * MANY]),
        }
        rows += [row] if round else []  # the first warms up
    return {
        **{name: median(row[name] for row in rows) for name in rows[0]},
        "many_to_one": median(row["many"] / row["one"] for row in rows),
        "one_to_in_process": median(row["one"] / row["in_process"] for row in rows),
    }


async def scoring(
    load: Load, lm: KNNLMForCausalLM, settings: Any, texts: list[TextDocument], rounds: int
) -> Body:
    """Tokens a second of 8 requests that score, and of `evaluate`."""
    before = [*lm.reader.prefix]
    ids = [[*before, *lm.reader.tokenize(one.text).tolist()] for one in texts]
    rows = []
    for round in range(rounds + 1):
        started = time.perf_counter()
        evaluation = lm.evaluate(texts, settings)
        row = {"in_process": evaluation.tokens / (time.perf_counter() - started)}
        works = [lambda one=one: load.score(one) for one in ids]
        row["served"] = await load.at_once(MANY, works)  # type: ignore[arg-type]
        rows += [row] if round else []
    return {
        **{name: median(row[name] for row in rows) for name in rows[0]},
        "to_in_process": median(row["served"] / row["in_process"] for row in rows),
    }


async def start(load: Load, started: float, text: str) -> Body:
    """Seconds to ready, to the page with a first explanation, and to another."""
    ready, seconds = time.perf_counter(), []
    for _ in range(2):
        before = time.perf_counter()
        await load.explain(text)
        seconds.append(time.perf_counter() - before)
    took = {"ready": ready - started, "explained": seconds[0], "explained_again": seconds[1]}
    return {name: median([one]) for name, one in took.items()}


async def first_token(load: Load, prompts: list[str], count: int) -> Body:
    """Seconds to the first token of a stream: alone, beside 7 others, and beside 7 that begin together."""

    async def measured() -> list[float]:
        return [(await load.stream(prompts[at % len(prompts)], max_tokens=2))[0] for at in range(count)]

    async def endless(seed: int, first: int) -> None:
        await load.stream(prompts[seed], max_tokens=first)
        for number in range(1_000_000):
            await load.stream(prompts[(seed + number) % len(prompts)])

    async def beside(first_of: Callable[[int], int]) -> list[float]:
        others = [asyncio.ensure_future(endless(seed, first_of(seed))) for seed in range(MANY - 1)]
        await asyncio.sleep(1)
        found = await measured()
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return found

    await load.stream(prompts[0], max_tokens=2)
    found = {
        "alone": await measured(),
        "beside": await beside(lambda seed: NEW * (seed + 1) // (MANY - 1)),  # which end one by one
        "together": await beside(lambda _: NEW),
    }
    return {
        **{f"{name}_median": median(seconds) for name, seconds in found.items()},
        **{f"{name}_p99": quantile(seconds, 0.99) for name, seconds in found.items()},
        **{
            f"{name}_p99_to_alone": round(quantile(found[name], 0.99) / statistics.median(found["alone"]), 2)
            for name in ("beside", "together")
        },
    }


@contextmanager
def served(home: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serve a store; return the address, and the server's process id."""
    command = [*SERVE, "--home", str(home), "serve", "--port", "0", "--model", "m", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while "ready: " not in said:
            line = process.stderr.readline()
            if not line:
                raise SystemExit(f"the server did not start:\n{said}")
            said += line
        found = re.search(r"http://\S+", said)
        assert found
        subprocess.Popen(
            ["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL
        )  # so that its log never fills up
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(60)


def _resident(pid: int) -> int:
    """Return the memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def median(values: Any) -> float:
    """Round to the digits that a measurement can tell."""
    return float(f"{statistics.median(values):.3g}")


def quantile(values: list[float], share: float) -> float:
    """Return a percentile of the values: the smallest that the given share of them does not exceed."""
    return float(f"{sorted(values)[min(len(values) - 1, int(share * len(values)))]:.3g}")


async def measured(home: Path, texts: list[TextDocument], options: argparse.Namespace) -> Body:
    """All figures of one server."""
    lm = knnstore.load(home, "r")
    fitting = [one for one in texts if PROMPT < len(lm.reader.tokenize(one.text)) < lm.reader.max_length - 2]
    prompts = [lm.reader.decode(lm.reader.tokenize(one.text)[:PROMPT].tolist()) for one in fitting[:64]]
    settings = resolve(lm.store, KNNSettings(selection=Selection(domains=(options.domain,))))
    long = next(one for one in texts if len(lm.reader.tokenize(one.text)) >= EXPLAINED or options.smoke)
    explained = lm.reader.decode(lm.reader.tokenize(long.text)[:EXPLAINED].tolist())
    found: Body = {"threads": torch.get_num_threads(), "records": lm.store.record_count()}
    started = time.perf_counter()
    with served(home, *options.serve) as (url, pid):
        load = Load(url, "", f"m+{options.domain}")
        parts = options.only or PARTS
        if "start" in parts:
            found["start"] = await start(load, started, explained)
        if "streams" in parts:
            found["streams"] = await streams(load, lm, settings, prompts, options.rounds)
        if "scoring" in parts:
            found["scoring"] = await scoring(load, lm, settings, fitting[: options.scored], options.rounds)
        if "first" in parts:
            found["first"] = await first_token(load, prompts, options.firsts)
        if "mixed" in parts and options.minutes:
            found["mixed"] = await mixed(
                Mixture(load, fitting, prompts), options.minutes * 60, partial(_resident, pid)
            )
        await load.client.aclose()
    lm.store.close()
    summary = {name: found[part][of] for name, (part, of) in SUMMARY.items() if part in found}
    return {"summary": summary, **found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--domain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scored", type=int, default=48, help="documents a round")
    parser.add_argument("--firsts", type=int, default=100, help="streams whose first token is timed")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="of `knnstore serve`")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke and not (options.home and options.texts and options.domain):
        parser.error("name a store, --texts and --domain, or --smoke")
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.home, options.domain = Path(folder) / "home", "help"
            options.rounds, options.scored, options.firsts, options.minutes = 1, 2, 3, 0.05
            parts = smoke_parts()
            texts = [TextDocument(one.id, one.text[:500]) for one in parts["dev"] + parts["test"]]
            lm = knnstore.create(options.home, str(TINY_LM))
            lm.add(parts["store"], domain="help")
            lm.store.close()
        else:
            texts = list(read_documents([options.texts]))[:400]
        print(json.dumps(asyncio.run(measured(options.home, texts, options)), indent=2))


if __name__ == "__main__":
    main()
