"""The arithmetic of kNN-LM: a distribution from neighbors, its mixture with the model's, and the fit of λ.

    p(y) = λ p_kNN(y) + (1 - λ) p_LM(y)        p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

(Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172). Every component has the same form: a distribution
over few tokens and a weight λ. Components are mixed one after another: the component has the weight λ, and
the mixture of the model and all earlier components has 1 - λ. All values are float32. A missing neighbor
(distance +inf) has the weight 0. If a component has no prediction at a position, its λ counts as 0 there.

A component's distribution has k columns ("places"), each with a token and a weight; several columns may have
the same token.

Shapes: n queries, k neighbors, v tokens in the vocabulary. Distances are float32 and smaller is
nearer; they may be negative (inner products).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PerQuery = float | Tensor
"""One value for all queries, or a tensor of shape (n,)."""

_VALUES, _VALUES_CPU = 1 << 24, 1 << 20
"""Number of probabilities computed at once, on a GPU and on a CPU, where they stay in the cache."""

_LOWEST = -1e30
"""Replaces log 0, so that a token with p = 0 adds nothing to an entropy."""

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
"""Smallest probability that has all of its digits in float32."""

LEAST_PROBABILITY = 1e-30
"""Smallest probability in fits; smaller values are raised to it, so that logarithms and ratios stay finite in
float32."""

_ALL_ROWS = slice(None)

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that a token that was not retrieved remains possible."""

PRIOR_TOKENS = 32.0
"""Weight of the prior in the fit of each bin, in tokens; the prior is the fit to all tokens together."""

_BISECTIONS = 24

LEAST_TEMPERATURE = 1e-12
"""Smallest temperature that settings accept; with a smaller one, distance / T may overflow."""


def compute_exp(values: Tensor) -> Tensor:
    """Compute e to the power of each float32 value; on a CPU with numpy, which takes half of torch's time."""
    if values.device.type != "cpu" or values.requires_grad:
        return values.exp()
    with np.errstate(under="ignore"):
        return torch.from_numpy(np.exp(values.numpy()))


def _log_in_place(values: Tensor) -> Tensor:
    """Replace positive values on the CPU by their natural logarithms, with numpy, and return the tensor."""
    array = values.numpy()
    np.log(array, out=array)
    return values


def compute_entropy(log_probs: Tensor, probs: Tensor) -> Tensor:
    """Compute the entropy in nats of n distributions over v tokens.

    Args:
        log_probs: log p of every token, shape (n, v); -inf is allowed.
        probs: p of every token, shape (n, v).

    Returns:
        Shape (n,).
    """
    return -(log_probs.clamp(min=_LOWEST).mul_(probs)).sum(-1)


class ModelDistribution:
    """The distributions over v tokens that the model predicts at n positions.

    On a CPU, a mixture needs their logarithms only where λ or a probability is 0, so `log_probs` is computed
    when it is first used.

    Args:
        logits: logits or log-probabilities, shape (n, v), any floating dtype.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.float()
        self.is_in_main_memory = logits.device.type == "cpu" and not logits.requires_grad
        """True on a CPU without gradients, where the probabilities may be changed in place."""

    @cached_property
    def log_probs(self) -> Tensor:
        """Log p_LM, float32, shape (n, v)."""
        return self._logits.log_softmax(-1)

    @cached_property
    def log_max(self) -> Tensor:
        """The largest log p_LM at each position, float32, shape (n,)."""
        if not self.is_in_main_memory:
            return self.log_probs.amax(-1)
        return self._sums.log().neg_()

    @cached_property
    def _largest_logits(self) -> Tensor:
        """The largest logit at each position, shape (n, 1)."""
        return self._logits.amax(-1, keepdim=True)

    @cached_property
    def _weights(self) -> Tensor:
        """exp(logit - largest logit), shape (n, v)."""
        weights = self._logits - self._largest_logits
        array = weights.numpy()
        with np.errstate(under="ignore"):
            np.exp(array, out=array)  # in half of torch's time
        return weights

    @cached_property
    def _sums(self) -> Tensor:
        """Sums of `_weights`, shape (n,)."""
        return self._weights.sum(-1)

    def scale_probs(self, factors: Tensor) -> Tensor:
        """Return p_LM, multiplied by a factor at each position, as a new tensor, float32, shape (n, v).

        On a CPU the tensor is the memory of an intermediate result, which is computed again if it is needed.

        Args:
            factors: the factors, shape (n,).
        """
        if not self.is_in_main_memory:
            return factors[:, None] * self.log_probs.exp()
        scaled = self._weights.mul_((factors / self._sums)[:, None])
        del self._weights
        return scaled

    def compute_entropy(self) -> Tensor:
        """Compute the entropy in nats at each position, float32, shape (n,)."""
        if not self.is_in_main_memory:
            return compute_entropy(self.log_probs, self.log_probs.exp())
        gaps = (self._logits - self._largest_logits).clamp_(min=_LOWEST)
        mean_gaps: Tensor = torch.linalg.vecdot(gaps, self._weights) / self._sums
        return self._sums.log() - mean_gaps

    def select_rows(self, rows: Tensor) -> "ModelDistribution":
        """Return the distributions at some of the positions; `rows` are indices or a mask."""
        return ModelDistribution(self._logits[rows])


def compute_neighbor_weights(distances: Tensor, temperature: PerQuery) -> Tensor:
    """Convert distances to the probability of each neighbor in p_kNN: a softmax of -distance / T.

    Args:
        distances: float32, shape (n, k), +inf where a neighbor is missing, k >= 1; or (n, 1, k) for several
            temperatures of each query.
        temperature: T > 0; a larger T makes the probabilities more equal. One value, or one for each query,
            shape (n,). With distances of shape (n, 1, k): several values for all queries, shape (t,).

    Returns:
        float32, shape (n, k) or (n, t, k). A row sums to 1, or is 0 if no neighbor was found.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.to(distances).reshape(-1, 1)
    # Subtract the nearest distance first, so that no row under- or overflows.
    scores = (distances.amin(-1, keepdim=True) - distances) / temperature
    return scores.softmax(-1).nan_to_num(nan=0.0)  # a row without neighbors is inf - inf


class Contribution(NamedTuple):
    """The distribution over tokens that one component predicts at n positions, and its weight λ.

    The distribution is sparse: it has k columns ("places"), each with a token and a weight. Several places of
    one row may have the same token.
    """

    weights: Tensor
    """Probability of each place, float32, shape (n, k). A row and its `rest` sum to 1; a row without a
    prediction is 0."""

    lam: Tensor
    """λ, the weight of this component; the mixture of the model and all earlier components has 1 - λ.
    Float32, shape (n,), between 0 and 1."""

    tokens: Tensor | None = None
    """Token of each place, int64, shape (n, k); arbitrary where the weight is 0. None if `hits` is set, or if
    the places are the whole vocabulary (k = v for each search)."""

    hits: Tensor | None = None
    """In place of `tokens`: True where a place has the target token; bool, shape (n, k). None if `tokens`
    is set, or if the places are the whole vocabulary."""

    rest: Tensor | None = None
    """Probability that each row spreads over the vocabulary in proportion to `base`, float32, shape (n,);
    None means that nothing is spread."""

    base: Tensor | None = None
    """Distribution over the vocabulary that all rows share, float32, shape (v,); None if `rest` is None."""

    name: str = ""
    """Name of the component, for reports."""

    temperature: PerQuery | None = None
    """Temperature of the weights, for reports; None if the component has no temperature."""

    @property
    def is_found(self) -> Tensor:
        """True for each row with a prediction, bool, shape (n,)."""
        total = self.weights.sum(1)
        return (total if self.rest is None else total + self.rest) > 0

    def token_probs(self, gold: Tensor) -> Tensor:
        """Compute the probability of one token at each position, float32, shape (n,).

        Args:
            gold: the token of each position, int64, shape (n,); not used if `hits` marks the places with the
                target token.
        """
        hits = self.hits
        if hits is None:
            assert self.tokens is not None
            hits = self.tokens == gold[:, None]
        probs = (self.weights * hits).sum(1)
        if self.rest is not None and self.base is not None:
            probs = probs + self.rest * self.base[gold]
        return probs.clamp_(max=1.0)


class Likelihoods(NamedTuple):
    """Log-probabilities of the target token and of the m most probable tokens at n positions."""

    gold: Tensor
    """log p of the target token, float32, shape (n,)."""

    best: Tensor
    """log p of the most probable tokens, descending, float32, shape (n, m)."""

    tokens: Tensor
    """The most probable tokens, int64, shape (n, m)."""

    @classmethod
    def from_log_probs(cls, log_probs: Tensor, gold: Tensor, count: int) -> "Likelihoods":
        """Read the log-probabilities of the target tokens and of the most probable tokens from distributions.

        Args:
            log_probs: log p of every token, shape (n, v).
            gold: target tokens, int64, shape (n,).
            count: number of most probable tokens, at most v.
        """
        best, tokens = log_probs.topk(count)
        return cls(log_probs.gather(1, gold[:, None])[:, 0], best, tokens)


class Mixture:
    """Mixes the distributions of several components with the model's distribution.

    Order matters: each component is mixed over the result of the earlier ones. So the last component c has
    the share λ_c of the mixture, component c - 1 has λ_{c-1} (1 - λ_c), and so on. The model has the rest.

    Args:
        components: the components, at least one.
        temperature: temperature with which neighbors from the store were weighted, for reports.
    """

    def __init__(self, components: Sequence[Contribution], temperature: PerQuery = 1.0) -> None:
        self.components = components
        self.temperature = temperature
        self._found = [component.is_found for component in components]
        lams = [one.lam.where(is_found, 0.0) for one, is_found in zip(components, self._found, strict=True)]
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
    def is_anything_found(self) -> bool:
        """True if a component has a prediction in at least one row. The program waits for the device."""
        return any(bool(is_found.any()) for is_found in self._found)

    @property
    def weights(self) -> Tensor:
        """Weights of all columns of all components, divided by λ, float32, shape (n, columns).

        λ is the weight of all components together. A row sums to 1, or is 0 without a prediction. The weight
        of a component's `rest` is not included.
        """
        return torch.cat([self.component_weights(number) for number in range(len(self.components))], 1)

    def component_weights(self, number: int) -> Tensor:
        """Return the columns of `weights` that belong to one component, float32, shape (n, k).

        Args:
            number: index of the component.
        """
        weights = self.components[number].weights
        return weights if len(self.components) == 1 else self.component_share(number)[:, None] * weights

    def component_share(self, number: int) -> Tensor:
        """Compute the part of λ that belongs to one component, as a fraction of λ, float32, shape (n,).

        λ is the weight of all components together; the model has the rest. The result is 0 at positions where
        λ is 0. With a single component it is always 1.

        Args:
            number: index of the component.
        """
        if len(self.components) == 1:
            return torch.ones_like(self.lam)
        return self.shares[number] / self.lam.where(self.lam > 0, 1.0)

    def knn_probs(self, gold: Tensor) -> Tensor:
        """Compute the probability of one token in the mixture of the components without the model.

        Args:
            gold: the token of each position, int64, shape (n,).

        Returns:
            Float32, shape (n,); 0 where no component has a prediction.
        """
        if len(self.components) == 1:  # also where its λ is 0
            return self.components[0].token_probs(gold)
        parts = [
            self.component_share(number) * component.token_probs(gold)
            for number, component in enumerate(self.components)
        ]
        return torch.stack(parts).sum(0)

    def target_log_probs(self, lm_log_probs: Tensor, targets: Tensor) -> Tensor:
        """Compute the log-probability of one given token at each position in the mixture.

        Args:
            lm_log_probs: log p_LM of the target tokens, float32, shape (n,).
            targets: the target token of each position, int64, shape (n,).

        Returns:
            log p of the target tokens, float32, shape (n,); exactly `lm_log_probs` where the weight λ of all
            components is 0.
        """
        mixed_in = sum(
            share * one.token_probs(targets) for share, one in zip(self.shares, self.components, strict=True)
        )
        return _mix_log_probs(lm_log_probs, torch.as_tensor(mixed_in), self.lam)

    def compute_log_probs(self, lm: ModelDistribution) -> Tensor:
        """Compute the log-probabilities of all tokens of the vocabulary in the mixture.

        Args:
            lm: the model's distributions.

        Returns:
            log p, float32, shape (n, v). A row in which the weight λ of all components is 0 equals the row of
            `lm.log_probs` exactly.
        """
        left = 1 - self.lam
        if lm.is_in_main_memory and len(left):
            mixed = self._add_component_probs(lm.scale_probs(left))
            is_unmixed = self.lam == 0
            has_unmixed = bool(is_unmixed.any())
            if has_unmixed:
                mixed[is_unmixed] = 1
            if mixed.amin() >= _LEAST_NORMAL:
                _log_in_place(mixed)
                if has_unmixed:
                    mixed[is_unmixed] = lm.select_rows(is_unmixed).log_probs
                return mixed
        # A token without a weight in any component is computed in logarithms: exact, and never log 0.
        below = lm.scale_probs(left)
        mixed_in = self._add_component_probs(torch.zeros_like(below))
        return (mixed_in + below).log().where(mixed_in > 0, lm.log_probs + left.log()[:, None])

    def score_targets(self, lm_log_probs: Tensor, targets: Tensor, count: int) -> Likelihoods:
        """Compute the mixture's log-probabilities of one given token and of the most probable tokens.

        The values equal the values of `compute_log_probs`, but the log-probabilities of all other tokens are
        not computed.

        Args:
            lm_log_probs: log p_LM of every token, float32, shape (n, v).
            targets: the target token of each position, int64, shape (n,).
            count: number of most probable tokens, 0 to v.
        """
        values = _VALUES_CPU if lm_log_probs.device.type == "cpu" else _VALUES
        step, parts = max(1, values // lm_log_probs.shape[1]), []
        for start in range(0, max(1, len(targets)), step):
            at = slice(start, start + step)
            below, lam, asked = lm_log_probs[at], self.lam[at, None], targets[at, None]
            mixed_in = self._add_component_probs(torch.zeros_like(below), at)
            if count:
                probs = compute_exp(below).mul_(1 - lam).add_(mixed_in)
                likeliest = probs.argmax(1, keepdim=True) if count == 1 else probs.topk(count).indices
                asked = torch.cat([asked, likeliest], 1)
            log_probs = _mix_log_probs(below.gather(1, asked), mixed_in.gather(1, asked), lam)
            parts.append(Likelihoods(log_probs[:, 0], log_probs[:, 1:], asked[:, 1:]))
        return Likelihoods(*map(torch.cat, zip(*parts, strict=True)))

    def _add_component_probs(self, mixed_in: Tensor, at: slice = _ALL_ROWS) -> Tensor:
        """Add the components' probabilities of each token, multiplied by their shares in the mixture.

        Args:
            mixed_in: the probabilities to add to, shape (m, v); changed in place.
            at: slice that selects m positions; default all positions.

        Returns:
            `mixed_in`.
        """
        for share, component in zip(self.shares, self.components, strict=True):
            column, weights = share[at, None], component.weights[at]
            if component.tokens is not None:
                tokens = component.tokens[at].clamp(0, mixed_in.shape[1] - 1)
                mixed_in.scatter_add_(1, tokens, column * weights)
            else:
                for search_weights in torch.split(weights, mixed_in.shape[1], 1):
                    mixed_in.addcmul_(column, search_weights)
            if component.rest is not None:
                assert component.base is not None
                mixed_in.addcmul_((share[at] * component.rest[at])[:, None], component.base[None])
        return mixed_in


def mix_target_log_probs(lm_log_probs: Tensor, probs: Tensor, lam: Tensor) -> Tensor:
    """Return the log-probabilities of n target tokens in the mixture with one component.

    Args:
        lm_log_probs: log-probability of each token without the component, float32, shape (n,).
        probs: probability of each token by the component, float32, shape (n,).
        lam: weight λ of the component, float32, shape (n,); must be 0 where the component has no prediction.

    Returns:
        Log-probability, float32, shape (n,); λ = 0 returns `lm_log_probs` exactly.
    """
    return _mix_log_probs(lm_log_probs, lam * probs, lam)


def mix_probs(below: Tensor, *parts: tuple[PerQuery, Tensor]) -> Tensor:
    """Return probabilities in the mixture with several components: (1 - Σ λ_i) p + Σ λ_i p_i.

    Args:
        below: p, probabilities of target tokens without the components, float32, any shape.
        parts: for each component its weight λ_i and its probabilities p_i, with shapes that broadcast.

    Returns:
        Probabilities of the shape of `below`, at least `LEAST_PROBABILITY`.
    """
    mixed = below
    for lam, probs in parts:
        mixed = mixed + lam * (probs - below)
    return mixed.clamp(min=LEAST_PROBABILITY)


def _mix_log_probs(lm_log_probs: Tensor, mixed_in: Tensor, lam: Tensor) -> Tensor:
    """Return log((1 - λ) p_LM + `mixed_in`), elementwise.

    Args:
        lm_log_probs: log p_LM.
        mixed_in: λ times the probability by the components.
        lam: weight λ of the components.
    """
    return torch.logaddexp(lm_log_probs + torch.log1p(-lam), mixed_in.log())


def fit_lambdas(
    lm: Tensor, knn: Tensor, bins: Tensor, count: int, prior: Tensor | float = 0.0, strength: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Find the weight λ with the largest likelihood for each bin (group) of tokens.

    The likelihood of λ p_kNN + (1 - λ) p_LM is concave in λ, so bisection finds its maximum.

    Args:
        lm: p_LM of n tokens, float32, shape (n, 1), above 0.
        knn: p_kNN of the tokens at m settings, for example temperatures, float32, shape (n, m).
        bins: bin of each token, int64, shape (n,), from 0 to `count` - 1.
        count: number of bins, g.
        prior: expected λ, shape (m,). The fit draws the λ of every bin towards it.
        strength: weight of the prior, in tokens. If it is above 0, a bin without tokens has the prior as λ.

    Returns:
        λ of each bin and each column of `knn`, at most `MAX_LAMBDA`, float32, shape (g, m); and the negative
        log-likelihood with this λ, without the prior, of the same shape.
    """
    difference = knn - lm
    low, high = torch.zeros(count, knn.shape[1]), torch.full((count, knn.shape[1]), MAX_LAMBDA)
    for _ in range(_BISECTIONS):
        lam = (low + high) / 2
        slope = _sum_by_bin(
            difference / (lm + lam[bins] * difference).clamp_(min=LEAST_PROBABILITY), bins, count
        )
        slope += strength * (prior / lam - (1 - prior) / (1 - lam))
        low, high = lam.where(slope > 0, low), lam.where(slope <= 0, high)
    lam = torch.where(low == 0, 0.0, (low + high) / 2)
    loss = -_sum_by_bin((lm + lam[bins] * difference).clamp_(min=LEAST_PROBABILITY).log(), bins, count)
    return lam, loss


def _sum_by_bin(values: Tensor, bins: Tensor, count: int) -> Tensor:
    """Sum values over the tokens of each bin.

    Args:
        values: shape (n, m).
        bins: bin of each token, int64, shape (n,).
        count: number of bins.

    Returns:
        Shape (count, m).
    """
    if count == 1:
        return values.sum(0, keepdim=True)
    return torch.zeros(count, values.shape[1]).index_add_(0, bins, values)
