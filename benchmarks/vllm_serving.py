"""Speed of vLLM with a store, beside vLLM alone and `knnstore serve`, over HTTP.

    python benchmarks/vllm_serving.py HOME --texts FILE.jsonl --vllm-python .venv-vllm/bin/python [--rounds 3]

HOME is a store that nobody writes to. FILE holds documents whose beginnings are continued. The sides take
turns: each round starts a server, warms it, and sends all requests at 1, 8 and 32 at a time. The figures are
medians of the rounds:

- ``tokens_a_second``: generated tokens a second;
- ``first``: seconds to the first token of a stream, median;
- ``memory``: largest resident memory of the server's processes in MiB, with the mapped files of the store.

JSON goes to stdout: each figure, and the ratios to vLLM alone.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from knnstore.documents import read_documents
from knnstore.store import KNNStore

CONCURRENT = (1, 8, 32)
SIDES = ("vllm", "vllm with store", "knnstore serve")


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--model", help="default is the store's model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="requests of each measurement")
    parser.add_argument("--characters", type=int, default=600, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that each request generates")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    with KNNStore.open(options.home) as store:
        model = options.model or store.identity.model
        domains = [domain.name for domain in store.domains()]
    texts = [document.text[: options.characters] for document in read_documents([options.texts])]
    prompts = (texts * (1 + options.requests // len(texts)))[: options.requests]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES:
            print(f"round {number + 1}: {side}", file=sys.stderr)
            with serve(side, options, model, domains) as (url, name, process):
                rounds[side].append(asyncio.run(measure(url, name, prompts, options.tokens, process)))
            print(json.dumps(rounds[side][-1]), file=sys.stderr)
    print(json.dumps(summarize(rounds), indent=1))


@contextmanager
def serve(
    side: str, options: argparse.Namespace, model: str, domains: list[str]
) -> Iterator[tuple[str, str, psutil.Process]]:
    """Start the server of a side; yields its URL, the name of the model to ask for, and its process."""
    port = choose_port()
    if side == "knnstore serve":
        command = [sys.executable, "-c", "from knnstore.cli import main; main()", "--home", str(options.home)]
        command += ["serve", "--port", str(port), "--read-only"]
        name = "+".join([Path(model).name, *domains])
        variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    else:
        command = make_vllm_command(options.vllm_python, model, port)
        name, variables = "model", {}
        if side == "vllm with store":
            variables = {"KNNSTORE_HOME": str(options.home)}
    with run_server(command, port, options.threads, variables) as (url, process):
        yield url, name, process


def choose_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def make_vllm_command(python: str, model: str, port: int, *more: str) -> list[str]:
    """Return the command that serves a model with vLLM under the name ``model``, and with further options."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    return [*command, "--no-enable-prefix-caching", "--served-model-name", "model", *more]


@contextmanager
def run_server(
    command: list[str], port: int, threads: int, variables: dict[str, str]
) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server until the context ends; yields its URL and its process once it answers.

    Args:
        command: the command.
        port: the port that it listens at.
        threads: number of threads of its operations.
        variables: environment variables beside those of this process.
    """
    dropped = ("PYTHONPATH", "KNNSTORE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2", **variables}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers; end the program if it does not start."""
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"a server ended at its start: {process.args}")
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"a server does not answer: {process.args}")


async def measure(
    url: str, name: str, prompts: list[str], tokens: int, process: psutil.Process
) -> dict[str, Any]:
    """Send all prompts at each number of concurrent requests; returns the figures of a round."""
    figures: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=64)) as client:
        for prompt in prompts[:2]:  # warm up
            await stream(client, url, name, prompt, tokens)
        for concurrent in CONCURRENT:
            sent = prompts if concurrent > 1 else prompts[: max(4, len(prompts) // 4)]
            slots = asyncio.Semaphore(concurrent)

            async def send(prompt: str, slots: asyncio.Semaphore = slots) -> tuple[float, int]:
                async with slots:
                    return await stream(client, url, name, prompt, tokens)

            started = time.perf_counter()
            answers = await asyncio.gather(*(send(prompt) for prompt in sent))
            seconds = time.perf_counter() - started
            figures[str(concurrent)] = {
                "tokens_a_second": sum(count for _, count in answers) / seconds,
                "first": statistics.median(first for first, _ in answers),
            }
    family = [process, *process.children(recursive=True)]
    figures["memory"] = sum(one.memory_info().rss for one in family) / 2**20
    return figures


async def stream(
    client: httpx.AsyncClient, url: str, name: str, prompt: str, tokens: int
) -> tuple[float, int]:
    """Ask for a stream; returns the seconds to the first token, and the number of tokens."""
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    started, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", url + "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"] and not first:
                first = time.perf_counter() - started
            if event.get("usage"):
                count = event["usage"]["completion_tokens"]
    return first, count


def summarize(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of each side, and their ratios to vLLM alone."""
    result: dict[str, Any] = {}
    for side, figures in rounds.items():
        result[side] = {"memory": statistics.median(one["memory"] for one in figures)}
        for concurrent in map(str, CONCURRENT):
            result[side][concurrent] = {
                name: statistics.median(one[concurrent][name] for one in figures)
                for name in ("tokens_a_second", "first")
            }
    alone = result[SIDES[0]]
    for side in SIDES[1:]:
        result[side]["to_alone"] = {
            concurrent: {
                name: round(result[side][concurrent][name] / alone[concurrent][name], 3)
                for name in ("tokens_a_second", "first")
            }
            for concurrent in map(str, CONCURRENT)
        }
    return result


if __name__ == "__main__":
    main()
