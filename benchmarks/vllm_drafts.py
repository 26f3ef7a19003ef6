"""Drafts in vLLM: from the documents of a store, beside vLLM's `ngram` and `suffix`, and without drafts.

    python benchmarks/vllm_drafts.py DRAFTS --texts NAME=FILE.jsonl ... --model DIR \
        --vllm-python .venv-vllm/bin/python [--home HOME] [--rounds 3]

DRAFTS is a store without keys whose text is proposed. Each FILE holds documents whose beginnings are
continued, for example one like the stored text and one of another kind. With --home, a store is mixed into
the model as well. `suffix` needs the package arctic-inference in vLLM's environment. The sides take turns:
each round starts a server for each side and sends the requests of each file one after the other. The figures
are medians of the rounds:

- ``tokens_a_second``: generated tokens a second;
- ``tokens_a_pass``: tokens that a pass of the model gives a text, 1 without drafts;
- ``accepted``: share of the draft tokens that are accepted.

JSON goes to stdout, with the ratios of the speeds to the side without drafts.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from vllm_serving import choose_port, make_vllm_command, run_server, stream

from knnstore.documents import read_documents

SIDES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    "store": {"method": "custom_class", "model": "knnstore.lm.hosts.vllm.StoreDrafts"},
}
"""The speculative configuration of vLLM by side."""


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drafts", type=Path)
    parser.add_argument("--texts", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="requests for each file")
    parser.add_argument("--characters", type=int, default=600, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens that each request generates")
    parser.add_argument("--draft-tokens", type=int, default=8, help="largest number of tokens of a draft")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    files = dict(text.split("=", 1) for text in options.texts)
    prompts = {
        name: [document.text[: options.characters] for document in read_documents([file])][: options.requests]
        for name, file in files.items()
    }
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            print(f"round {number + 1}: {side}", file=sys.stderr)
            rounds[side].append(measure_side(side, options, prompts))
    print(json.dumps(summarize(rounds, list(prompts)), indent=1))


def measure_side(
    side: str, options: argparse.Namespace, prompts: dict[str, list[str]]
) -> dict[str, dict[str, float]]:
    """Serve the model with the drafts of a side; return the figures of each file."""
    port, more = choose_port(), []
    variables = {"KNNSTORE_DRAFTS_HOME": str(options.drafts)}
    if options.home is not None:
        variables["KNNSTORE_HOME"] = str(options.home)
    if (configuration := SIDES[side]) is not None:
        more = [
            "--speculative-config",
            json.dumps({**configuration, "num_speculative_tokens": options.draft_tokens}),
        ]
    command = make_vllm_command(options.vllm_python, options.model, port, *more)
    with run_server(command, port, options.threads, variables) as (url, _):
        return asyncio.run(send_all(url, prompts, options.tokens))


async def send_all(url: str, prompts: dict[str, list[str]], tokens: int) -> dict[str, dict[str, float]]:
    """Send the requests of each file, one after the other; return the figures of each file."""
    figures = {}
    async with httpx.AsyncClient(timeout=600) as client:
        await stream(client, url, "model", next(iter(prompts.values()))[0], tokens)  # warm up
        for name, texts in prompts.items():
            before, started, count = await read_counts(client, url), time.perf_counter(), 0
            for text in texts:
                count += (await stream(client, url, "model", text, tokens))[1]
            seconds = time.perf_counter() - started
            passes, drafted, accepted = (
                after - earlier for after, earlier in zip(await read_counts(client, url), before, strict=True)
            )
            # A pass without a draft gives one token and is not counted by vLLM.
            figures[name] = {
                "tokens_a_second": count / seconds,
                "tokens_a_pass": count / (count - accepted) if passes else 1.0,
                "accepted": accepted / drafted if drafted else 0.0,
            }
    return figures


async def read_counts(client: httpx.AsyncClient, url: str) -> tuple[float, float, float]:
    """Return vLLM's counts of drafts, of draft tokens, and of accepted draft tokens; 0 without drafts."""
    metrics = (await client.get(url + "/metrics")).text
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    found = [re.search(rf"^vllm:spec_decode_{name}_total\{{.*\}} (\S+)$", metrics, re.M) for name in names]
    passes, drafted, accepted = (float(match[1]) if match else 0.0 for match in found)
    return passes, drafted, accepted


def summarize(rounds: dict[str, list[dict[str, Any]]], names: list[str]) -> dict[str, Any]:
    """Return the medians of each side and file, and the ratio of its speed to that without drafts."""
    medians = {
        side: {
            name: {key: statistics.median(one[name][key] for one in figures) for key in figures[0][name]}
            for name in names
        }
        for side, figures in rounds.items()
    }
    for figures in medians.values():
        for name in names:
            alone = medians["none"][name]["tokens_a_second"]
            figures[name]["to_none"] = round(figures[name]["tokens_a_second"] / alone, 3)
    return medians


if __name__ == "__main__":
    main()
