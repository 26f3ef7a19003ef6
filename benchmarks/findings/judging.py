"""Perplexities with intervals, and fits, of text that was scored once."""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm import Interval, KNNSettings
from knnstore.lm.calibration.evidence import gather_evidence, list_evidence_by_probes
from knnstore.lm.calibration.fits.mixers import fit_fixed
from knnstore.lm.calibration.judging import Judge
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.components import RecentFitting
from knnstore.lm.mixing import fit_lambdas

LAMBDAS = torch.arange(0, 100) / 100
_LEAST = 1e-30
RESAMPLES = 1_000
"""Of the documents, for an interval of 95 %."""


def ppl(log_probs: Tensor) -> float:
    """Perplexity of tokens, each with its log-probability."""
    return math.exp(-float(log_probs.double().mean()))


def interval(scored: ScoredText, log_probs: Tensor) -> Interval:
    """Perplexity with an interval of 95 % over documents.

    Args:
        scored: what the tokens are of.
        log_probs: of each of them.
    """
    return Judge(scored)(log_probs)[0]


def ratio(scored: ScoredText, log_probs: Tensor, reference: Tensor) -> Interval:
    """Return a perplexity divided by another, with an interval over documents.

    Args:
        scored: what the tokens are of.
        log_probs: of each of them.
        reference: log-probabilities of the same tokens, of what is compared with.
    """
    return Judge(replace(scored, lm_log_probs=reference))(log_probs)[1]


def mean(
    scored: ScoredText, values: Tensor, of: Tensor | None = None, *, than: Tensor | None = None
) -> Interval:
    """Mean over tokens, with an interval of 95 %, of the bootstrap over documents.

    Args:
        scored: what the tokens are of.
        values: of each of them.
        of: which of them count, bool; default all.
        than: which of them to compare with, bool: their mean is subtracted, over the same resamples.
    """
    every = torch.ones(len(scored), dtype=torch.bool)
    means = _means(scored, values, every if of is None else of)
    if than is not None:
        means = means - _means(scored, values, than)
    low, high = np.nanquantile(means[1:], [0.025, 0.975])
    return Interval(float(means[0]), float(low), float(high))


def _means(scored: ScoredText, values: Tensor, of: Tensor) -> NDArray[np.float64]:
    """Means over some tokens: of all documents, then of each resample of documents."""
    _, documents = torch.unique(scored.documents, return_inverse=True)
    counts = torch.bincount(documents[of], minlength=int(documents.max()) + 1).numpy()
    sums = torch.bincount(documents[of], values[of].double(), minlength=len(counts)).numpy()
    draws = np.concatenate([np.ones((1, len(counts)), np.int64), _draws(len(counts))])
    with np.errstate(invalid="ignore"):  # a resample may have no such token, and is left out
        means: NDArray[np.float64] = (draws @ sums) / (draws @ counts)
    return means


def _draws(documents: int) -> NDArray[np.int64]:
    """How often each document is drawn, shape (resamples, documents)."""
    return np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), RESAMPLES)


def knn_probs(scored: ScoredText, k: int, temperature: float) -> Tensor:
    """p_kNN of each token, shape (n,)."""
    parts = []
    for chunk in scored.split_into_chunks(k):
        found = scored.sums.keep_nearest(k).select_rows(chunk)
        parts.append((found.weights(temperature) * found.hits).sum(1).clamp_(max=1.0))
    return torch.cat(parts)


def best_lambda(scored: ScoredText, k: int, temperature: float) -> float:
    """Return the likeliest λ at a temperature."""
    lm = scored.lm_log_probs.exp().clamp(min=_LEAST)[:, None]
    bins = torch.zeros(len(scored), dtype=torch.long)
    return fit_lambdas(lm, knn_probs(scored, k, temperature)[:, None], bins, 1)[0].item()


def best_fixed(scored: ScoredText, k: int | None = None) -> KNNSettings:
    """Return the likeliest T and λ at one k; default that of the pass."""
    return fit_fixed(gather_evidence(scored, [k or scored.k])[0])


def best_cells(scored: ScoredText) -> KNNSettings:
    """Return the likeliest T and λ of a sum over the cells that were visited."""
    return fit_fixed(list_evidence_by_probes(scored)[0])


def lambda_interval(scored: ScoredText, k: int, temperature: float) -> Interval:
    """Return the likeliest λ on a grid of hundredths, with an interval over resampled documents."""
    lm, knn = scored.lm_log_probs.exp().clamp(min=_LEAST), knn_probs(scored, k, temperature)
    _, documents = torch.unique(scored.documents, return_inverse=True)
    losses = torch.zeros(int(documents.max()) + 1, len(LAMBDAS), dtype=torch.float64)
    for column, lam in enumerate(LAMBDAS.tolist()):
        log_probs = (lm + lam * (knn - lm)).clamp(min=_LEAST).log().double()
        losses[:, column].index_add_(0, documents, -log_probs)
    found = losses.numpy()
    grid = LAMBDAS.numpy()
    low, high = np.quantile(grid[(_draws(len(found)) @ found).argmin(1)], [0.025, 0.975])
    return Interval(float(grid[found.sum(0).argmin()]), float(low), float(high))


def with_cache(scored: ScoredText, settings: KNNSettings) -> KNNSettings:
    """Return settings with the continuous cache that is likeliest beside what they mix already."""
    evidence = RecentFitting.from_keys(scored.reading)
    every_token = torch.ones(len(scored), dtype=torch.bool)
    return replace(settings, cache=evidence.fit(scored.log_probs(settings).log_probs, every_token))
