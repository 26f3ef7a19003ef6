"""Intervals of perplexities: what they cover, and what counts as a document."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnstore.lm.scoring.confidence_intervals import Interval, assign_blocks, compute_interval


def drawn(rng: np.random.Generator, count: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Losses and lengths of documents; lengths are log-normal, the longest often a third of all tokens."""
    lengths = np.maximum(20, np.exp(rng.normal(6, 1, count))).astype(np.int64)
    level = {
        "a perplexity": np.exp(rng.normal(1.3, 0.15, count)),
        "longer is easier": 1.3 - 0.1 * (np.log(lengths) - 6) + rng.normal(0, 0.15, count),
        "a ratio, with outliers": 0.25 * rng.standard_t(3, count) - 0.8,
    }[kind]
    return lengths * level + 2.5 * rng.normal(size=count) * np.sqrt(lengths), lengths


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 12, 40])
@pytest.mark.parametrize("kind", ["a perplexity", "longer is easier", "a ratio, with outliers"])
def test_intervals_cover_what_they_say(kind, count):
    losses, lengths = drawn(np.random.default_rng(0), 1_000_000, kind)
    truth, rng = math.exp(losses.sum() / lengths.sum()), np.random.default_rng(1)
    found = [compute_interval(*drawn(rng, count, kind)) for _ in range(2000)]
    covered = np.mean([one.low <= truth <= one.high for one in found])
    assert covered >= 0.93


def test_documents_of_one_length_give_the_interval_of_a_mean():
    # For means the jackknife is the standard error, and 12 documents have about 12 degrees of freedom.
    means = np.random.default_rng(0).normal(4, 0.3, 12)
    found, middle = compute_interval(means * 500, np.full(12, 500)), means.mean()
    reach = 2.1788 * means.std(ddof=1) / math.sqrt(12)  # t of 12, from a table
    assert found == pytest.approx(np.exp([middle, middle - reach, middle + reach]), rel=1e-4)


def test_one_document_says_nothing_of_others():
    assert compute_interval(np.array([3000.0]), np.array([1000])) == Interval(math.exp(3), 0.0, math.inf)
    # One of nearly all tokens hardly more: a single degree of freedom.
    found = compute_interval(np.array([300_000.0, 30.0, 10.0]), np.array([100_000, 5, 5]))
    alike = compute_interval(np.array([300_000.0, 30.0, 10.0]), np.array([5, 5, 5]))
    assert found.low < found.ppl < found.high
    assert compute_interval(np.array([1.0, 1.0, 2e6]), np.array([1, 1, 1])).high == math.inf
    assert alike.ppl == math.inf


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(0, 9))
def test_what_counts_as_a_document(lengths, seed):
    documents = np.repeat(np.arange(len(lengths)), lengths)
    turns = np.random.default_rng(seed).permutation(documents)  # several in turn, the tokens of each in order
    blocks = assign_blocks(turns)
    whole = len(lengths) >= 8 and max(lengths) <= 0.75 * sum(lengths)
    for document, length in enumerate(lengths):
        inside = blocks[turns == document]
        assert (np.diff(inside) >= 0).all()
        sizes = np.unique(inside, return_counts=True)[1]
        assert np.ptp(sizes) <= 1
        assert len(sizes) == (1 if whole else max(1, length // max(250, -(-sum(lengths) // 16))))
    assert np.array_equal(np.unique(blocks), np.arange(blocks.max() + 1))
