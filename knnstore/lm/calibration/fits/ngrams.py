"""Fitting the weight of n-grams on top of what predicts already, on text that was scored once."""

import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import ScoredNGrams
from knnstore.lm.mixing import LEAST_PROBABILITY, fit_lambdas, mix_gold
from knnstore.lm.settings import NGramSettings


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
