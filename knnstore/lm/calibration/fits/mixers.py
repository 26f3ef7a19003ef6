"""Fitting T and λ, the same for all tokens or in bins, on text that was scored once.

At a fixed T the log-likelihood of p = λ p_kNN + (1 - λ) p_LM is concave in λ. So λ is found by bisection of
the derivative, for many T and many bins of tokens at once. T is found on a grid of half octaves. Between the
points of the grid the minimum is the vertex of a parabola, because the loss is smooth and flat in log T.
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
    """Fit one temperature T and one weight λ for all tokens, and return settings with both.

    If no token has a neighbor, the settings have λ = 0 and k = 1.

    Args:
        evidence: probabilities of the tokens to fit on.
    """
    if not len(evidence.temperatures):
        return KNNSettings(k=1, lam=0.0)
    temperature, lam = fit_temperature_and_lambda(evidence)
    return evidence.build_settings(temperature, FixedLambda(lam))


def fit_temperature_and_lambda(evidence: GridEvidence) -> tuple[float, float]:
    """Return one temperature T and one weight λ for all tokens: the pair with the largest likelihood.

    Args:
        evidence: probabilities of the tokens to fit on, at one temperature or more.
    """
    lam, loss = _fit_all_tokens(evidence)
    point = _find_minimum(loss)
    return interpolate_columns(evidence.temperatures.log(), point).exp().item(), interpolate_columns(
        lam, point
    ).item()


def fit_bins(
    evidence: GridEvidence, distance_bins: int, confidence_bins: int = 1, *, temperatures: bool = False
) -> KNNSettings:
    """Fit one weight λ (and one temperature T, if asked for) for each bin of tokens; return settings.

    The bins divide the tokens by the distance to the nearest neighbor and by the model's confidence. All bins
    have about equal numbers of tokens.

    A prior of `PRIOR_TOKENS` tokens draws λ and T of each bin towards the best λ and T for all tokens. A bin
    without tokens has exactly the best λ and T for all tokens.

    Args:
        evidence: probabilities of the tokens to fit on.
        distance_bins: number of bins of the distance to the nearest neighbor.
        confidence_bins: number of bins of the model's confidence within each bin of distances.
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
    return evidence.build_settings(together.exp().item(), mixer)


def _fit_all_tokens(evidence: GridEvidence) -> tuple[Tensor, Tensor]:
    """Fit one weight λ for all tokens at each of m temperatures; return λ and its loss, each of shape (1, m).

    The loss is the negative log-likelihood of the tokens.

    Args:
        evidence: probabilities of the tokens to fit on.
    """
    return fit_lambdas(evidence.lm, evidence.knn, torch.zeros(len(evidence.lm), dtype=torch.long), 1)


def _compute_edges(values: Tensor, bins: int) -> tuple[float, ...]:
    """Return the edges that divide values into bins with about equal numbers of values, ascending.

    The edges are quantiles. There are fewer than ``bins - 1`` edges if quantiles are equal, because equal
    quantiles are returned once.

    Args:
        values: the values, shape (n,).
        bins: number of bins.
    """
    quantiles = np.quantile(values.numpy(), np.arange(1, bins) / bins)
    return tuple(np.unique(quantiles.astype(np.float32)).tolist())


def _find_minimum(loss: Tensor) -> Tensor:
    """Find the column of the minimum in each row.

    The minimum is the vertex of the parabola through the lowest column and its two neighbors.

    Args:
        loss: values at m columns, shape (g, m).

    Returns:
        Column number of each row's minimum, float, shape (g,). The minimum may lie between two columns.
    """
    last = loss.shape[1] - 1
    lowest = loss.argmin(1)
    middle = lowest.clamp(min(1, last), max(last - 1, 0))[:, None]
    before, at, after = (loss.gather(1, (middle + step).clamp(0, last))[:, 0] for step in (-1, 0, 1))
    bend = before - 2 * at + after
    offset = torch.where(bend > 0, (before - after) / (2 * bend), 0.0).clamp(-0.5, 0.5)
    return torch.where(lowest == middle[:, 0], lowest + offset, lowest.float())


def interpolate_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Interpolate each row linearly between its columns; return one value for each row, shape (g,).

    Args:
        values: shape (g, m), or (m,) for the same values in all rows.
        columns: fractional column index for each row, shape (g,); limited to the range from 0 to m - 1.
    """
    rows = values.expand(len(columns), -1)
    last = rows.shape[1] - 1
    columns = columns.clamp(0, last)
    below = columns.detach().floor().long().clamp(max=max(last - 1, 0))
    low, high = (rows.gather(1, at.clamp(max=last)[:, None])[:, 0] for at in (below, below + 1))
    return low.lerp(high, columns - below)
