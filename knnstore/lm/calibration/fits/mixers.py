"""Fitting T and λ, the same for all tokens or in bins, on text that was scored once.

For a given T the log-likelihood of p = λ p_kNN + (1 - λ) p_LM is concave in λ, so λ is found by bisection
of the derivative, for many T and many bins of tokens at once. T is found on a grid of half
octaves, between whose points the vertex of a parabola is taken: in log T the loss is smooth and flat
around its minimum.
"""

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.mixing import (
    PRIOR_TOKENS,
    BinnedLambda,
    FixedLambda,
    find_bins,
    fit_lambdas,
)
from knnstore.lm.settings import KNNSettings


def fit_fixed(evidence: GridEvidence) -> KNNSettings:
    """Fit one T and one λ; 0 where no neighbor was found."""
    if not len(evidence.temperatures):
        return KNNSettings(k=1, lam=0.0)
    temperature, lam = best_fixed(evidence)
    return evidence.settings(temperature, FixedLambda(lam))


def best_fixed(evidence: GridEvidence) -> tuple[float, float]:
    """Return the T and λ, equal for all tokens, that are likeliest."""
    lam, loss = _fit_all_tokens(evidence)
    point = _find_minimum(loss)
    return interpolate_columns(evidence.temperatures.log(), point).exp().item(), interpolate_columns(
        lam, point
    ).item()


def fit_bins(
    evidence: GridEvidence, distance_bins: int, confidence_bins: int = 1, *, temperatures: bool = False
) -> KNNSettings:
    """Fit λ, and T if wanted, in bins that hold equal numbers of tokens.

    Every bin is drawn towards the best λ and T of all tokens by `PRIOR_TOKENS`; a bin without tokens has
    exactly these.

    Args:
        evidence: evidence of the tokens to fit on.
        distance_bins: number of bins of the distance to the nearest neighbor.
        confidence_bins: number of bins of the model's confidence in each of these.
        temperatures: True to fit T in each bin too.
    """
    distance_edges = _compute_edges(evidence.nearest.distances[:, 0], distance_bins)
    confidence_edges = _compute_edges(evidence.nearest.lm_max, confidence_bins)
    bins = find_bins(evidence.nearest, distance_edges, confidence_edges)
    count = (len(distance_edges) + 1) * (len(confidence_edges) + 1)
    overall, overall_loss = _fit_all_tokens(evidence)
    lam, loss = fit_lambdas(evidence.lm, evidence.knn, bins, count, overall, PRIOR_TOKENS)
    scale = evidence.temperatures.log()
    if temperatures:
        together = interpolate_columns(scale, _find_minimum(overall_loss))
        points = _find_minimum(loss + PRIOR_TOKENS * overall_loss / len(bins))
        factors = tuple((interpolate_columns(scale.expand_as(loss), points) - together).exp().tolist())
    else:
        points = _find_minimum(loss.sum(0, keepdim=True)).expand(count)
        together, factors = interpolate_columns(scale, points[:1]), ()
    mixer = BinnedLambda(
        distance_edges, tuple(interpolate_columns(lam, points).tolist()), factors, confidence_edges
    )
    return evidence.settings(together.exp().item(), mixer)


def _fit_all_tokens(evidence: GridEvidence) -> tuple[Tensor, Tensor]:
    return fit_lambdas(evidence.lm, evidence.knn, torch.zeros(len(evidence.lm), dtype=torch.long), 1)


def _compute_edges(values: Tensor, bins: int) -> tuple[float, ...]:
    """Return the quantiles that cut values into bins of equal size; fewer bins if values are equal."""
    quantiles = np.quantile(values.numpy(), np.arange(1, bins) / bins)
    return tuple(np.unique(quantiles.astype(np.float32)).tolist())


def _find_minimum(loss: Tensor) -> Tensor:
    """Return the fractional column of each row's minimum: the vertex of a parabola through three columns."""
    last = loss.shape[1] - 1
    lowest = loss.argmin(1)
    middle = lowest.clamp(min(1, last), max(last - 1, 0))[:, None]
    before, at, after = (loss.gather(1, (middle + step).clamp(0, last))[:, 0] for step in (-1, 0, 1))
    bend = before - 2 * at + after
    offset = torch.where(bend > 0, (before - after) / (2 * bend), 0.0).clamp(-0.5, 0.5)
    return torch.where(lowest == middle[:, 0], lowest + offset, lowest.float())


def interpolate_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Interpolate each row at a fractional column: values of shape (g, m), or (m,) for all rows."""
    rows = values.expand(len(columns), -1)
    last = rows.shape[1] - 1
    columns = columns.clamp(0, last)
    below = columns.detach().floor().long().clamp(max=max(last - 1, 0))
    low, high = (rows.gather(1, at.clamp(max=last)[:, None])[:, 0] for at in (below, below + 1))
    return low.lerp(high, columns - below)
