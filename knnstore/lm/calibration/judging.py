"""Judging what was fitted: the folds of two-fold cross-fitting, and the bootstrap over documents.

Tokens of one document are not independent, so it is documents that are divided and drawn.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.calibration.scored_text import ScoredText

MIN_DOCUMENTS = 8
MIN_TOKENS = 1_000
RESAMPLES = 1_000
"""Of the documents, for an interval of 95 %."""


class Interval(NamedTuple):
    """A perplexity, with the bounds between which it is in 95 % of the resamples."""

    ppl: float
    low: float
    high: float


def check_enough(documents: int, tokens: int) -> None:
    """Refuse to fit on too little, with an `InputError`."""
    if documents < MIN_DOCUMENTS or tokens < MIN_TOKENS:
        raise InputError(
            f"{documents:,} documents of {tokens:,} tokens are too little to fit on: at least "
            f"{MIN_DOCUMENTS} documents and {MIN_TOKENS:,} tokens are needed, and 50,000 tokens are better"
        )


class Judge:
    """Gives perplexities with intervals, all over the same resamples of a text's documents."""

    def __init__(self, scored: ScoredText) -> None:
        _, self._documents = torch.unique(scored.documents, return_inverse=True)
        self._lengths = torch.bincount(self._documents).numpy()
        count = len(self._lengths)
        # How often each document is drawn, shape (resamples, documents).
        self._draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
        self._base = self._losses(scored.lm_log_probs)
        self.base = _interval(*self._base)

    def __call__(self, log_probs: Tensor) -> tuple[Interval, Interval]:
        """Return the perplexity, and its ratio to that of the model alone."""
        whole, resampled = self._losses(log_probs)
        return _interval(whole, resampled), _interval(whole - self._base[0], resampled - self._base[1])

    def _losses(self, log_probs: Tensor) -> tuple[float, NDArray[np.float64]]:
        losses = -torch.zeros(len(self._lengths), dtype=torch.float64).index_add_(
            0, self._documents, log_probs.double()
        ).numpy()  # fmt: skip
        return losses.sum() / self._lengths.sum(), self._draws @ losses / (self._draws @ self._lengths)


def _interval(loss: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(math.exp(loss), math.exp(low), math.exp(high))


def in_halves(documents: Tensor) -> Tensor:
    """Which tokens are of the first half: whole documents, the longest dealt out first; bool, shape (n,)."""
    lengths = torch.bincount(documents)
    first = torch.zeros(len(lengths), dtype=torch.bool)
    taken = [0, 0]
    for document in lengths.argsort(descending=True, stable=True).tolist():
        lighter = int(taken[1] < taken[0])
        taken[lighter] += int(lengths[document])
        first[document] = lighter == 0
    return first[documents]
