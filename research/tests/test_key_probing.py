"""Probing key locations: exact neighbors, and places of which is known how good they are."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from knnstore_research.key_probing import default_keys, nearest_keys, probe_keys

from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, InputError, UnusableDocumentError
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(7)
DOCUMENTS = documents(RNG, phrases(RNG, 30), "d", 36)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_neighbors_are_the_nearest(metric, monkeypatch) -> None:
    monkeypatch.setattr("knnstore_research.key_probing._DISTANCES", 1000)  # several steps
    keys = torch.from_numpy(RNG.standard_normal((300, 8)).astype(np.float32)) + 100
    queries = keys[:20] + torch.from_numpy(RNG.standard_normal((20, 8)).astype(np.float32))
    distances, rows = nearest_keys(queries, keys, 7, metric)
    differences = (queries.double()[:, None] - keys.double()).square().sum(-1)
    exact = differences if metric == "l2" else -(queries.double() @ keys.double().T)
    expected = exact.sort(1)
    torch.testing.assert_close(distances.double(), expected.values[:, :7], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(exact.gather(1, rows), expected.values[:, :7], rtol=1e-4, atol=1e-3)


def test_a_place_that_says_nothing_is_last(make_model, tokenizer) -> None:
    model = make_model("gpt2")
    with torch.no_grad():  # what enters the attention is the same for every token
        model.transformer.h[1].ln_1.weight.zero_()
    keys = ["attention_input", "ffn_input"]
    found = probe_keys(
        model, tokenizer, DOCUMENTS, keys=keys, metrics=["l2"], states=[1], dims=[8], max_length=32
    )
    assert [(candidate.key, candidate.dim) for candidate in found.candidates[-1:]] == [(keys[0], 32)]
    assert found.candidates[-1].fitted.held_out.ppl > 30  # no more than how frequent the tokens are
    best = found.best
    assert best is not None
    assert best.fitted.held_out.ppl < found.base.ppl / 4
    assert sorted(candidate.dim for candidate in found.candidates) == [8, 32, 32]
    losses = [candidate.fitted.held_out.ppl for candidate in found.candidates]
    assert losses == sorted(losses)
    assert (found.stored, found.held_out, found.documents) == (24 * 108, 12 * 108, 12)
    assert all(math.isfinite(candidate.fitted.change.high) for candidate in found.candidates)


def test_a_document_that_the_model_cannot_read_is_left_out_and_named(make_model, tokenizer) -> None:
    wide = deepcopy(tokenizer)
    wide.add_tokens(["<new>"])
    given = [*DOCUMENTS[:20], TextDocument("bad", "w5 <new> w6"), *DOCUMENTS[20:]]
    options = {"keys": ["ffn_input"], "metrics": ["l2"], "states": [1], "max_length": 32}
    with pytest.raises(UnusableDocumentError, match="document 'bad'"):
        probe_keys(make_model("gpt2"), wide, given, **options)
    left_out: list[UnusableDocumentError] = []
    found = probe_keys(make_model("gpt2"), wide, given, on_bad=left_out.append, **options)
    assert [one.id for one in left_out] == ["bad"]
    assert (found.stored, found.held_out, found.documents) == (24 * 108, 12 * 108, 12)


@pytest.mark.slow
@pytest.mark.parametrize("remembers", [False, True])
def test_joined_states_help_a_model_that_forgets_where_the_text_remembers(make_model, tokenizer, remembers):
    model = make_model("gpt2")
    with torch.no_grad():  # no state knows of any token but its own
        model.transformer.wpe.weight.zero_()
        for layer in model.transformer.h:
            layer.attn.c_proj.weight.zero_()
    # The next token depends on the last two, or on the last alone.
    after = RNG.integers(4, 24, (100, 100, 2))
    texts = []
    for at in range(36):
        tokens = [4, 4]
        for choice in RNG.integers(0, 2, 100):
            tokens.append(int(after[tokens[-2] if remembers else 0, tokens[-1], choice]))
        texts.append(TextDocument(str(at), " ".join(f"w{token}" for token in tokens)))
    found = probe_keys(
        model,
        tokenizer,
        texts,
        keys=["ffn_input"],
        metrics=["l2"],
        states=[1, 3, 2],
        dims=[16],
        max_length=32,
    )
    by_kind = {(one.states, one.dim): one for one in found.candidates}
    assert by_kind.keys() > {(1, 32), (2, 32), (3, 32)}
    (few,) = (one for one in found.candidates if one.dim == 16)  # the best of them
    assert len(by_kind) == 4
    assert by_kind[2, 32].fitted.held_out != by_kind[3, 32].fitted.held_out
    if remembers:
        assert few.states > 1
        assert few.change.ppl == pytest.approx(
            few.fitted.held_out.ppl / by_kind[1, 32].fitted.held_out.ppl, rel=1e-6
        )
        assert few.change.high < 0.7
    single = by_kind[1, 32]
    assert single.change is None
    for states in (2, 3):
        joined = by_kind[states, 32]
        ratio = joined.fitted.held_out.ppl / single.fitted.held_out.ppl
        assert joined.change.ppl == pytest.approx(ratio, rel=1e-6)
        assert joined.change.high < 0.7 if remembers else joined.change.ppl > 0.95
        assert joined.change.low <= ratio <= joined.change.high


def test_each_place_of_a_model_is_probed_once(make_model) -> None:
    assert len(default_keys(make_model("gpt2"))) == 10
    assert len(default_keys(make_model("cohere2"))) == 8  # attention and feed-forward share a norm


def test_what_cannot_be_probed_is_refused(make_model, tokenizer) -> None:
    model = make_model("gpt2")
    with pytest.raises(InputError, match="23 documents of 2,484 tokens are too little"):
        probe_keys(model, tokenizer, DOCUMENTS[:23])
    with pytest.raises(ConfigError, match="no module"):
        probe_keys(model, tokenizer, DOCUMENTS, keys=["nowhere"])
    with pytest.raises(ConfigError, match="metric must be one of l2, ip, got 'cosine'"):
        probe_keys(model, tokenizer, DOCUMENTS, metrics=["cosine"])
