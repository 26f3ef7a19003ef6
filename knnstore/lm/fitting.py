"""Fitting k, T, λ and the mixers on text that was scored once.

For a given T the log-likelihood of p = λ p_kNN + (1 - λ) p_LM is concave in λ, so λ is found by bisection
of the derivative, for many T and many bins of tokens at once. T is found on a ladder of half
octaves, between whose rungs the vertex of a parabola is taken: in log T the loss is smooth and flat
around its minimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.bins import BinnedLambda, bins_of
from knnstore.lm.closed_forms import NearnessLambda, RelativeConfidence, relative_distance
from knnstore.lm.ladder import gold_on_ladder, ladder
from knnstore.lm.mixing import MAX_LAMBDA, FixedLambda, Retrieved
from knnstore.lm.scored_text import ScoredText
from knnstore.lm.settings import KNNSettings

PRIOR_TOKENS = 32.0
"""The weight, in tokens, with which all tokens together speak in the fit of each bin."""

_SAMPLE = 2048  # tokens to choose the temperatures by
_BISECTIONS = 24
_LEAST = 1e-30  # probabilities are kept above, so that quotients stay finite in float32


@dataclass(frozen=True, slots=True)
class Evidence:
    """What n tokens, for which something was found, say about settings with one k."""

    k: int
    temperatures: Tensor
    """The ladder, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN of each token at each temperature, float32, shape (n, m)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n, 1)."""
    nearest: Retrieved
    """The nearest neighbour alone: distances of shape (n, 1)."""
    relative: Tensor
    """`relative_distance` of each token, shape (n,)."""
    tokens: Tensor
    """Indices of the n tokens in the text that was scored, int64, shape (n,)."""

    def only(self, wanted: Tensor) -> "Evidence":
        """The evidence of some tokens.

        Args:
            wanted: bool for every token of the text that was scored.
        """
        rows = wanted[self.tokens]
        return replace(
            self,
            knn=self.knn[rows],
            lm=self.lm[rows],
            nearest=Retrieved(self.nearest.distances[rows], self.nearest.lm_max[rows]),
            relative=self.relative[rows],
            tokens=self.tokens[rows],
        )


def gather_evidence(scored: ScoredText, ks: Sequence[int]) -> list[Evidence]:
    """Compute p_kNN of every token at each k and each temperature of a ladder, in one sweep.

    Args:
        scored: the text.
        ks: ascending, the last at most ``scored.k``.
    """
    found = scored.distances[:, 0].isfinite().nonzero()[:, 0]
    temperatures = temperatures_for(scored)
    knn = torch.empty(len(ks), len(found), len(temperatures))
    relative = torch.empty(len(ks), len(found))
    done = 0
    for chunk in scored.chunks(ks[-1], found):
        rows = slice(done, done + len(chunk))
        retrieved = scored.retrieved(ks[-1], chunk)
        knn[:, rows] = gold_on_ladder(
            retrieved.distances, scored.hits[chunk, : ks[-1]], ks, temperatures, retrieved.log_weights
        )
        for at, k in enumerate(ks):
            relative[at, rows] = relative_distance(scored.retrieved(k, chunk))
        done = rows.stop
    nearest = scored.retrieved(1, found)
    lm = scored.lm_log_probs[found].exp().clamp_(min=_LEAST)[:, None]
    return [Evidence(k, temperatures, knn[at], lm, nearest, relative[at], found) for at, k in enumerate(ks)]


def temperatures_for(scored: ScoredText) -> Tensor:
    """The ladder for a text in which something was found, float32, shape (m,), ascending."""
    found = scored.distances[:, 0].isfinite().nonzero()[:, 0]
    return ladder(scored.distances[found[:: max(1, len(found) // _SAMPLE)]])


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
        slope = _sums(difference / (lm + lam[bins] * difference).clamp_(min=_LEAST), bins, count)
        slope += strength * (prior / lam - (1 - prior) / (1 - lam))
        low, high = lam.where(slope > 0, low), lam.where(slope <= 0, high)
    lam = torch.where(low == 0, 0.0, (low + high) / 2)
    loss = -_sums((lm + lam[bins] * difference).clamp_(min=_LEAST).log(), bins, count)
    return lam, loss


def _sums(values: Tensor, bins: Tensor, count: int) -> Tensor:
    if count == 1:
        return values.sum(0, keepdim=True)
    return torch.zeros(count, values.shape[1]).index_add_(0, bins, values)


def fit_fixed(evidence: Evidence) -> KNNSettings:
    """Fit one T and one λ."""
    lam, loss = _fit_one(evidence)
    rung = _lowest(loss)
    return KNNSettings(
        evidence.k, _at(evidence.temperatures.log(), rung).exp().item(), FixedLambda(_at(lam, rung).item())
    )


def fit_bins(
    evidence: Evidence, distance_bins: int, confidence_bins: int = 1, *, temperatures: bool = False
) -> KNNSettings:
    """Fit λ, and T if wanted, in bins that hold equally many tokens.

    Every bin is drawn towards the best λ and T of all tokens by `PRIOR_TOKENS`; one without tokens
    has just these.

    Args:
        evidence: of the tokens to fit on.
        distance_bins: of the distance to the nearest neighbour.
        confidence_bins: into which each of these is divided by the model's confidence.
        temperatures: whether T differs between bins too.
    """
    distance_edges = _edges(evidence.nearest.distances[:, 0], distance_bins)
    confidence_edges = _edges(evidence.nearest.lm_max, confidence_bins)
    bins = bins_of(evidence.nearest, distance_edges, confidence_edges)
    count = (len(distance_edges) + 1) * (len(confidence_edges) + 1)
    overall, overall_loss = _fit_one(evidence)
    lam, loss = fit_lambdas(evidence.lm, evidence.knn, bins, count, overall, PRIOR_TOKENS)
    scale = evidence.temperatures.log()
    if temperatures:
        together = _at(scale, _lowest(overall_loss))
        rungs = _lowest(loss + PRIOR_TOKENS * overall_loss / len(bins))
        factors = tuple((_at(scale.expand_as(loss), rungs) - together).exp().tolist())
    else:
        rungs = _lowest(loss.sum(0, keepdim=True)).expand(count)
        together, factors = _at(scale, rungs[:1]), ()
    mixer = BinnedLambda(distance_edges, tuple(_at(lam, rungs).tolist()), factors, confidence_edges)
    return KNNSettings(evidence.k, together.exp().item(), mixer)


def fit_nearness(evidence: Evidence) -> KNNSettings:
    """Fit T of SK-MT's formula."""
    mixer = NearnessLambda()
    loss = torch.stack(
        [
            -_mixed(evidence, mixer(evidence.nearest, float(temperature)).lam, column).log().sum()
            for column, temperature in enumerate(evidence.temperatures)
        ]
    )
    rung = _lowest(loss[None])
    return KNNSettings(evidence.k, _at(evidence.temperatures.log(), rung).exp().item(), mixer)


def fit_relative(evidence: Evidence) -> KNNSettings:
    """Fit alpha and tau of the relative retrieval confidence, at the T that is best for a fixed λ."""
    lam, loss = _fit_one(evidence)
    column = int(loss.argmin())
    middle, spread = evidence.relative.mean(), evidence.relative.std().clamp(min=1e-6)
    ratio = (evidence.relative - middle) / spread
    weights = torch.tensor([lam[0, column].clamp(0.01, 0.99).logit().item(), -0.1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = -_mixed(evidence, (weights[0] + weights[1] * ratio).sigmoid(), column).log().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(step)  # type: ignore[no-untyped-call]
    level, slope = weights.detach().double().tolist()
    slope = min(slope, -1e-6) if slope <= 0 else max(slope, 1e-6)
    alpha, tau = float(middle) - float(spread) * level / slope, -float(spread) / slope
    return KNNSettings(evidence.k, evidence.temperatures[column].item(), RelativeConfidence(alpha, tau))


def _fit_one(evidence: Evidence) -> tuple[Tensor, Tensor]:
    return fit_lambdas(evidence.lm, evidence.knn, torch.zeros(len(evidence.lm), dtype=torch.long), 1)


def _mixed(evidence: Evidence, lam: Tensor, column: int) -> Tensor:
    lm = evidence.lm[:, 0]
    return (lm + lam * (evidence.knn[:, column] - lm)).clamp(min=_LEAST)


def _edges(values: Tensor, bins: int) -> tuple[float, ...]:
    """Quantiles that cut the values into bins of the same size; fewer bins where values are equal."""
    quantiles = np.quantile(values.numpy(), np.arange(1, bins) / bins)
    return tuple(np.unique(quantiles.astype(np.float32)).tolist())


def _lowest(loss: Tensor) -> Tensor:
    """Where each row is lowest, as a fractional column: the vertex of the parabola of three.

    Args:
        loss: shape (g, m).
    """
    last = loss.shape[1] - 1
    lowest = loss.argmin(1)
    middle = lowest.clamp(min(1, last), max(last - 1, 0))[:, None]
    before, at, after = (loss.gather(1, (middle + step).clamp(0, last))[:, 0] for step in (-1, 0, 1))
    bend = before - 2 * at + after
    offset = torch.where(bend > 0, (before - after) / (2 * bend), 0.0).clamp(-0.5, 0.5)
    return torch.where(lowest == middle[:, 0], lowest + offset, lowest.float())


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """Interpolate each row at a fractional column: values of shape (g, m), or (m,) for all rows."""
    rows = values.expand(len(columns), -1)
    below = columns.floor().long().clamp(0, rows.shape[1] - 1)[:, None]
    above = (below + 1).clamp(max=rows.shape[1] - 1)
    return rows.gather(1, below)[:, 0].lerp(rows.gather(1, above)[:, 0], columns - below[:, 0])
