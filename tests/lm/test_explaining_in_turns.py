"""An explanation that is cut into turns is the one that is made at once."""

from dataclasses import replace

import numpy as np
import pytest

from knnstore.lm import CacheSettings, KNNSettings, NGramSettings, explain_in_turns
from knnstore.lm.scoring import token_scores
from tests.lm.phrases import documents, phrases

CACHE, NGRAMS = CacheSettings(size=20, temperature=25.0, lam=0.2), NGramSettings(order=4, lam=0.3)
KEYS = KNNSettings(k=5000, temperature=25.0, lam=0.4)
SETTINGS = {
    "alone": KNNSettings(lam=0.0),
    "keys": KEYS,
    "cells": KNNSettings(probes=2, temperature=25.0, lam=0.4),
    "all": replace(KEYS, ngrams=NGRAMS, cache=CACHE),
    "n-grams": KNNSettings(lam=0.0, ngrams=NGRAMS),
}
LIKE = {"rel": 1e-3, "abs": 1e-6}


@pytest.fixture(scope="module")
def stored():
    rng = np.random.default_rng(3)
    made = phrases(rng, 6, 4, 40, length=6)
    return {name: documents(rng, made, name, 6, of=12) for name in ("news", "mail")}


@pytest.fixture(
    scope="module",
    params=[pytest.param((24, 12), marks=pytest.mark.slow), (64, 32)],
    ids=["many windows", "windows in parts"],
)
def lm(make_lm, stored, request):
    max_length, stride = request.param
    return make_lm(stored, max_length=max_length, stride=stride)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """The model of these tests has small windows: they are read in smaller parts than those of others."""
    monkeypatch.setattr(token_scores, "_TURN_TOKENS", 25)


def explained_in_turns(lm, text, settings, neighbors, after):
    """The tokens and documents of an explanation, and how many turns it took."""
    reader = lm.reader
    turns = explain_in_turns(
        lm, reader.tokenize(after + text), settings, neighbors=neighbors, start=len(reader.tokenize(after))
    )
    tokens, count = [], 0
    while True:
        count += 1
        try:
            tokens += next(turns)
        except StopIteration as end:
            return tokens, end.value, count


def shares(sources):
    """What is named for a token: its place and share, in any order, for equal shares have none."""
    return {(one.domain, one.document, one.position, one.part): one.share for one in sources}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("after", [pytest.param("", marks=pytest.mark.slow), "first"])
def test_is_what_is_explained_at_once(lm, stored, name, after):
    text = " ".join(one.text for one in stored["news"][:2])
    after = stored["mail"][0].text + " " if after else ""
    settings = SETTINGS[name]
    expected = lm.explain(text, settings, neighbors=3, after=after)
    tokens, found_documents, count = explained_in_turns(lm, text, settings, 3, after)
    assert len(tokens) > 64
    assert count > len(tokens) // 64
    assert [one.position for one in tokens] == [one.position for one in expected]
    for one, other in zip(tokens, expected, strict=True):
        assert (one.token, one.text) == (other.token, other.text)
        assert (one.p, one.p_lm, one.p_knn, one.lam) == pytest.approx(
            (other.p, other.p_lm, other.p_knn, other.lam), **LIKE
        )
        assert one.shares == pytest.approx(other.shares, **LIKE)
        assert len(one.neighbors) == len(other.neighbors)
        assert sum(shares(one.causes).values()) == pytest.approx(sum(shares(other.causes).values()), **LIKE)
    gains = {(one.domain, one.document): one.gain for one in found_documents}
    assert gains == pytest.approx(
        {(one.domain, one.document): one.gain for one in expected.documents}, rel=0.01, abs=0.02
    )


def test_a_turn_explains_few_tokens_of_many_neighbors(lm, stored):
    text, reader = stored["news"][0].text, lm.reader
    sizes = [
        max(len(part) for part in explain_in_turns(lm, reader.tokenize(text), KEYS, neighbors=neighbors))
        for neighbors in (64, 8)
    ]
    assert 0 < sizes[0] <= 8 < sizes[1] <= 64
