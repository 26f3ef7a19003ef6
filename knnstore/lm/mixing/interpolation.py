"""The arithmetic of kNN-LM: a distribution from neighbors, its mixture with the model's, and the best λ.

    p(y) = λ p_kNN(y) + (1 - λ) p_LM(y)        p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

(Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172). Every component has the same form: a distribution
over few tokens and a weight λ. Components are mixed one after another: each has λ, and the mixture before it
1 - λ. All values are float32. A missing neighbor (distance +inf) has the weight 0. Where the distribution of
a component is empty, its λ counts as 0.

Shapes: n queries, k neighbors, v tokens in the vocabulary. Distances are float32 and smaller is
nearer; they may be negative (inner products).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PerQuery = float | Tensor
"""One value for all queries, or a tensor of shape (n,)."""

_VALUES, _VALUES_CPU = 1 << 24, 1 << 20
"""Number of probabilities computed at once, on a GPU and on a CPU, where they stay in the cache."""

_LOWEST = -1e30
"""Replaces log 0, so that a token with p = 0 adds nothing to an entropy."""

LEAST_PROBABILITY = 1e-30
"""Least probability in fits; logarithms and ratios stay finite in float32."""

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that a token that was not retrieved remains possible."""

PRIOR_TOKENS = 32.0
"""The weight, in tokens, with which all tokens together count in the fit of each bin."""

_BISECTIONS = 24

LEAST_TEMPERATURE = 1e-12
"""Least temperature; with a smaller one, distance / T may overflow."""


def entropy(log_probs: Tensor) -> Tensor:
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
    # Subtract the nearest distance first, so that no row under- or overflows.
    scores = (distances.amin(-1, keepdim=True) - distances) / temperature
    return scores.softmax(-1).nan_to_num(nan=0.0)  # a row without neighbors is inf - inf


class Contribution(NamedTuple):
    """The distribution of one component at n positions, and its λ.

    The distribution is sparse: it has k places, and a place has a token and a weight. The places of one row
    may have the same token.
    """

    weights: Tensor
    """Probability of each place, float32, shape (n, k). A row and its `rest` sum to 1; an empty row has 0."""

    lam: Tensor
    """λ, the weight of this component; the mixture of the model and all earlier components has 1 - λ.
    Float32, shape (n,), between 0 and 1."""

    tokens: Tensor | None = None
    """Token of each place, int64, shape (n, k); arbitrary where the weight is 0. None if `hits` is set, or if
    the places are the whole vocabulary, k = v, or k = v for each search."""

    hits: Tensor | None = None
    """In place of `tokens`: True where a place has the target token; bool, shape (n, k)."""

    rest: Tensor | None = None
    """Probability that each row spreads over the vocabulary as `base` says, float32, shape (n,); None for
    no probability."""

    base: Tensor | None = None
    """Distribution over the vocabulary that all rows share, float32, shape (v,)."""

    name: str = ""
    """Name of the component, for reports."""

    temperature: PerQuery | None = None
    """Temperature of the weights, for reports; None if the component has no temperature."""

    @property
    def is_found(self) -> Tensor:
        """Rows with a distribution that is not empty, bool, shape (n,)."""
        total = self.weights.sum(1)
        return (total if self.rest is None else total + self.rest) > 0

    def probs(self, gold: Tensor) -> Tensor:
        """Compute the probability of one token at each position, float32, shape (n,)."""
        hits = self.hits
        if hits is None:
            assert self.tokens is not None
            hits = self.tokens == gold[:, None]
        probs = (self.weights * hits).sum(1)
        if self.rest is not None and self.base is not None:
            probs = probs + self.rest * self.base[gold]
        return probs.clamp_(max=1.0)


class Likelihoods(NamedTuple):
    """Log-probabilities of one token and of the m likeliest tokens at n positions."""

    gold: Tensor
    """log p of the given token, float32, shape (n,)."""

    best: Tensor
    """log p of the likeliest tokens, descending, float32, shape (n, m)."""

    tokens: Tensor
    """The likeliest tokens, int64, shape (n, m)."""

    @classmethod
    def of(cls, log_probs: Tensor, gold: Tensor, count: int) -> "Likelihoods":
        """Select them from the log p of a whole distribution, shape (n, v)."""
        best, tokens = log_probs.topk(count)
        return cls(log_probs.gather(1, gold[:, None])[:, 0], best, tokens)


class Mixture:
    """The mixture of the components and the model.

    The last component has the share λ_c of the mixture, the one before it λ_{c-1} (1 - λ_c), and so on. The
    model has what is left.

    Args:
        components: the components, at least one.
        temperature: temperature of the neighbors from the store, for reports.
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
        """Share of each component in the mixture, float32, shapes (n,)."""
        # Rounding may make the sum larger than 1, and 1 - λ needs a logarithm.
        self.lam = shares[0] if len(shares) == 1 else torch.stack(shares).sum(0).clamp_(max=1.0)
        """Share of all components together, float32, shape (n,); the rest is the model's."""

    @property
    def weights(self) -> Tensor:
        """Weights of the places of all components, which sum to 1; float32, shape (n, all places)."""
        return torch.cat([self.weights_in(number) for number in range(len(self.components))], 1)

    def weights_in(self, number: int) -> Tensor:
        """Return the part of `weights` of one component, float32, shape (n, its places)."""
        weights = self.components[number].weights
        return weights if len(self.components) == 1 else self.share_in(number)[:, None] * weights

    def share_in(self, number: int) -> Tensor:
        """Compute the share of one component among all components, shape (n,); 0 where all have none."""
        if len(self.components) == 1:
            return torch.ones_like(self.lam)
        return self.shares[number] / self.lam.where(self.lam > 0, 1.0)

    def knn_probs(self, gold: Tensor) -> Tensor:
        """Compute the probability of one token in all components together, float32, shape (n,)."""
        if len(self.components) == 1:  # also where its λ is 0
            return self.components[0].probs(gold)
        parts = [self.share_in(number) * one.probs(gold) for number, one in enumerate(self.components)]
        return torch.stack(parts).sum(0)

    def gold(self, lm_log_probs: Tensor, gold: Tensor) -> Tensor:
        """Compute the log-probability of one token at each position.

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
        """Compute the log-probabilities of the whole vocabulary.

        Args:
            lm_log_probs: log p_LM, float32, shape (n, v).

        Returns:
            log p, float32, shape (n, v). A row with λ = 0 equals that of `lm_log_probs` exactly.
        """
        left, mixed_in = 1 - self.lam[:, None], self._mixed_in(lm_log_probs)
        mixed = torch.addcmul(mixed_in, left, lm_log_probs.exp()).log()
        # A token without a weight in any component is computed in logarithms: exact, and never log 0.
        return mixed.where(mixed_in > 0, lm_log_probs + left.log())

    def likelihoods(self, lm_log_probs: Tensor, gold: Tensor, count: int) -> Likelihoods:
        """Compute the log-probabilities of one token and of the likeliest tokens.

        The values are those of `distribution`, without the logarithms of all other tokens.

        Args:
            lm_log_probs: log p_LM, float32, shape (n, v).
            gold: the token, int64, shape (n,).
            count: number of likeliest tokens, m; 0 or more.
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
        """Sum over the components: share times probability of each token, of the shape (n, v) of `like`."""
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
    """Mix one component into the probability of one token.

    Args:
        lm_log_probs: log-probability of the token without the component, float32, shape (n,).
        probs: its probability in the component, float32, shape (n,).
        lam: λ of the component, float32, shape (n,); 0 where it is empty.

    Returns:
        Log-probability, float32, shape (n,); λ = 0 returns `lm_log_probs` exactly.
    """
    return _over(lm_log_probs, lam * probs, lam)


def mix_probs(below: Tensor, *parts: tuple[PerQuery, Tensor]) -> Tensor:
    """Mix components side by side: (1 - Σ λ_i) p + Σ λ_i p_i.

    Args:
        below: p, probabilities of one token without the components, float32, any shape.
        parts: (λ_i, p_i) of each component.

    Returns:
        Probabilities of the shape of `below`, at least `LEAST_PROBABILITY`.
    """
    mixed = below
    for lam, probs in parts:
        mixed = mixed + lam * (probs - below)
    return mixed.clamp(min=LEAST_PROBABILITY)


def _over(lm_log_probs: Tensor, mixed_in: Tensor, lam: Tensor) -> Tensor:
    """Compute log((1 - λ) p_LM + `mixed_in`), where `mixed_in` is multiplied by its λ already."""
    return torch.logaddexp(lm_log_probs + torch.log1p(-lam), mixed_in.log())


def fit_lambdas(
    lm: Tensor, knn: Tensor, bins: Tensor, count: int, prior: Tensor | float = 0.0, strength: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Find the λ that makes the tokens of each bin likeliest, by bisection: the log-likelihood is concave.

    Args:
        lm: p_LM, float32, shape (n, 1), above 0.
        knn: p_kNN, float32, shape (n, m).
        bins: bin of each token, int64, shape (n,), below `count`.
        count: number of bins, g.
        prior: λ towards which every bin is drawn, shape (m,).
        strength: weight of the prior, in tokens. If it is above 0, a bin without tokens has the prior as λ.

    Returns:
        λ, at most `MAX_LAMBDA`, for each bin and column of `knn`, and the negative log-likelihood with it,
        without the prior; float32, shape (g, m).
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
    """Sum values, shape (n, m), over the tokens of each bin; shape (g, m)."""
    if count == 1:
        return values.sum(0, keepdim=True)
    return torch.zeros(count, values.shape[1]).index_add_(0, bins, values)
