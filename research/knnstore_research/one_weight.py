"""One λ between two distributions: fitting it on scored text, and mixing with it."""

import math

import torch
from torch import Tensor

from knnstore.lm.mixing import LEAST_PROBABILITY, fit_lambdas

_LEAST_LAMBDA = 1e-6
"""Smallest λ that a fit returns, so that its logarithm is finite."""


def fit_one_weight(without: Tensor, only: Tensor) -> float:
    """Find the weight λ of the mixture (1 - λ) p_without + λ p_only that gives a text the largest likelihood.

    Args:
        without: log p_without of each token, float32, shape (n,).
        only: log p_only of each token, float32, shape (n,); -inf for a token with the probability 0.

    Returns:
        λ, at least `_LEAST_LAMBDA` and below 1.
    """
    bins = torch.zeros(len(without), dtype=torch.int64)
    lam, _ = fit_lambdas(without.exp().clamp(min=LEAST_PROBABILITY)[:, None], only.exp()[:, None], bins, 1)
    return max(float(lam), _LEAST_LAMBDA)


def mix_log_probs(below: Tensor, above: Tensor, lam: float) -> Tensor:
    """Return log((1 - λ) exp(below) + λ exp(above)): the mixture of two distributions.

    Args:
        below: log-probabilities with the weight 1 - λ, float32, any shape.
        above: log-probabilities with the weight λ, of the same shape; -inf where a probability is 0.
        lam: λ, above 0 and at most 1.

    Returns:
        Log-probabilities, float32, the same shape.
    """
    rest = math.log1p(-lam) if lam < 1 else -math.inf
    return torch.logaddexp(below + rest, above + math.log(lam))
