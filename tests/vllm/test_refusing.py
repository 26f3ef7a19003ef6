"""Starts that are refused, each with a message that says why."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm.conftest import MODEL, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("refusal_program.py")


@pytest.fixture(scope="module")
def home(make_store) -> Path:
    return make_store().store.home.path


@pytest.fixture
def try_starts(vllm_python) -> Callable[..., list[str | None]]:
    """Create configurations of vLLM; returns the message of each, None if it is accepted.

    A configuration is the arguments of the engine and the environment variables of knnstore.
    """

    def run(
        *configurations: tuple[Mapping[str, Any], Mapping[str, str]], change: str = "none"
    ) -> list[str | None]:
        done = subprocess.run(
            [vllm_python, str(PROGRAM), str(MODEL), change],
            input=json.dumps(configurations),
            capture_output=True,
            check=False,
            text=True,
            timeout=300,
            env=vllm_environment(None),
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout)

    return run


def copy_model(folder: Path) -> Path:
    shutil.copytree(MODEL, folder)
    return folder


def test_another_model_or_tokenizer_an_impossible_option_a_missing_home_and_a_wrong_variable(
    home, try_starts, tmp_path
) -> None:
    same, trained, other_words = (copy_model(tmp_path / name) for name in ("same", "trained", "words"))
    weights = load_file(trained / "model.safetensors")
    last = sorted(weights)[-1]
    weights[last] = weights[last] + 1
    save_file(weights, trained / "model.safetensors", {"format": "pt"})
    words = json.loads((other_words / "tokenizer.json").read_text())
    words["normalizer"] = {"type": "Lowercase"}
    (other_words / "tokenizer.json").write_text(json.dumps(words))
    stored = {"KNNSTORE_HOME": str(home)}
    found = try_starts(
        ({"model": str(same)}, stored),
        ({"model": str(trained)}, stored),
        ({"model": str(other_words)}, stored),
        ({"tokenizer": str(other_words)}, stored),
        ({"enable_lora": True}, stored),
        ({"enable_prompt_embeds": True}, stored),
        ({}, {"KNNSTORE_HOME": str(tmp_path / "nothing")}),
        ({}, stored | {"KNNSTORE_ON_ERROR": "ignore"}),
    )
    expected = [
        None,
        "FingerprintMismatchError: the store was made with the model",
        "FingerprintMismatchError: the store was made with the tokenizer",
        "FingerprintMismatchError: the store was made with the tokenizer",
        "ConfigError: LoRA adapters (--enable-lora)",
        "ConfigError: a store needs the tokens of each prompt",
        "StoreNotFoundError",
        "ConfigError: KNNSTORE_ON_ERROR is fail or fallback, got 'ignore'",
    ]
    for message, beginning in zip(found, expected, strict=True):
        assert str(message).startswith(str(beginning))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("version", r"tested with vllm .*, this is 0\.33\.1"),
        pytest.param(
            "name",
            r"has no vllm\.v1\.worker\.gpu_model_runner\.GPUModelRunner\._model_forward",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_another_vllm_is_refused_with_a_store(home, try_starts, change, message) -> None:
    (refused,) = try_starts(({}, {"KNNSTORE_HOME": str(home)}), change=change)
    assert re.match(f"ConfigError: .*{message}", str(refused))


@pytest.mark.exhaustive
def test_another_vllm_is_accepted_without_a_store(try_starts) -> None:
    assert try_starts(({}, {"KNNSTORE_ON_ERROR": "ignore"}), change="version") == [None]


def test_the_server_prints_one_line(home, vllm_python) -> None:
    done = subprocess.run(
        [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--enable-lora"],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
        env=vllm_environment(home),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("knnstore: LoRA adapters (--enable-lora)")
    assert "Traceback" not in done.stderr
