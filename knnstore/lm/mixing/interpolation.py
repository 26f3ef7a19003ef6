"""The arithmetic of kNN-LM: neighbors become a distribution, which is mixed with the model's.

    p(y) = λ p_kNN(y) + (1 - λ) p_LM(y)        p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

(Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172). Whatever else is mixed in has the same form: a
distribution over few tokens, with a weight λ over all that lies below it. Everything is float32, in
logarithms, and touches only those tokens. A missing neighbor (distance +inf) weighs nothing; where a
distribution is empty its λ counts as 0.

Shapes: n queries, k neighbors, v tokens in the vocabulary. Distances are float32 and smaller is
nearer; they may be negative (inner products).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PerQuery = float | Tensor
"""One value for all queries, or a tensor of shape (n,)."""

_VALUES, _VALUES_CPU = 1 << 24, 1 << 20
"""Probabilities in memory at once; on a CPU what stays in its cache."""

_LOWEST = -1e30
"""Stands for log 0, so that p = 0 adds nothing to an entropy."""

LEAST_PROBABILITY = 1e-30
"""Fitting keeps probabilities above, so that their logarithms and ratios stay finite in float32."""

LEAST_TEMPERATURE = 1e-12
"""Below it a distance in units of the temperature may have no number."""


def entropy_of(log_probs: Tensor) -> Tensor:
    """Compute the entropy of distributions in nats, shape (n,), from log p of shape (n, v)."""
    return -(log_probs.exp() * log_probs.clamp(min=_LOWEST)).sum(-1)


def neighbor_weights(distances: Tensor, temperature: PerQuery) -> Tensor:
    """Turn distances into the probability that p_kNN gives to each neighbor.

    Args:
        distances: float32, shape (n, k), +inf where a neighbor is missing, k >= 1; or (n, 1, k) for several
            temperatures of each query.
        temperature: T > 0; larger is flatter. Several are of shape (t,).

    Returns:
        float32, shape (n, k) or (n, t, k). Rows sum to 1, or to 0 when no neighbor was found.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.to(distances).reshape(-1, 1)
    # The nearest is taken as zero before dividing, so that no row under- or overflows.
    scores = (distances.amin(-1, keepdim=True) - distances) / temperature
    return scores.softmax(-1).nan_to_num(nan=0.0)  # where all are missing it is inf - inf


class Contribution(NamedTuple):
    """A distribution over few tokens for each of n positions, and how much it counts."""

    weights: Tensor
    """Of k places, float32, shape (n, k); rows sum to 1 with their rest, or to 0 where it is empty."""

    lam: Tensor
    """λ, its weight over all below it, float32, shape (n,), between 0 and 1."""

    tokens: Tensor | None = None
    """At the places, int64, shape (n, k); anything where the weight is zero."""

    hits: Tensor | None = None
    """Whether each place has the token that came, bool, shape (n, k), where `tokens` are not known. Where
    neither is, there is a place for each token, v of them or v for each search."""

    rest: Tensor | None = None
    """How much of each row is spread over the whole vocabulary, float32, shape (n,); None is nothing."""

    base: Tensor | None = None
    """In which way, for all rows alike: float32, shape (v,); sums to 1."""

    name: str = ""
    """Of the component, for reports."""

    temperature: PerQuery | None = None
    """T that its weights were made with, for reports; None where there is none."""

    @property
    def is_found(self) -> Tensor:
        """Where it is not empty, bool, shape (n,)."""
        total = self.weights.sum(1)
        return (total if self.rest is None else total + self.rest) > 0

    def probs(self, gold: Tensor) -> Tensor:
        """The probability of one token at each position, float32, shape (n,)."""
        hits = self.hits
        if hits is None:
            assert self.tokens is not None
            hits = self.tokens == gold[:, None]
        probs = (self.weights * hits).sum(1)
        if self.rest is not None and self.base is not None:
            probs = probs + self.rest * self.base[gold]
        return probs.clamp_(max=1.0)


class Likelihoods(NamedTuple):
    """What a mixture says at n positions of one token, and of the likeliest ones."""

    gold: Tensor
    """log p of the token, float32, shape (n,)."""

    best: Tensor
    """log p of the likeliest ones, likeliest first, float32, shape (n, m)."""

    tokens: Tensor
    """Which these are, int64, shape (n, m)."""

    @classmethod
    def of(cls, log_probs: Tensor, gold: Tensor, count: int) -> "Likelihoods":
        """Of a distribution, log p of shape (n, v)."""
        best, tokens = log_probs.topk(count)
        return cls(log_probs.gather(1, gold[:, None])[:, 0], best, tokens)


class Mixture:
    """Components, each over all before it, and the lowest over a model.

    Args:
        components: at least one.
        temperature: T in force for the neighbors from the store, for reports.
    """

    def __init__(self, components: Sequence[Contribution], temperature: PerQuery = 1.0) -> None:
        self.components = components
        self.temperature = temperature
        lams = [component.lam.where(component.is_found, 0.0) for component in components]
        shares, left = lams[-1:], 1 - lams[-1]
        for lam in reversed(lams[:-1]):
            shares.insert(0, lam * left)
            left = left * (1 - lam)
        self.shares = shares
        """What each component has of the mixture, float32, shapes (n,)."""
        # Rounding may make a sum larger than 1, and of what is less than nothing there is no logarithm.
        self.lam = shares[0] if len(shares) == 1 else torch.stack(shares).sum(0).clamp_(max=1.0)
        """What all have together, float32, shape (n,); the rest is the model's."""

    @property
    def weights(self) -> Tensor:
        """What each place has of all components together, float32, shape (n, all places)."""
        return torch.cat([self.weights_in(number) for number in range(len(self.components))], 1)

    def weights_in(self, number: int) -> Tensor:
        """What each place of one component has of all together, float32, shape (n, its places)."""
        weights = self.components[number].weights
        return weights if len(self.components) == 1 else self.share_in(number)[:, None] * weights

    def share_in(self, number: int) -> Tensor:
        """What one component has of all together, 0 where these have nothing; shape (n,)."""
        if len(self.components) == 1:
            return torch.ones_like(self.lam)
        return self.shares[number] / self.lam.where(self.lam > 0, 1.0)

    def knn_probs(self, gold: Tensor) -> Tensor:
        """Give one token's probability for each position in all components together, float32, shape (n,)."""
        if len(self.components) == 1:  # also where its λ is 0
            return self.components[0].probs(gold)
        parts = [self.share_in(number) * one.probs(gold) for number, one in enumerate(self.components)]
        return torch.stack(parts).sum(0)

    def gold(self, lm_log_probs: Tensor, gold: Tensor) -> Tensor:
        """Mix the probability of one token for each position.

        Args:
            lm_log_probs: log p_LM of the token, float32, shape (n,).
            gold: the token, int64, shape (n,).

        Returns:
            log p of the token, float32, shape (n,); λ = 0 returns `lm_log_probs` exactly.
        """
        mixed_in = sum(
            share * one.probs(gold) for share, one in zip(self.shares, self.components, strict=True)
        )
        return _over(lm_log_probs, torch.as_tensor(mixed_in), self.lam)

    def distribution(self, lm_log_probs: Tensor) -> Tensor:
        """Mix the distributions over the whole vocabulary.

        Args:
            lm_log_probs: log p_LM, float32, shape (n, v).

        Returns:
            log p, float32, shape (n, v); a row with λ = 0 is that of `lm_log_probs` exactly, and every
            row sums to 1 in probability.
        """
        left, mixed_in = 1 - self.lam[:, None], self._mixed_in(lm_log_probs)
        mixed = torch.addcmul(mixed_in, left, lm_log_probs.exp()).log()
        # What nothing is mixed into stays exact, and above zero however improbable it is.
        return mixed.where(mixed_in > 0, lm_log_probs + left.log())

    def likelihoods(self, lm_log_probs: Tensor, gold: Tensor, count: int) -> Likelihoods:
        """Mix the probability of one token, and those of the likeliest ones.

        Args:
            lm_log_probs: log p_LM, float32, shape (n, v).
            gold: the token, int64, shape (n,).
            count: of the likeliest ones, m.

        Returns:
            What `distribution` says of them, without the logarithms of all others.
        """
        values = _VALUES_CPU if lm_log_probs.device.type == "cpu" else _VALUES
        step, parts = max(1, values // lm_log_probs.shape[1]), []
        for start in range(0, max(1, len(gold)), step):
            at = slice(start, start + step)
            below, lam, asked = lm_log_probs[at], self.lam[at, None], gold[at, None]
            mixed_in = self._mixed_in(below, at)
            if count:
                probs = below.exp().mul_(1 - lam).add_(mixed_in)
                likeliest = probs.argmax(1, keepdim=True) if count == 1 else probs.topk(count).indices
                asked = torch.cat([asked, likeliest], 1)
            log_probs = _over(below.gather(1, asked), mixed_in.gather(1, asked), lam)
            parts.append(Likelihoods(log_probs[:, 0], log_probs[:, 1:], asked[:, 1:]))
        return Likelihoods(*map(torch.cat, zip(*parts, strict=True)))

    def _mixed_in(self, like: Tensor, at: slice = slice(None)) -> Tensor:
        """What each token has of all components at some positions, of the shape (n, v) of a tensor."""
        mixed_in = torch.zeros_like(like)
        for share, one in zip(self.shares, self.components, strict=True):
            own, weights = share[at, None], one.weights[at]
            if one.tokens is not None:
                mixed_in.scatter_add_(1, one.tokens[at].clamp(0, like.shape[1] - 1), own * weights)
            else:
                for of_search in torch.split(weights, like.shape[1], 1):
                    mixed_in.addcmul_(own, of_search)
            if one.rest is not None:
                assert one.base is not None
                mixed_in.addcmul_((share[at] * one.rest[at])[:, None], one.base[None])
        return mixed_in


def mix_gold(lm_log_probs: Tensor, probs: Tensor, lam: Tensor) -> Tensor:
    """Mix the probability that a component gives to one token with what lies below.

    Args:
        lm_log_probs: log-probability of the token below, float32, shape (n,).
        probs: its probability in the component, float32, shape (n,).
        lam: λ, float32, shape (n,); 0 where the component is empty.

    Returns:
        Log-probability, float32, shape (n,); λ = 0 returns `lm_log_probs` exactly.
    """
    return _over(lm_log_probs, lam * probs, lam)


def mix_log_probs(below: Tensor, above: Tensor, lam: float) -> Tensor:
    """Mix two distributions over the whole vocabulary, or what each gives to one token.

    Args:
        below: log-probabilities, float32, any shape.
        above: those with the weight λ, of the same shape; -inf where a probability is 0.
        lam: λ, above 0 and at most 1.

    Returns:
        Log-probabilities, float32, the same shape.
    """
    rest = math.log1p(-lam) if lam < 1 else -math.inf
    return torch.logaddexp(below + rest, above + math.log(lam))


def mix_probs(below: Tensor, *parts: tuple[PerQuery, Tensor]) -> Tensor:
    """Mix probabilities of one token: the (λ, probability) of each part, side by side over what lies below.

    Returns:
        At least `LEAST_PROBABILITY`, of the shape of `below`.
    """
    mixed = below
    for lam, probs in parts:
        mixed = mixed + lam * (probs - below)
    return mixed.clamp(min=LEAST_PROBABILITY)


def _over(lm_log_probs: Tensor, mixed_in: Tensor, lam: Tensor) -> Tensor:
    """log((1 - λ) p_LM + what is mixed in, which has the weight λ already)."""
    return torch.logaddexp(lm_log_probs + torch.log1p(-lam), mixed_in.log())
