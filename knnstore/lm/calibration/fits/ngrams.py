"""Fitting the weight of n-grams on top of what predicts already, on text that was scored once."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits.mixers import PRIOR_TOKENS
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.components import TargetContinuation, ngram_lambdas
from knnstore.lm.mixing import LEAST_PROBABILITY, fit_lambdas, mix_gold
from knnstore.lm.settings import KNNSettings, NGramSettings

_ROUNDS = 2  # of fitting the weight of n-grams and what is below them in turn


def fit_ngrams(said: TargetContinuation, log_probs: Tensor, wanted: Tensor) -> NGramSettings:
    """Find the likeliest λ of n-grams, by their length, that are mixed with what predicts already.

    Each is drawn towards the best for all lengths by `PRIOR_TOKENS`. `log_probs` is log p of each token
    without them, float32, shape (n,); `wanted` says which to fit on.
    """
    rows = wanted & said.probs.isfinite()
    if not rows.any():
        return NGramSettings(said.order, 0.0)
    below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
    probs, lengths = said.probs[rows][:, None], said.lengths[rows]
    overall, _ = fit_lambdas(below, probs, torch.zeros_like(lengths), 1)
    lam, _ = fit_lambdas(below, probs, lengths, said.order, overall[0], PRIOR_TOKENS)
    return NGramSettings(said.order, float(lam[lengths].mean()), tuple(lam[:, 0].tolist()))


def mix_ngrams(said: TargetContinuation, log_probs: Tensor, ngrams: NGramSettings) -> Tensor:
    """Mix them into log p of each token, shape (n,)."""
    return mix_gold(log_probs, said.probs.nan_to_num(), _lambdas(said, ngrams))


def fit_with_ngrams(
    evidence: GridEvidence,
    scored: ScoredText,
    said: TargetContinuation,
    fit: Callable[[GridEvidence], KNNSettings],
) -> KNNSettings:
    """Fit the weight of n-grams and, in turn by `fit`, the settings of the store below them."""
    at = evidence.tokens
    of_tokens = said.rows(at)
    every = torch.ones(len(at), dtype=torch.bool)
    settings, ngrams = KNNSettings(), NGramSettings(said.order, 0.0)
    for _ in range(_ROUNDS):
        # With n-grams on top the store's λ is between two mixtures that have as much of them.
        lam = _lambdas(of_tokens, ngrams)[:, None]
        part = lam * of_tokens.probs.nan_to_num()[:, None]
        settings = fit(
            replace(evidence, lm=(1 - lam) * evidence.lm + part, knn=(1 - lam) * evidence.knn + part)
        )
        ngrams = fit_ngrams(of_tokens, scored.log_probs(settings, at).log_probs, every)
    return replace(settings, ngrams=ngrams)


def _lambdas(said: TargetContinuation, ngrams: NGramSettings) -> Tensor:
    """λ of each token, 0 where there are no n-grams."""
    return ngram_lambdas(ngrams, said.lengths) * said.probs.isfinite()
