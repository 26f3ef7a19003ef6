"""Fitting several components together, and one gate over all of them, on text that was scored once."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits.gate import assign_document_blocks
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.components import Fitting, NGramFitting, NGramSettings, ScoredPart, fit_gate_over
from knnstore.lm.mixing import JointGate
from knnstore.lm.mixture import list_components
from knnstore.lm.settings import KNNSettings

_ROUNDS = 2  # of fitting the keys and the n-grams in turn


def fit_all_components(
    evidence: GridEvidence,
    scored: ScoredText,
    ngrams: NGramFitting | None,
    others: Mapping[str, Fitting],
    fit: Callable[[GridEvidence], KNNSettings],
) -> KNNSettings:
    """Fit the keys, then the other components one after another, and last a gate. Return the fitted settings.

    Each component is fitted as an addition to the mixture of the components before it. The gate is a network
    that then chooses new weights of all components for each token.

    Args:
        evidence: probabilities of the tokens to fit on.
        scored: the text.
        ngrams: the object that fits n-grams, alternating with the keys; None leaves n-grams out.
        others: the objects that fit the components after keys and n-grams, by name and in the order of the
            mixture.
        fit: function that fits the settings of the keys.
    """
    at = evidence.tokens
    settings = fit(evidence) if ngrams is None else fit_with_ngrams(evidence, scored, ngrams, fit)
    log_probs, wanted = torch.zeros(len(scored)), torch.zeros(len(scored), dtype=torch.bool)
    wanted[at] = True
    for name, component in others.items():
        log_probs[at] = scored.log_probs(settings, at).log_probs
        settings = settings.with_part(name, component.fit(log_probs, wanted))
    return replace(settings, gate=fit_joint(scored, settings, at))


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
    of_tokens = NGramFitting(ngrams.found.select_rows(at))
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


def fit_joint(scored: ScoredText, settings: KNNSettings, tokens: Tensor) -> JointGate:
    """Train a gate, a network that weighs all components in use, on a scored text.

    Args:
        scored: the text.
        settings: settings of the components.
        tokens: indices of the tokens to fit on, int64, shape (m,).
    """
    nearest = scored.distances[tokens, 0].abs()
    unit = float(nearest.median().clamp(min=1e-6)) if nearest.isfinite().any() else 1.0
    parts = (
        ScoredPart(
            scored.select_evidence(settings, chunk), scored.target_tokens(chunk), scored.lm_log_probs[chunk]
        )
        for chunk in scored.split_for_settings(settings, tokens)
    )
    blocks = assign_document_blocks(scored, tokens)
    return fit_gate_over(list_components(), settings.parts, parts, blocks, unit, scored.fitted_for or {})
