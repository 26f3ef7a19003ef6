"""lm-eval over the protocol: the same likelihoods as of the same model in its own process."""

import itertools

import pytest
import torch

import knnstore
from knnstore import Selection
from knnstore.lm import settings_for

pytest.importorskip("lm_eval")

WORDS = ["The harbour", "council", "winter storms", "naïve café 🙂", "the boat was", "In the morning"]


def requests(kind: str, pairs: list[tuple[object, ...]]):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, at, ("t", None, 1)) for at, pair in enumerate(pairs)]


def likeliest_after(lm, text: str) -> str:
    """The most probable of the tokens that are words and stay apart from what is before them."""
    ids = lm.reader.tokenize(text).tolist()
    with torch.inference_mode():
        ranked = lm(torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()
    return next(
        word
        for word in (lm.reader.decode([token]) for token in ranked)
        if word.startswith(" ") and len(lm.reader.tokenize(text + word)) == len(ids) + 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["huggingface", "auto"])
def test_likelihoods_are_those_of_the_model_in_process(server, prepared, model_path, backend):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = knnstore.load(prepared)
    lm.knn = settings_for(lm.store, Selection(domains=("news",)))
    with lm.store:
        local = HFLM(lm, tokenizer=lm.tokenizer, batch_size=1, max_length=96)
        remote = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="tiny+news", tokenizer=str(model_path),
            tokenizer_backend=backend, batch_size=3, max_length=96, tokenized_requests=True,
        )  # fmt: skip
        pairs = [(context, f" {text}") for context, text in itertools.product(WORDS, WORDS)]
        pairs += [(text, likeliest_after(lm, text)) for text in WORDS]
        expected = local.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
        found = remote.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
        assert [one[1] for one in found] == [one[1] for one in expected]
        assert {one[1] for one in found} == {True, False}
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-5, rel=3e-7)
        asked = [(text, {"until": ["."], "max_gen_toks": 12, "do_sample": False}) for text in WORDS]
        assert remote.generate_until(requests("generate_until", asked), disable_tqdm=True) == [
            *local.generate_until(requests("generate_until", asked), disable_tqdm=True)
        ]
