"""One λ between two distributions: the likeliest one, and never below the least."""

import math

import pytest
import torch
from knnstore_research.one_weight import fit_one_weight, mix_log_probs


def test_it_is_the_weight_with_the_highest_likelihood() -> None:
    random = torch.Generator().manual_seed(0)
    without, only = (torch.rand(400, generator=random).log() for _ in range(2))
    lam = fit_one_weight(without, only)
    assert 0.1 < lam < 0.9
    total = mix_log_probs(without, only, lam).double().sum()
    for near in (lam - 0.01, lam + 0.01):
        assert mix_log_probs(without, only, near).double().sum() < total


def test_the_least_weight_is_a_millionth_and_can_be_mixed_with() -> None:
    without, never = torch.full((20,), 0.5).log(), torch.full((20,), -torch.inf)
    lam = fit_one_weight(without, never)
    assert lam == 1e-6, "0 has no logarithm, and more would cost likelihood"
    mixed = mix_log_probs(without, never, lam)
    assert mixed.isfinite().all()
    assert float(mixed.mean()) == pytest.approx(math.log(0.5) + math.log1p(-1e-6), abs=1e-6)


def test_the_weight_of_what_is_always_right_is_below_one() -> None:
    lam = fit_one_weight(torch.full((20,), 0.01).log(), torch.zeros(20))
    assert 0.99 < lam < 1
