"""The server of vLLM with a store: requests over HTTP, and a store that changes or breaks meanwhile."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, Purpose
from tests.vllm.conftest import MODEL, vllm_environment
from tests.vllm.test_vllm import settings_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SECRET = "The secret of the brass key is that it opens the green door behind the old workshop."


class Served:
    """A running server."""

    def __init__(self, port: int, log: Path) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log

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
def serve(vllm_python: str, home: Path, folder: Path, **variables: str) -> Iterator[Served]:
    """Serve the small model, and stop the server at the end.

    The command `vllm serve` does not work in the CPU wheel, which has another name.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--port", str(port)]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [vllm_python, "-m", module, "--model", str(MODEL), "--served-model-name", "tiny", *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=vllm_environment(home, **variables),
            start_new_session=True,
        )
    served = Served(port, log)
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-6000:]
            try:
                served.get("/health")
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-6000:])
        yield served
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def lm(make_store) -> KNNLMForCausalLM:
    return make_store()


def test_requests_over_http_use_the_store_as_it_is_now(lm, vllm_python, tmp_path) -> None:
    prompt = [lm.reader.prefix, *lm.reader.tokens(SECRET).tolist()]
    start, rest = prompt[:12], prompt[12:]
    options = {"max_tokens": len(rest), "logprobs": 0, "return_token_ids": True}
    with serve(vllm_python, lm.store.home.path, tmp_path) as served:
        # 1) Echo returns the log-probabilities of the prompt.
        status, answer = served.complete(prompt, echo=True, **{**options, "max_tokens": 1})
        assert status == 200
        with torch.no_grad():
            knn = settings_for(lm, {}, Purpose.SCORING)
            whole = lm(torch.tensor([prompt]), knn=knn).logits[0].log_softmax(-1)
        expected = whole[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert answer["choices"][0]["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        # 2) Wrong options are refused by name.
        for name, value in (("knn_lambda", 2), ("knn_domains", "none"), ("knn_x", 1)):
            status, answer = served.complete(start, vllm_xargs={name: value})
            assert status == 400
            assert name in answer["error"]["message"]
        # 3) The next request sees a document that is added, and does not see it after its removal.
        _, before = served.complete(start, **options)
        lm.add([TextDocument("secret", SECRET)], domain="secrets")
        only_new = {"knn_domains": "secrets", "knn_lambda": 0.99}
        _, answer = served.complete(start, vllm_xargs=only_new, **options)
        assert answer["choices"][0]["token_ids"] == rest
        lm.store.remove_document("secret")
        _, after = served.complete(start, **options)
        assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"] != rest


@pytest.mark.parametrize("action", ["fail", pytest.param("fallback", marks=pytest.mark.exhaustive)])
def test_a_damaged_store_fails_requests_and_not_the_engine(lm, vllm_python, tmp_path, action) -> None:
    home = tmp_path / "copy"
    shutil.copytree(lm.store.home.path, home)
    prompt = [lm.reader.prefix, *lm.reader.tokens(SECRET).tolist()][:20]
    off = {"vllm_xargs": {"knn_off": 1}, "return_token_ids": True}
    with serve(vllm_python, home, tmp_path, KNNSTORE_ON_ERROR=action) as served:
        assert served.complete(prompt)[0] == 200
        (home / "catalog.db").write_bytes(b"damaged" * 10_000)
        status, answer = served.complete(prompt, return_token_ids=True)
        alone = served.complete(prompt, **off)
        assert alone[0] == 200
        if action == "fail":
            assert status == 500
        else:
            assert status == 200
            assert answer["choices"][0]["token_ids"] == alone[1]["choices"][0]["token_ids"]
            assert answer["choices"][0]["stop_reason"] == "knnstore_fallback"
        assert served.failures(action) == 1
        assert "the store failed" in served.log.read_text()
