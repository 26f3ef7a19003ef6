"""How many searches can be saved, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnstore.lm.calibration.fits import fit_skipping, known_before
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import Skipping

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Shares of searches saved that are reported."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Some searches left out."""

    share: float
    """Of the searches that were left out on the other half of the documents."""
    ppl: float
    """Held out: where to search is chosen by a network fitted on the other half of the documents."""
    ratio: float
    """That perplexity divided by the one with all searches."""
    random: float
    """The same ratio for searches left out at random."""
    skip: Skipping
    """Leaves out this share; fitted on all documents."""


def judge_savings(
    scored: ScoredText,
    log_probs: Tensor,
    unsearched: Tensor,
    first_half: Tensor,
    shares: Sequence[float] = SHARES,
) -> tuple[Saving, ...]:
    """Find where searches can be left out, and judge it on documents that it was not found on.

    Args:
        scored: held-out text.
        log_probs: log p of every token with all searches, by settings fitted on the other half, shape (n,).
        unsearched: log p of every token where no search is made: the model's, or with a continuous cache
            its mixture with that; shape (n,).
        first_half: which tokens are of the first half, bool, shape (n,).
        shares: of the searches, each at least 0 and below 1.
    """
    gains = log_probs - unsearched
    every = torch.arange(len(scored))
    skipped = torch.zeros((len(shares), len(scored)), dtype=torch.bool)
    for half in (first_half, ~first_half):
        skip = fit_skipping(scored, gains, every[half])
        thresholds = _thresholds(skip, scored, every[half], shares)
        skipped[:, ~half] = skip.expected(*known_before(scored, every[~half])) < thresholds[:, None]
    final = fit_skipping(scored, gains, every)
    found = []
    for row, threshold in zip(skipped, _thresholds(final, scored, every, shares).tolist(), strict=True):
        share, lost = float(row.float().mean()), float(gains[row].double().sum()) / len(scored)
        found.append(
            Saving(
                share=share,
                ppl=math.exp(lost - float(log_probs.double().mean())),
                ratio=math.exp(lost),
                random=math.exp(share * float(gains.double().mean())),
                skip=replace(final, threshold=threshold),
            )
        )
    return tuple(found)


def _thresholds(skip: Skipping, scored: ScoredText, tokens: Tensor, shares: Sequence[float]) -> Tensor:
    """The estimates below which each share of some tokens is; shape (len(shares),)."""
    ascending = skip.expected(*known_before(scored, tokens)).sort().values
    return ascending[[min(round(share * len(tokens)), len(tokens) - 1) for share in shares]]
