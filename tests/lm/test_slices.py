"""Slices of an evaluation: they divide the tokens, and add up to the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.lm.scoring.loss_breakdown import TokenLosses

COUNTS = np.array([0, 1, 9, 10, 99, 100, 5000, 2])


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([1, 3, 1000]), st.floats(0, 1))
def test_slices_divide_the_tokens_and_add_up(seed, tokens, distinct, missing):
    rng = np.random.default_rng(seed)
    gold, lm, mixed = rng.integers(0, 8, tokens), -rng.exponential(3, tokens), -rng.exponential(2, tokens)
    helped = mixed > lm
    nearest = np.where(rng.random(tokens) < missing, np.inf, rng.integers(0, distinct, tokens))
    losses = TokenLosses()
    for part in np.array_split(np.arange(tokens), 3):
        columns = (gold[part], lm[part].astype("f"), mixed[part].astype("f"), helped[part], nearest[part])
        losses.add_batch(*map(torch.from_numpy, columns))
    for slices, values in (
        (losses.slice_by_frequency(COUNTS), COUNTS[gold]),
        (losses.slice_by_distance(4), nearest),
    ):
        assert sum(part.tokens for part in slices) == tokens
        bounds = [bound for part in slices for bound in (part.low, part.high)]
        assert bounds == sorted(bounds)
        for part in slices:
            within = (values >= part.low) & (values <= part.high)
            assert part.tokens == within.sum() > 0
            assert part.base_ppl == pytest.approx(math.exp(-lm[within].mean()), rel=1e-5)
            assert part.knn_ppl == pytest.approx(math.exp(-mixed[within].mean()), rel=1e-5)
            assert part.helped == pytest.approx(helped[within].mean())
    assert {part.low for part in losses.slice_by_frequency(COUNTS)} <= {0, 1, 10, 100, 1000}


def test_tenths_are_of_one_size():
    losses, nearest = TokenLosses(), torch.randperm(1000, generator=torch.Generator().manual_seed(0)).float()
    zeros = torch.zeros(1000)
    losses.add_batch(zeros.long(), zeros, zeros, zeros.bool(), nearest)
    found = losses.slice_by_distance()
    assert [part.tokens for part in found] == [100] * 10
    assert [(part.low, part.high) for part in found[:2]] == [(0, 99), (100, 199)]
