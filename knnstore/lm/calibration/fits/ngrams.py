"""Fitting λ of n-grams and the settings of the keys together."""

from collections.abc import Callable
from dataclasses import replace

import torch

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.components import NGramFitting, NGramSettings
from knnstore.lm.settings import KNNSettings

_ROUNDS = 2  # of fitting the keys and the n-grams in turn


def fit_with_ngrams(
    evidence: GridEvidence,
    scored: ScoredText,
    ngrams: NGramFitting,
    fit: Callable[[GridEvidence], KNNSettings],
) -> KNNSettings:
    """Fit the settings of the keys and the weight λ of n-grams alternately; return settings with both.

    The keys and the n-grams are each fitted twice.

    Args:
        evidence: probabilities of the tokens to fit on.
        scored: the text.
        ngrams: the object that fits n-grams, with the n-grams' predictions of all tokens of the text.
        fit: function that fits the settings of the keys.
    """
    at = evidence.tokens
    of_tokens = NGramFitting(ngrams.found.rows(at))
    every = torch.ones(len(at), dtype=torch.bool)
    settings, fitted = KNNSettings(), NGramSettings(ngrams.found.order, 0.0)
    for _ in range(_ROUNDS):
        # λ of the keys mixes p_LM and p_kNN, after n-grams were mixed into both with the same λ.
        lam = of_tokens.lambdas(fitted)[:, None]
        part = lam * of_tokens.found.probs.nan_to_num()[:, None]
        settings = fit(
            replace(evidence, lm=(1 - lam) * evidence.lm + part, knn=(1 - lam) * evidence.knn + part)
        )
        fitted = of_tokens.fit(scored.log_probs(settings, at).log_probs, every)
    return replace(settings, ngrams=fitted)
