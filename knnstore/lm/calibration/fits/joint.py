"""Fitting one gate over all components, on text that was scored once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits.gate import blocks_among
from knnstore.lm.calibration.fits.ngrams import fit_with_ngrams
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.components import Fitting, NGramFitting, experts_of, factors_in_use
from knnstore.lm.mixing import LEAST_PROBABILITY, JointGate, fit_network, known, shares_of
from knnstore.lm.settings import KNNSettings

_LEAST_SHARE = 1e-3
_ROUNDS = 50  # of expectation maximization, for where the network begins


def fit_together(
    evidence: GridEvidence,
    scored: ScoredText,
    ngrams: NGramFitting | None,
    others: Sequence[Fitting],
    fit: Callable[[GridEvidence], KNNSettings],
) -> KNNSettings:
    """Fit the keys by `fit`, every other component over those before it, and then one gate over all.

    Args:
        evidence: of the tokens to fit on.
        scored: the text.
        ngrams: which are fitted in turn with the keys; None is without them.
        others: the components on top, in order.
        fit: fits the keys.
    """
    at = evidence.tokens
    settings = fit(evidence) if ngrams is None else fit_with_ngrams(evidence, scored, ngrams, fit)
    log_probs, wanted = torch.zeros(len(scored)), torch.zeros(len(scored), dtype=torch.bool)
    wanted[at] = True
    for component in others:
        log_probs[at] = scored.log_probs(settings, at).log_probs
        settings = component.put(settings, component.fit(log_probs, wanted))
    return replace(settings, gate=fit_joint(scored, settings, at))


def fit_joint(scored: ScoredText, settings: KNNSettings, tokens: Tensor) -> JointGate:
    """Fit a gate over the components of settings; it begins with the best weights for all tokens alike.

    Args:
        scored: the text.
        settings: what is in use, each component with a temperature of its own.
        tokens: indices of those to fit on, int64, shape (n,).
    """
    nearest = scored.distances[tokens, 0].abs()
    unit = float(nearest.median().clamp(min=1e-6)) if nearest.isfinite().any() else 1.0
    factors = factors_in_use(settings)
    features, found, probs, query = [], [], [], slice(0)
    for chunk in scored.chunks_for(settings, tokens):
        targets = scored.targets_for(chunk)
        experts = experts_of(settings, scored.evidence_for(settings, chunk), factors, unit)
        features.append(experts.features)
        found.append(experts.found)
        query = experts.query
        every = [one.probs(targets) for of in experts.contributions.values() for one in of]
        probs.append(torch.stack([scored.lm_log_probs[chunk].exp(), *every], 1))
    seen, present, given = (
        torch.cat(features),
        torch.cat(found),
        torch.cat(probs).clamp_(min=LEAST_PROBABILITY),
    )
    seen = known(seen, seen.nanmean(0).nan_to_num())

    def loss(outputs: Tensor, rows: Tensor) -> Tensor:
        return -(shares_of(outputs, present[rows]) * given[rows]).sum(1).log().mean()

    start = _best_shares(given, present).clamp(min=_LEAST_SHARE).log().tolist()
    network = fit_network(seen, loss, blocks_among(scored, tokens), start, query)
    purpose = {**(scored.fitted_for or {}), "of": "all components", "unit": unit}
    return JointGate(
        network.weights({**purpose, "experts": [[name, list(of)] for name, of in factors.items()]})
    )


def _best_shares(probs: Tensor, present: Tensor) -> Tensor:
    """The likeliest shares of the model and of each expert, the same for all tokens; shape (1 + e,)."""
    shares = torch.full((probs.shape[1],), 1 / probs.shape[1])
    allowed = torch.cat([present.new_ones((len(present), 1)), present], 1)
    for _ in range(_ROUNDS):
        parts = probs * allowed * shares
        shares = (parts / parts.sum(1, keepdim=True)).mean(0)
    return shares
