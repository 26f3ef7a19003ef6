"""Fitting the weight of a substitute on text that was scored once, alone and beside the store."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from knnstore.lm.fitting import Evidence, fit_lambdas
from knnstore.lm.mixing import FixedLambda
from knnstore.lm.scored_text import ScoredText
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Substitute

_ROUNDS = 2  # of fitting the store's part and the substitute's in turn
_LEAST = 1e-30  # probabilities are kept above, so that quotients stay finite in float32
_LEAST_LAMBDA = 1e-6


def fit_weight(without: Tensor, only: Tensor) -> float:
    """Find the likeliest weight of one of two distributions.

    Args:
        without: log-probability of each token with weight 0, float32, shape (n,).
        only: with weight 1, shape (n,); -inf where it is impossible.

    Returns:
        Above 0 and below 1.
    """
    one = torch.zeros(len(without), dtype=torch.int64)
    lam, _ = fit_lambdas(without.exp().clamp(min=_LEAST)[:, None], only.exp()[:, None], one, 1)
    return max(float(lam), _LEAST_LAMBDA)


def fit_alone(evidence: Evidence, scored: ScoredText, substitute: Substitute) -> KNNSettings:
    """Fit the weight of a substitute beside the model, without a store.

    Args:
        evidence: of the tokens to fit on.
        scored: the text, with its `ScoredText.substitute`.
        substitute: the one with which it was scored.
    """
    assert scored.substitute is not None
    lam = fit_weight(scored.lm_log_probs[evidence.tokens], scored.substitute[evidence.tokens])
    return KNNSettings(evidence.k, 1.0, FixedLambda(0.0), substitute=replace(substitute, lam=lam))


def fit_beside(
    evidence: Evidence, scored: ScoredText, substitute: Substitute, fit: Callable[[Evidence], KNNSettings]
) -> KNNSettings:
    """Fit the weight of a substitute and, in turn, the settings of the store on top of it.

    Args:
        evidence: of the tokens to fit on.
        scored: the text, with its `ScoredText.substitute`.
        substitute: the one with which it was scored.
        fit: fits the settings of the store.
    """
    assert scored.substitute is not None
    only = replace(scored, lm_log_probs=scored.substitute)
    difference = scored.substitute[evidence.tokens].exp()[:, None] - evidence.lm
    settings = fit_alone(evidence, scored, substitute)
    for _ in range(_ROUNDS):
        assert settings.substitute is not None
        lam = settings.substitute.lam
        settings = fit(replace(evidence, lm=(evidence.lm + lam * difference).clamp(min=_LEAST)))
        lam = fit_weight(
            scored.log_probs(settings, evidence.tokens).log_probs,
            only.log_probs(settings, evidence.tokens).log_probs,
        )
        settings = replace(settings, substitute=replace(substitute, lam=lam))
    return settings
