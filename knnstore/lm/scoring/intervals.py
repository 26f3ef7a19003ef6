"""How far a perplexity is known: intervals over documents, which are drawn together and not token by token.

A perplexity is a ratio, of all losses and all tokens, and the lengths of documents have long tails. The
standard error is that of the jackknife over documents, of the logarithm; Student's t stands for the normal
distribution, with as many degrees of freedom as there are documents by the squares of their lengths
(Satterthwaite), so that few long documents count as few. Percentiles of a bootstrap are too narrow here;
what each way covers was simulated: docs/how-to/evaluate-and-audit.md.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FEWEST = 8
"""With fewer documents it is blocks of them that count."""

_ONE = 0.75  # of all tokens in one document, and it is its blocks that count
_BLOCKS = 16  # of the whole text
_LEAST_BLOCK = 250  # tokens
_OUTSIDE = 0.05
_ANGLES = np.linspace(0, math.pi / 2, 4001)


class Interval(NamedTuple):
    """A perplexity, or what one is divided by another, with the bounds of an interval of 95 %."""

    ppl: float
    low: float
    high: float


def interval_of(losses: NDArray[np.float64], lengths: NDArray[np.int64]) -> Interval:
    """Give a perplexity with its interval.

    Args:
        losses: negative log-likelihood of each document, in nats; of the difference between two ways to
            predict them for the interval of a ratio. Shape (n,), n >= 1.
        lengths: tokens of each document, >= 1, shape (n,).

    Returns:
        exp(all losses / all tokens); from 0 to infinity where there is a single document, or a token of
        probability 0.
    """
    total = lengths.sum()
    mean = losses.sum() / total
    share = lengths / total
    if len(lengths) == 1 or not math.isfinite(mean):
        return Interval(_exp(mean), 0.0, math.inf)
    left_out = (losses - mean * lengths) / total / (1 - share)  # by how much the mean falls without each
    error = math.sqrt((len(lengths) - 1) / len(lengths) * float(np.square(left_out).sum()))
    squares = np.square(share)
    freedom = float(squares.sum() ** 2 / np.square(squares).sum())
    reach = error * _student(freedom)
    return Interval(_exp(mean), _exp(mean - reach), _exp(mean + reach))


def blocks_of(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide text into what counts as a document, of which there are enough even in one long file.

    Documents stay whole where there are `FEWEST` of them and none has three quarters of the tokens; an
    interval is then about other documents of their kind. Else those are cut that are longer than a 16th of
    the text, into blocks of 250 tokens at least, and an interval is about more of the same documents.

    Args:
        documents: number of each token's document, shape (n,); the tokens of one in their order.

    Returns:
        Number of each token's block, counted from 0, shape (n,); blocks of a document follow each other.
    """
    _, numbers, lengths = np.unique(documents, return_inverse=True, return_counts=True)
    if len(lengths) >= FEWEST and lengths.max() <= _ONE * len(documents):
        return numbers.astype(np.int64)
    size = max(_LEAST_BLOCK, -(-len(documents) // _BLOCKS))
    pieces = np.maximum(1, lengths // size)
    places = np.empty(len(numbers), np.int64)  # of each token in its document
    places[np.argsort(numbers, kind="stable")] = np.arange(len(numbers)) - np.repeat(
        np.cumsum(lengths) - lengths, lengths
    )
    first = np.cumsum(pieces) - pieces
    blocks: NDArray[np.int64] = first[numbers] + places * pieces[numbers] // lengths[numbers]
    return blocks


def _student(freedom: float) -> float:
    """What Student's t is below with 97.5 %, for at least one degree of freedom.

    With t = √ν tan θ its density is that of cos^(ν-1) θ.
    """
    freedom = min(max(freedom, 1.0), 1e4)  # beyond is the normal distribution
    density = np.cos(_ANGLES) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp((1 - _OUTSIDE) * below[-1], below, _ANGLES)
    return math.sqrt(freedom) * math.tan(angle)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
