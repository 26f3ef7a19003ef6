"""The server of vLLM with a store: requests over HTTP, and a store that changes or breaks meanwhile."""

import shutil

import pytest
import torch

from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, Purpose
from tests.vllm.conftest import serve_model
from tests.vllm.test_vllm import settings_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SECRET = "The secret of the brass key is that it opens the green door behind the old workshop."


@pytest.fixture
def lm(make_store) -> KNNLMForCausalLM:
    return make_store()


def test_requests_over_http_use_the_store_as_it_is_now(lm, vllm_python, tmp_path) -> None:
    prompt = [*lm.reader.prefix, *lm.reader.tokenize(SECRET).tolist()]
    start, rest = prompt[:12], prompt[12:]
    options = {"max_tokens": len(rest), "logprobs": 0, "return_token_ids": True}
    with serve_model(vllm_python, lm.store.home.path, tmp_path / "log") as served:
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
    prompt = [*lm.reader.prefix, *lm.reader.tokenize(SECRET).tolist()][:20]
    off = {"vllm_xargs": {"knn_off": 1}, "return_token_ids": True}
    with serve_model(vllm_python, home, tmp_path / "log", KNNSTORE_ON_ERROR=action) as served:
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
            first, *_ = answer["choices"][0]["token_ids"]
            for stops in [], [first]:
                _, answer = served.complete(prompt, stop_token_ids=stops)
                assert answer["choices"][0]["stop_reason"] == "knnstore_fallback"
        assert served.failures(action) == (1 if action == "fail" else 3)
        assert "the store failed" in served.log.read_text()
