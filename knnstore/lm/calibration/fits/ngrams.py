"""Fitting the weight of n-grams on top of what predicts already, on text that was scored once."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import Evidence
from knnstore.lm.calibration.scored_text import ScoredNGrams, ScoredText
from knnstore.lm.mixing import LEAST_PROBABILITY, fit_lambdas, mix_gold
from knnstore.lm.settings import KNNSettings, NGramSettings

_ROUNDS = 2  # of fitting the weight of n-grams and what is below them in turn


def fit_ngrams(said: ScoredNGrams, log_probs: Tensor, wanted: Tensor) -> NGramSettings:
    """Find the likeliest λ of n-grams that are mixed with what predicts already.

    `log_probs` is log p of each token without them, float32, shape (n,); `wanted` says which to fit on.
    """
    rows = wanted & said.probs.isfinite()
    if not rows.any():
        return NGramSettings(said.order, 0.0)
    below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
    lam, _ = fit_lambdas(below, said.probs[rows][:, None], torch.zeros(len(below), dtype=torch.long), 1)
    return NGramSettings(said.order, float(lam))


def mix_ngrams(said: ScoredNGrams, log_probs: Tensor, ngrams: NGramSettings) -> Tensor:
    """Mix them into log p of each token, shape (n,)."""
    known = said.probs.isfinite()
    return mix_gold(log_probs, said.probs.where(known, 0.0), ngrams.lam * known)


def fit_with_ngrams(
    evidence: Evidence, scored: ScoredText, said: ScoredNGrams, fit: Callable[[Evidence], KNNSettings]
) -> KNNSettings:
    """Fit the weight of n-grams and, in turn by `fit`, the settings of the store below them."""
    probs = said.probs[evidence.tokens]
    of_tokens, every = ScoredNGrams(said.order, probs), torch.ones(len(probs), dtype=torch.bool)
    settings, ngrams = KNNSettings(), NGramSettings(said.order, 0.0)
    for _ in range(_ROUNDS):
        # With n-grams on top the store's λ is between two mixtures that have as much of them.
        lam = (ngrams.lam * probs.isfinite())[:, None]
        part = lam * probs.nan_to_num()[:, None]
        settings = fit(
            replace(evidence, lm=(1 - lam) * evidence.lm + part, knn=(1 - lam) * evidence.knn + part)
        )
        ngrams = fit_ngrams(of_tokens, scored.log_probs(settings, evidence.tokens).log_probs, every)
    return replace(settings, ngrams=ngrams)
