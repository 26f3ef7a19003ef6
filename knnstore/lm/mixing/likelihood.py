"""The λ that makes a text likeliest; of a mixture of two the log-likelihood is concave in it."""

import torch
from torch import Tensor

from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY
from knnstore.lm.mixing.mixer import MAX_LAMBDA

PRIOR_TOKENS = 32.0
"""The weight, in tokens, with which all tokens together count in the fit of each bin."""

_BISECTIONS = 24


def fit_lambdas(
    lm: Tensor, knn: Tensor, bins: Tensor, count: int, prior: Tensor | float = 0.0, strength: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Find the likeliest λ, up to `MAX_LAMBDA`, of each bin of tokens for each column of p_kNN.

    Args:
        lm: p_LM, float32, shape (n, 1), above 0.
        knn: p_kNN, float32, shape (n, m).
        bins: of each token, int64, shape (n,), below `count`.
        count: of bins, g.
        prior: λ towards which every bin is drawn, shape (m,).
        strength: how strongly, in tokens; a bin without tokens then has the prior itself.

    Returns:
        λ and the negative log-likelihood with it, without the prior: float32, shape (g, m).
    """
    difference = knn - lm
    low, high = torch.zeros(count, knn.shape[1]), torch.full((count, knn.shape[1]), MAX_LAMBDA)
    for _ in range(_BISECTIONS):
        lam = (low + high) / 2
        slope = _sums(difference / (lm + lam[bins] * difference).clamp_(min=LEAST_PROBABILITY), bins, count)
        slope += strength * (prior / lam - (1 - prior) / (1 - lam))
        low, high = lam.where(slope > 0, low), lam.where(slope <= 0, high)
    lam = torch.where(low == 0, 0.0, (low + high) / 2)
    loss = -_sums((lm + lam[bins] * difference).clamp_(min=LEAST_PROBABILITY).log(), bins, count)
    return lam, loss


def _sums(values: Tensor, bins: Tensor, count: int) -> Tensor:
    if count == 1:
        return values.sum(0, keepdim=True)
    return torch.zeros(count, values.shape[1]).index_add_(0, bins, values)


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
    lam, _ = fit_lambdas(without.exp().clamp(min=LEAST_PROBABILITY)[:, None], only.exp()[:, None], one, 1)
    return max(float(lam), _LEAST_LAMBDA)
