"""Mixed precision and half-precision weights: the numbers of float32 within rounding, in every engine."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import knnstore
from knnstore.lm import CacheSettings, FixedLambda, KNNSettings, NGramSettings
from tests.lm.kinds import make_kind, phrases, words

STORED = [words(phrases(8, seed)) for seed in range(40)]
HELD_OUT = [words(phrases(8, 50 + seed)) for seed in range(26)]
PLAIN = KNNSettings(k=2000, temperature=20.0, lam=0.4)  # all records: which is the last of fewer is rounding
EVERYTHING = replace(
    PLAIN, mixer=FixedLambda(0.4), ngrams=NGramSettings(order=4, lam=0.3), cache=CacheSettings(32, 20.0, 0.2)
)
ENGINES = {
    "cells": ("cells", {"cells": 12}),
    "cells int8": ("cells", {"cells": 12, "codes": "int8"}),
    "cells pq32": ("cells", {"cells": 12, "codes": "pq32"}),
    "faiss": ("faiss", {}),
    "hnswlib": ("hnswlib", {}),
    "keyless": (None, {}),
}
PRECISIONS = {
    "autocast bfloat16": ("autocast", torch.bfloat16),
    "autocast float16": ("autocast", torch.float16),
    "weights bfloat16": ("weights", torch.bfloat16),
    "weights float16": ("weights", torch.float16),
}
# A probability may change by the rounding of 2 layers of 32 wide sums.
TOLERANCE = {torch.bfloat16: 0.08, torch.float16: 0.03}


def figures(tokenizer, home, engine, kind, dtype, states=3):
    """Make a store, add and predict in a precision; return losses by the way they were computed."""
    store, params = ENGINES[engine]
    base = make_kind("llama").to(dtype if kind == "weights" else torch.float32)
    made = {"tokenizer": tokenizer, "max_length": 64}
    made |= {"key": None} if store is None else {"store": store, "params": params, "states": states}
    knn = replace(EVERYTHING, probes=4) if store == "cells" else EVERYTHING
    if store is None:
        knn = replace(EVERYTHING, mixer=FixedLambda(0.0))
    ids = torch.tensor([[0, *tokenizer(HELD_OUT[0])["input_ids"]]])
    found = {}
    with torch.autocast("cpu", dtype=dtype if kind == "autocast" else None, enabled=kind == "autocast"):
        lm = knnstore.create(home, base, **made)
        assert lm.add(STORED, domain="d").added == len(STORED)
        with torch.no_grad():
            output = lm(ids, labels=ids, knn=knn)
        assert output.logits.dtype == torch.float32
        found["forward"] = output.loss.item()
        found["evaluate"] = math.log(lm.evaluate(HELD_OUT, knn).knn_ppl)
        found["explain"] = -sum(math.log(one.p) for one in lm.explain(HELD_OUT[1], knn)) / 48
        # A pass over several tokens rounds otherwise than passes over one: of two likely tokens another wins.
        texts = []
        for draft in (True, False):
            text = lm.generate(ids[:, :9], knn=knn, max_new_tokens=8, do_sample=False, draft=draft)
            with torch.no_grad():
                probs = lm(text, knn=knn).logits[0, 8:-1].exp()
            chosen = probs.gather(1, text[0, 9:, None])[:, 0]
            assert (probs.amax(1) - chosen).max() <= (TOLERANCE[dtype] if kind else 1e-4)
            texts.append(text)
        assert kind or torch.equal(*texts)
    lm.store.close()
    return found


@pytest.fixture(scope="module")
def exact(tokenizer, tmp_path_factory):
    """The figures of float32 for an engine, computed once."""
    known = {}

    def figures_of(engine):
        if engine not in known:
            home = tmp_path_factory.mktemp("exact") / "home"
            known[engine] = figures(tokenizer, home, engine, "", torch.float32)
        return known[engine]

    return figures_of


def check(exact, tokenizer, tmp_path, engine, precision):
    kind, dtype = PRECISIONS[precision]
    found = figures(tokenizer, tmp_path / "home", engine, kind, dtype)
    assert found == pytest.approx(exact(engine), abs=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "precision",
    [one if one == "autocast bfloat16" else pytest.param(one, marks=pytest.mark.slow) for one in PRECISIONS],
)
def test_cells_predict_as_in_float32(exact, tokenizer, tmp_path, precision):
    check(exact, tokenizer, tmp_path, "cells", precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "engine",
    [
        one if one == "cells pq32" else pytest.param(one, marks=pytest.mark.exhaustive)
        for one in ENGINES
        if one != "cells"
    ],
)
def test_every_engine_predicts_as_in_float32(exact, tokenizer, tmp_path, engine, precision):
    check(exact, tokenizer, tmp_path, engine, precision)


@pytest.fixture(scope="module")
def lm(tokenizer, tmp_path_factory):
    home = tmp_path_factory.mktemp("precision") / "home"
    made = knnstore.create(
        home, make_kind("llama"), tokenizer=tokenizer, max_length=64, store="cells", params={"cells": 12}
    )
    made.add(STORED, domain="d")
    with made.store:
        yield made


def test_what_is_no_pass_of_the_model_is_not_rounded(lm):
    """The mixture of the same keys and logits is the same: autocast is for the model's layers alone."""
    ids = torch.tensor([[0, *lm.reader.tokenize(HELD_OUT[0]).tolist()]])
    seen = []
    handle = lm.base.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = lm(ids, knn=replace(EVERYTHING, probes=4)).logits
        assert torch.is_autocast_enabled("cpu")
    handle.remove()
    assert seen == [torch.bfloat16]
    assert logits.dtype == torch.float32
    assert logits.exp().sum(-1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_calibrated_gates_in_mixed_precision(lm):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lm.calibrate(HELD_OUT).settings is not None


def test_trainer_evaluates_in_mixed_precision(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "knn", replace(EVERYTHING, probes=4))
    ids = [
        {"input_ids": (one := [0, *lm.reader.tokenize(text).tolist()]), "labels": one}
        for text in HELD_OUT[:3]
    ]
    losses = {}
    for half in (False, True):
        options = TrainingArguments(
            str(tmp_path), bf16=half, use_cpu=True, per_device_eval_batch_size=1, report_to="none"
        )
        losses[half] = Trainer(lm, options, eval_dataset=ids).evaluate()["eval_loss"]
    assert losses[True] == pytest.approx(losses[False], abs=TOLERANCE[torch.bfloat16])
