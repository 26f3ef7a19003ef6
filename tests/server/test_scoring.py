"""Given texts are scored as the mixture's whole distribution says, several at once, whatever is mixed in."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import knnstore
from knnstore import KNNSettings, Selection
from knnstore.lm import (
    CacheSettings,
    DomainWeights,
    NGramSettings,
    TextState,
    read_part,
    score_targets,
)
from knnstore.lm.mixing import interpolation
from tests.lm.scored import AllNeighborsLambda

CACHE, NGRAMS = CacheSettings(size=20, temperature=20.0, lam=0.3), NGramSettings(order=4, lam=0.5)
SETTINGS = {
    "alone": KNNSettings(lam=0.0),
    "nearest": KNNSettings(k=5, lam=0.4, temperature=30.0),
    "far": KNNSettings(k=5, mixer=AllNeighborsLambda(), temperature=30.0),
    "cells": KNNSettings(probes=2, lam=0.4, temperature=30.0),
    "all": KNNSettings(probes=2, lam=0.4, temperature=30.0, cache=CACHE, ngrams=NGRAMS),
    "domains": KNNSettings(
        probes=2, temperature=30.0, mixer=DomainWeights(("letters", "news"), (0.5, 0.2), (1, 2))
    ),
    "one domain": KNNSettings(probes=2, lam=0.9, temperature=9.0, selection=Selection(domains=("news",))),
    "n-grams": KNNSettings(lam=0.0, ngrams=NGRAMS),
}  # fmt: skip


@pytest.fixture(scope="module")
def lm(prepared):
    opened = knnstore.load(prepared, "r")
    with opened.store:
        yield opened


@pytest.mark.parametrize("name", SETTINGS)
def test_is_what_the_distribution_says(lm, name, monkeypatch):
    monkeypatch.setattr(interpolation, "_VALUES_CPU", 2000)  # a few rows at a time
    settings, draw = SETTINGS[name], torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 290, (1, length), generator=draw) for length in (40, 1, 17, 2)]
    texts[0][0, 10:20] = torch.tensor(lm.reader.tokenize("The council voted to repair the harbour wall")[:10])
    parts = [read_part(lm, text, DynamicCache(), TextState(), settings) for text in texts]
    gold = [torch.randint(0, 290, (text.shape[1],), generator=draw) for text in texts]
    found = score_targets(lm, parts, gold, settings, 3)
    assert len(found) == len(texts)
    for text, came, scores in zip(texts, gold, found, strict=True):
        with torch.inference_mode():
            expected = lm(text, knn=settings, use_cache=False).logits[0].double().log_softmax(-1)
        torch.testing.assert_close(
            scores.gold.double(), expected.gather(1, came[:, None])[:, 0], atol=1e-5, rtol=1e-5
        )
        likeliest = expected.topk(3)
        torch.testing.assert_close(scores.best.double(), likeliest.values, atol=1e-5, rtol=1e-5)
        again = expected.gather(1, scores.tokens)  # where two are alike, either may be named
        torch.testing.assert_close(again, likeliest.values, atol=1e-5, rtol=1e-5)
