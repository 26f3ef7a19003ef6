"""Confidence intervals of perplexities. The unit that is resampled is the document, not the token.

The logarithm of a perplexity is the sum of all losses divided by the number of all tokens, and the lengths of
documents have a long tail. The standard error of this logarithm is computed by the jackknife over documents.
The interval uses Student's t distribution. Its degrees of freedom are an effective number of documents,
computed from the squares of their lengths (Satterthwaite), so that a few long documents count as few.
Percentiles of a bootstrap are too narrow here; docs/how-to/evaluate-and-audit.md has the simulated coverage
of both.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_DOCUMENT_BLOCKS = 8
"""Least number of documents for an interval over documents. With fewer documents, the interval is computed
over blocks (parts of documents)."""

_MAX_DOCUMENT_SHARE = 0.75  # if one document has a larger share of the tokens, blocks are used
_BLOCKS = 16  # number of blocks that a whole text is divided into
_MIN_BLOCK_TOKENS = 250
_ERROR_PROBABILITY = 0.05
_ANGLES = np.linspace(0, math.pi / 2, 4001)


class Interval(NamedTuple):
    """A perplexity, or the ratio of two perplexities, with the bounds of its 95 % confidence interval."""

    ppl: float
    """The perplexity, or the ratio."""
    low: float
    """Lower bound of the interval."""
    high: float
    """Upper bound of the interval; may be infinite."""


def compute_interval(losses: NDArray[np.float64], lengths: NDArray[np.int64]) -> Interval:
    """Compute a perplexity, or a ratio of perplexities, and its 95 % confidence interval.

    Args:
        losses: negative log-likelihood of each document in nats, shape (n,), n >= 1. To get a ratio of two
            perplexities, pass the difference of each document's two losses.
        lengths: tokens of each document, >= 1, shape (n,).

    Returns:
        exp(sum of losses / sum of lengths). The bounds are 0 and infinity if n is 1 or a loss is not finite.
    """
    total = lengths.sum()
    mean = losses.sum() / total
    share = lengths / total
    if len(lengths) == 1 or not math.isfinite(mean):
        return Interval(_exp_or_inf(mean), 0.0, math.inf)
    decreases = (losses - mean * lengths) / total / (1 - share)  # of the mean, if one document is left out
    error = math.sqrt((len(lengths) - 1) / len(lengths) * float(np.square(decreases).sum()))
    squares = np.square(share)
    freedom = float(squares.sum() ** 2 / np.square(squares).sum())
    radius = error * _student_quantile(freedom)
    return Interval(_exp_or_inf(mean), _exp_or_inf(mean - radius), _exp_or_inf(mean + radius))


def assign_blocks(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Assign each token to a block: a document, or a part of one. Confidence intervals are over blocks.

    Each document is one block if there are at least `MIN_DOCUMENT_BLOCKS` documents and none has more than
    three quarters of the tokens. The interval then holds for other documents of the same kind. Otherwise
    documents longer than a 16th of the text are cut into blocks of at least 250 tokens, and the interval
    holds only for further text of the same documents.

    Args:
        documents: number of each token's document, shape (n,); the tokens of a document are in their order.

    Returns:
        Number of each token's block, counted from 0, shape (n,). The blocks of a document are consecutive.
    """
    _, numbers, lengths = np.unique(documents, return_inverse=True, return_counts=True)
    if len(lengths) >= MIN_DOCUMENT_BLOCKS and lengths.max() <= _MAX_DOCUMENT_SHARE * len(documents):
        return numbers.astype(np.int64)
    size = max(_MIN_BLOCK_TOKENS, -(-len(documents) // _BLOCKS))
    counts = np.maximum(1, lengths // size)  # blocks of each document
    positions = np.empty(len(numbers), np.int64)  # of each token in its document
    positions[np.argsort(numbers, kind="stable")] = np.arange(len(numbers)) - np.repeat(
        np.cumsum(lengths) - lengths, lengths
    )
    first = np.cumsum(counts) - counts
    blocks: NDArray[np.int64] = first[numbers] + positions * counts[numbers] // lengths[numbers]
    return blocks


def _student_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    With t = √ν tan θ the density of θ is proportional to cos^(ν-1) θ, which is integrated numerically.

    Args:
        freedom: degrees of freedom ν; values below 1 count as 1, values above 10,000 as 10,000.
    """
    freedom = min(max(freedom, 1.0), 1e4)  # above this it is the normal distribution
    density = np.cos(_ANGLES) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp((1 - _ERROR_PROBABILITY) * cumulative[-1], cumulative, _ANGLES)
    return math.sqrt(freedom) * math.tan(angle)


def _exp_or_inf(value: float) -> float:
    """Return exp(value), or infinity if `value` is 700 or more, because a float would overflow."""
    return math.exp(value) if value < 700 else math.inf
