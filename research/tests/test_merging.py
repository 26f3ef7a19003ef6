"""Smaller stores: which records stay, and what those that stay stand for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from knnstore_research import merging
from knnstore_research.merging import (
    drop_at_random,
    drop_highest,
    find_weighted,
    merge_nearest,
    score_stored,
)
from knnstore_research.stored_records import StoredRecords

from knnstore.lm.calibration import ScoredText
from knnstore.lm.mixing import Evidence
from knnstore.store import EVERYTHING
from tests.lm.phrases import documents, phrases


def merge_one_by_one(tokens: np.ndarray, keys: np.ndarray, left: int) -> np.ndarray:
    """The weight of each record, one merge at a time."""
    weights = np.ones(len(tokens))
    while (weights > 0).sum() > left:
        alive = np.flatnonzero(weights)
        pairs = [
            (((keys[a] - keys[b]) ** 2).sum(), a, b)
            for a in alive
            for b in alive
            if a < b and tokens[a] == tokens[b]
        ]
        if not pairs:
            break
        _, a, b = min(pairs)
        stays, gone = (a, b) if weights[a] >= weights[b] else (b, a)
        weights[stays] += weights[gone]
        weights[gone] = 0
    return weights


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(1, 4), st.integers(1, 14))
def test_the_nearest_of_the_same_token_are_merged_first(seed, n, tokens, left) -> None:
    rng = np.random.default_rng(seed)
    values, keys = rng.integers(0, tokens, n), rng.standard_normal((n, 3)).astype(np.float32)
    assert np.array_equal(merge_nearest(values, keys, left), merge_one_by_one(values, keys, left))


def test_more_candidates_are_looked_for_where_the_first_do_not_suffice(monkeypatch) -> None:
    """Records that were merged in one round are merged again in the next, with all that they stand for."""
    monkeypatch.setattr(merging, "_NEAREST", 1)
    keys = np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32)
    weights = merge_nearest(np.zeros(300, np.int64), keys, 7)
    assert (weights > 0).sum() == 7
    assert weights.sum() == 300


def test_other_choices_weigh_what_stays_alike() -> None:
    assert drop_highest(np.array([3.0, 1.0, 2.0, 1.0]), 2).tolist() == [0, 1, 0, 1]
    weights = drop_at_random(50, 20)
    assert sorted(weights.tolist()) == [0] * 30 + [1] * 20


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_merging_what_is_equal_leaves_every_probability_as_it_was(metric) -> None:
    rng = np.random.default_rng(1)
    keys = np.repeat(rng.standard_normal((10, 8)).astype(np.float32), 4, axis=0)
    records = SimpleNamespace(keys=keys, tokens=np.repeat(rng.integers(0, 6, 10), 4), metric=metric)
    weights = merge_nearest(records.tokens, keys, 10)
    assert sorted(weights.tolist()) == [0] * 30 + [4] * 10
    queries, targets = torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32)), torch.arange(5)
    text = ScoredText(torch.zeros(5), targets, Evidence(torch.zeros(5), keys=queries), targets=targets)
    every = find_weighted(records, np.ones(40), text, 40)
    left = find_weighted(records, weights, text, 40)
    assert left.distances.shape == (5, 10)
    for temperature in (0.1, 1.0, 20.0):
        torch.testing.assert_close(left.knn_probs(temperature), every.knn_probs(temperature))


def test_stored_tokens_are_scored_in_the_order_of_their_records(make_lm) -> None:
    """Documents of several windows, read in batches of several."""
    rng = np.random.default_rng(5)
    lm = make_lm({"one": documents(rng, phrases(rng, 6), "d", 5, of=3)}, max_length=16, stride=8)
    records = StoredRecords(lm.store)
    found = score_stored(lm.store, lm.reader, EVERYTHING)
    assert len(found) == len(records)
    first = lm.store.tokens_by_number(next(iter(lm.store.lengths())))
    with torch.no_grad():
        log_probs = lm.base(torch.tensor([[0, *first[:14].tolist()]])).logits[0].log_softmax(-1)
    expected = log_probs[range(15), first[:15].astype(np.int64)]
    np.testing.assert_allclose(found[:15], expected, rtol=1e-3)
    assert records.tokens[:15].tolist() == first[:15].tolist()
