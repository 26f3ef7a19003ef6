"""How many searches can be saved, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.calibration.fits import fit_skipping, known_before
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.calibration.trying import Candidate
from knnstore.lm.mixing import FixedLambda, Skipping

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Shares of searches saved that are reported."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Some searches left out."""

    share: float
    """Of the searches that were left out by networks fitted on the other half of the documents."""
    ppl: float
    """Held out: with those networks, of what is expected with all searches."""
    ratio: float
    """That perplexity divided by the one with all searches."""
    random: float
    """The same ratio for searches left out at random."""
    skip: Skipping
    """Fitted on all documents."""
    skipped: float
    """Share of the searches that it leaves out there."""


def judge_savings(
    scored: ScoredText,
    candidate: Candidate,
    expected: float,
    first_half: Tensor,
    shares: Sequence[float] = SHARES,
) -> tuple[Saving, ...]:
    """Find where searches can be left out, and judge it on documents that it was not found on.

    Args:
        scored: held-out text.
        candidate: whose searches.
        expected: the perplexity that is expected with all of them.
        first_half: which tokens are of the first half, bool, shape (n,).
        shares: of the searches, each at least 0 and below 1.
    """
    gains = candidate.log_probs - unsearched(scored, candidate, first_half)
    every = torch.arange(len(scored))
    skipped = torch.zeros((len(shares), len(scored)), dtype=torch.bool)
    for half in (first_half, ~first_half):
        skip = fit_skipping(scored, gains, every[half])
        thresholds = _thresholds(skip, scored, every[half], shares)
        skipped[:, ~half] = skip.expected(*known_before(scored, every[~half])) < thresholds[:, None]
    final = fit_skipping(scored, gains, every)
    estimates = final.expected(*known_before(scored, every))
    found = []
    for row, threshold in zip(skipped, _thresholds(final, scored, every, shares).tolist(), strict=True):
        share, lost = float(row.float().mean()), float(gains[row].double().sum()) / len(scored)
        found.append(
            Saving(
                share=share,
                ppl=expected * math.exp(lost),
                ratio=math.exp(lost),
                random=math.exp(share * float(gains.double().mean())),
                skip=replace(final, threshold=threshold),
                skipped=float((estimates < threshold).float().mean()),
            )
        )
    return tuple(found)


def unsearched(scored: ScoredText, candidate: Candidate, first_half: Tensor) -> Tensor:
    """Log p of every token without a search, by what was fitted on the other half; float32, shape (n,).

    It is the model's, or its mixture with all that needs none: a substitute, n-grams, a continuous cache.
    """
    log_probs = torch.empty(len(scored))
    for settings, judged in zip(candidate.by_half, (~first_half, first_half), strict=True):
        tokens = judged.nonzero()[:, 0]
        others = replace(settings, k=1, probes=None, mixer=FixedLambda(0.0))
        log_probs[tokens] = scored.log_probs(others, tokens).log_probs
    return log_probs


def _thresholds(skip: Skipping, scored: ScoredText, tokens: Tensor, shares: Sequence[float]) -> Tensor:
    """The estimates below which each share of some tokens is; shape (len(shares),)."""
    ascending = skip.expected(*known_before(scored, tokens)).sort().values
    return ascending[[min(round(share * len(tokens)), len(tokens) - 1) for share in shares]]
