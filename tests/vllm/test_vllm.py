"""vLLM with a store, next to this library's own `generate` and `forward`: the same numbers."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from knnstore.documents import read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings, NGramSettings, Purpose, resolve, save_settings
from knnstore.lm.hosts import RequestOptions
from tests.vllm.conftest import EXAMPLES, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS = 12
TIED = 2
"""Scores at the beginning of a text that are compared roughly. Many stored documents begin with the same
tokens, so many records are equally near, and rounding decides which of them are the nearest 8 of the gate."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"knn_domains": "handbook"},
    {"knn_domains": ["log"], "knn_lambda": 0.4, "knn_temperature": 30.0, "knn_k": 200},
    {"knn_off": True},
    {},
]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True},
    "preemption": {"num_gpu_blocks_override": 7, "block_size": 32, "max_model_len": 96, "max_num_seqs": 5},
    "asynchronous": {"async_scheduling": True},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
    "drafts from documents": {
        "speculative_config": {
            "method": "custom_class",
            "model": "knnstore.lm.hosts.vllm.StoreDrafts",
            "num_speculative_tokens": 6,
        }
    },
}


@pytest.fixture(scope="module")
def lm(make_store) -> KNNLMForCausalLM:
    """A store with keys of three states, n-grams, recent text and a gate over all of them."""
    lm = make_store()
    texts = read_documents([EXAMPLES / "workshop/dev", EXAMPLES / "workshop/handbook"])
    sentences = [one for document in texts for one in document.text.split(". ")]
    rng = np.random.default_rng(3)
    lm.calibrate([". ".join(rng.choice(sentences, 20)) for _ in range(16)])
    settings = lm.resolve_settings()
    assert settings.gate is not None
    assert set(settings.parts) == {"keys", "n-grams", "cache", "own n-grams"}
    return lm


def prompts(lm: KNNLMForCausalLM) -> list[list[int]]:
    """Return beginnings of the example texts of three lengths."""
    texts = [document.text for document in read_documents([EXAMPLES / "workshop/test"])]
    lengths = [40, 25, 8, 30, 33]
    return [
        [*lm.reader.prefix, *lm.reader.tokenize(text)[:length].tolist()]
        for text, length in zip((texts * 5)[: len(lengths)], lengths, strict=True)
    ]


def requests_for(lm: KNNLMForCausalLM) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "options": options, "tokens": TOKENS, "scores": row % 2 == 0}
        for row, (prompt, options) in enumerate(zip(prompts(lm), OPTIONS, strict=True))
    ]


def settings_for(lm: KNNLMForCausalLM, options: dict[str, Any], purpose: Purpose) -> KNNSettings:
    parsed = RequestOptions.parse(options)
    if parsed.is_off:
        return KNNSettings(lam=0.0)
    return resolve(lm.store, parsed.overrides(parsed.domains), purpose)


def check(lm: KNNLMForCausalLM, requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """Compare answers of vLLM with those of this library."""
    for request, answer in zip(requests, answers, strict=True):
        prompt, options = torch.tensor([request["prompt"]]), request["options"]
        output = lm.generate(
            prompt,
            knn=settings_for(lm, options, Purpose.GENERATION),
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, prompt.shape[1] :].tolist()
        assert answer["tokens"] == tokens
        log_probs = [
            logits[0].log_softmax(-1)[token].item()
            for logits, token in zip(output.logits, tokens, strict=True)
        ]
        assert answer["log_probs"] == pytest.approx(log_probs, abs=1e-4)
        if request["scores"]:
            with torch.no_grad():
                whole = lm(prompt, knn=settings_for(lm, options, Purpose.SCORING)).logits[0].log_softmax(-1)
            scores = whole[:-1].gather(1, prompt[0, 1:, None])[:, 0].tolist()
            assert answer["scores"][:TIED] == pytest.approx(scores[:TIED], abs=0.1)
            assert answer["scores"][TIED:] == pytest.approx(scores[TIED:], abs=1e-4)


IN_CI = {"preemption", "drafts from documents", "before a norm, joined"}


def cases(names: Iterable[str]) -> list[Any]:
    """Return the cases as parameters; those that CI leaves out have the marker `exhaustive`."""
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("mode", cases(MODES))
def test_vllm_predicts_what_this_library_does(lm, run_engine, mode) -> None:
    """Requests with settings of their own in one batch, twice, so that prefixes are in vLLM's cache."""
    requests = requests_for(lm)
    engine = {"model": str(MODEL), "max_model_len": 128, **MODES[mode]}
    found = run_engine(lm.store.home.path, {"engine": engine, "rounds": [requests, requests]})
    for answers in found["rounds"]:
        check(lm, requests, answers)
    if mode == "preemption":
        assert found["metrics"]["vllm:num_preemptions"] > 0
    if "drafts" in mode:
        assert found["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.exhaustive
def test_drafts_from_documents_serve_a_model_without_a_store(lm, make_store, run_engine) -> None:
    """The drafts' store has no keys. The text is that of the model alone, and most drafts are right."""
    text = next(iter(read_documents([EXAMPLES / "workshop/handbook"]))).text
    request = {"prompt": [*lm.reader.prefix, *lm.reader.tokenize(text)[:20].tolist()], "tokens": 24}
    engine = {"model": str(MODEL), "max_model_len": 128}
    alone = run_engine(None, {"engine": engine, "rounds": [[request]]})
    drafted = run_engine(
        None,
        {"engine": engine | MODES["drafts from documents"], "rounds": [[request]]},
        KNNSTORE_DRAFTS_HOME=str(make_store(key=None).store.home.path),
    )
    assert drafted["rounds"][0][0]["tokens"] == alone["rounds"][0][0]["tokens"]
    assert drafted["metrics"]["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.exhaustive
def test_two_processes_share_the_model(lm, run_engine) -> None:
    """Tensor parallelism over gloo: the first process mixes, and both sample from the same logits."""
    requests = requests_for(lm)
    engine = {"model": str(MODEL), "max_model_len": 128, "tensor_parallel_size": 2}
    found = run_engine(
        lm.store.home.path,
        {"engine": engine, "rounds": [requests]},
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    check(lm, requests, found["rounds"][0])


@pytest.mark.exhaustive
def test_the_second_model_runner_predicts_the_same(lm, run_engine) -> None:
    """Model Runner V2, whose kernels Triton's interpreter runs."""
    requests = [{**request, "tokens": TOKENS} for request in requests_for(lm)]
    engine = {"model": str(MODEL), "max_model_len": 128}
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    found = run_engine(
        lm.store.home.path, {"engine": engine, "rounds": [requests], "triton": True}, **variables
    )
    check(lm, requests, found["rounds"][0])


KEYS: dict[str, dict[str, Any]] = {
    "single states": {"states": 1},
    "head input": {"states": 1, "key": "final_hidden"},
    "before a norm, joined": {"key": "ffn_input_before_norm"},
    "attention input": {"states": 1, "key": "attention_input@0"},
    "no keys": {"key": None},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A random Llama, whose normalizations in vLLM add the residual, with the small model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


@pytest.mark.parametrize("keys", cases(KEYS))
def test_keys_of_every_place_are_those_of_transformers(make_store, llama, run_engine, keys) -> None:
    """Settings that need no states of earlier tokens read vLLM's prefix cache."""
    lm = make_store(llama, **KEYS[keys])
    ngrams = NGramSettings(4, 0.4)
    save_settings(lm.store, KNNSettings(64, 5.0, lam=0.6, ngrams=ngrams))
    if keys == "no keys":
        save_settings(lm.store, KNNSettings(lam=0.0, ngrams=ngrams))
    requests = [{**request, "scores": False} for request in requests_for(lm)]
    if keys == "no keys":
        requests = [request for request in requests if "knn_lambda" not in request["options"]]
    engine = {"model": str(llama), "max_model_len": 128, "block_size": 32}
    found = run_engine(lm.store.home.path, {"engine": engine, "rounds": [requests, requests]})
    for answers in found["rounds"]:
        check(lm, requests, answers)
    needs_states = keys == "before a norm, joined"
    for request, answer in zip(requests, found["rounds"][1], strict=True):
        reads_cache = not needs_states or request["options"] == {"knn_off": True}
        assert (answer["cached"] > 0) == (reads_cache and len(request["prompt"]) > 32)
