"""The arithmetic of kNN-LM: neighbours become a distribution, which is mixed with the model's.

    p(y) = λ p_kNN(y) + (1 - λ) p_LM(y)        p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

(Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172). Everything is float32, in logarithms,
and touches only the k retrieved tokens of a query. A missing neighbour (distance +inf) weighs
nothing; a query without any neighbour keeps the model's distribution, whatever λ is.

Shapes: n queries, k neighbours, v tokens in the vocabulary. Distances are float32 and smaller is
nearer; they may be negative (inner products).
"""

import torch
from torch import Tensor

PerQuery = float | Tensor
"""One value for all queries, or a tensor of shape (n,)."""

LEAST_PROBABILITY = 1e-30
"""Fitting keeps probabilities above, so that their logarithms and quotients stay finite in float32."""


def neighbor_weights(distances: Tensor, temperature: PerQuery, log_weights: Tensor | None = None) -> Tensor:
    """Turn distances into the probability that p_kNN gives to each neighbour.

    A neighbour of weight w counts as w of them at its distance, whatever T is: exp(-d / T + log w).

    Args:
        distances: float32, shape (n, k), +inf where a neighbour is missing, k >= 1.
        temperature: T > 0; larger is flatter.
        log_weights: log w, float32, shape (n, k), finite; None is w = 1.

    Returns:
        float32, shape (n, k). Rows sum to 1, or to 0 when no neighbour was found.
    """
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=distances.device)
    # The nearest is taken as zero before dividing, so that no row under- or overflows.
    nearest = distances.amin(1, keepdim=True)
    found = nearest.isfinite()
    scores = (torch.where(found, nearest, 0.0) - distances) / temperatures.reshape(-1, 1)
    if log_weights is not None:
        scores = scores + log_weights
    return torch.where(found, scores, 0.0).softmax(1) * found


def gold_knn_probs(weights: Tensor, tokens: Tensor, gold: Tensor) -> Tensor:
    """Sum the weights of the neighbours that carry the gold token.

    Args:
        weights: from `neighbor_weights`, shape (n, k).
        tokens: integers, shape (n, k); anything where a neighbour is missing.
        gold: integers, shape (n,).

    Returns:
        p_kNN(gold), float32, shape (n,), between 0 and 1.
    """
    return (weights * (tokens == gold[:, None])).sum(1).clamp_(max=1.0)


def mix_gold(lm_log_probs: Tensor, knn_probs: Tensor, found: Tensor, lam: PerQuery) -> Tensor:
    """Mix the two models' probabilities of one token for each query.

    Args:
        lm_log_probs: log p_LM of the token, float32, shape (n,).
        knn_probs: p_kNN of the token, float32, shape (n,).
        found: bool, shape (n,): whether the query has any neighbour; where not, λ counts as 0.
        lam: λ, between 0 and 1.

    Returns:
        log p of the token, float32, shape (n,); λ = 0 returns `lm_log_probs` exactly.
    """
    lambdas = _lambdas(lam, found)
    return torch.logaddexp(lm_log_probs + torch.log1p(-lambdas), (lambdas * knn_probs).log())


def mix(lm_log_probs: Tensor, weights: Tensor, tokens: Tensor, lam: PerQuery) -> Tensor:
    """Mix the two models' distributions over the whole vocabulary.

    Args:
        lm_log_probs: log p_LM, float32, shape (n, v).
        weights: from `neighbor_weights`, shape (n, k).
        tokens: int64, shape (n, k); anything where the weight is zero.
        lam: λ, between 0 and 1.

    Returns:
        log p, float32, shape (n, v); a row with λ = 0 or without a neighbour is that of
        `lm_log_probs` exactly, and every row sums to 1 in probability.
    """
    lambdas = _lambdas(lam, weights.sum(1) > 0)[:, None]
    tokens = tokens.where(weights > 0, 0)
    # A token retrieved several times collects all its weight first. After that its mixture is the
    # same from each of its neighbours, so the order in which duplicates are written is no matter.
    knn_probs = torch.zeros_like(lm_log_probs).scatter_add_(1, tokens, weights).gather(1, tokens)
    lm_share = torch.log1p(-lambdas)
    mixed_tokens = torch.logaddexp(lm_log_probs.gather(1, tokens) + lm_share, (lambdas * knn_probs).log())
    return (lm_log_probs + lm_share).scatter_(1, tokens, mixed_tokens)


def _lambdas(lam: PerQuery, found: Tensor) -> Tensor:
    """Spread λ over the queries, shape (n,); zero where nothing was found."""
    lambdas = torch.as_tensor(lam, dtype=torch.float32, device=found.device).expand(found.shape)
    return torch.where(found, lambdas, 0.0)
