"""Fitting the weight of a substitute on text that was scored once, alone and beside the store."""

from collections.abc import Callable
from dataclasses import replace

import torch

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.scored_text import ScoredSubstitute, ScoredText
from knnstore.lm.mixing import LEAST_PROBABILITY, FixedLambda, fit_weight
from knnstore.lm.settings import KNNSettings, find_trained_substitute
from knnstore.lm.substitute import load_head
from knnstore.store import Reader, Selection

_ROUNDS = 2  # of fitting the store's part and the substitute's in turn


def score_substitute(
    scored: ScoredText, store: Reader, selection: Selection, device: torch.device
) -> ScoredText:
    """Let the substitute trained for a selection predict a text that was scored, if there is one in use."""
    trained = find_trained_substitute(store, selection)
    if trained is None or trained.is_outdated(store) or scored.reading is None:
        return scored
    head = load_head(store, trained, device)
    log_probs = head.gold_log_probs(scored.reading.keys, scored.reading.targets)
    return replace(scored, substitute=ScoredSubstitute(trained, log_probs))


def fit_alone(evidence: GridEvidence, scored: ScoredText, predicted: ScoredSubstitute) -> KNNSettings:
    """Fit the weight of a substitute beside the model, without a store."""
    at = evidence.tokens
    lam = fit_weight(scored.lm_log_probs[at], predicted.log_probs[at])
    return KNNSettings(1, 1.0, FixedLambda(0.0), substitute=replace(predicted.substitute, lam=lam))


def fit_beside(
    evidence: GridEvidence,
    scored: ScoredText,
    predicted: ScoredSubstitute,
    fit: Callable[[GridEvidence], KNNSettings],
) -> KNNSettings:
    """Fit the weight of a substitute and, in turn by `fit`, the settings of the store on top of it."""
    at = evidence.tokens
    only = replace(scored, lm_log_probs=predicted.log_probs)
    difference = predicted.log_probs[at].exp()[:, None] - evidence.lm
    lam = fit_weight(scored.lm_log_probs[at], predicted.log_probs[at])
    settings = KNNSettings()
    for _ in range(_ROUNDS):
        settings = fit(replace(evidence, lm=(evidence.lm + lam * difference).clamp(min=LEAST_PROBABILITY)))
        lam = fit_weight(scored.log_probs(settings, at).log_probs, only.log_probs(settings, at).log_probs)
    return replace(settings, substitute=replace(predicted.substitute, lam=lam))
