"""What scored tokens say about settings: p_kNN of the token that came, at every temperature of a grid."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import CHUNK_VALUES, ScoredText
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    Retrieved,
    relative_distance,
)

_SAMPLE = 2048  # tokens to choose the temperatures by


@dataclass(frozen=True, slots=True)
class Evidence:
    """What n tokens, for which something was found, say about settings with one k."""

    k: int
    temperatures: Tensor
    """The grid, float32, shape (m,), ascending."""
    knn: Tensor
    """p_kNN of each token at each temperature, float32, shape (n, m)."""
    lm: Tensor
    """p_LM of each token, float32, shape (n, 1)."""
    nearest: Retrieved
    """The nearest neighbor alone: distances of shape (n, 1)."""
    relative: Tensor
    """`relative_distance` of each token, shape (n,)."""
    tokens: Tensor
    """Indices of the n tokens in the text that was scored, int64, shape (n,)."""

    def only(self, wanted: Tensor) -> "Evidence":
        """The evidence of some tokens: bool for every token of the text that was scored."""
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
    """What the tokens of a text say about each k, ascending and at most ``scored.k``, without a search."""
    k = ks[-1]
    chunks = scored.chunks(k, scored.found)
    parts = ((chunk, scored.retrieved(k, chunk), scored.hits[chunk, :k]) for chunk in chunks)
    return evidence_of(scored, ks, parts)


def evidence_of(
    scored: ScoredText, ks: Sequence[int], parts: Iterable[tuple[Tensor, Retrieved, Tensor]]
) -> list[Evidence]:
    """What the tokens of a text say about each k, at each temperature of a grid.

    Args:
        scored: the text.
        ks: ascending.
        parts: tokens for which something is found, their neighbors for the last k, and which of these have
            the token.
    """
    temperatures, tokens = temperatures_for(scored), scored.found
    knn = torch.empty(len(ks), len(scored), len(temperatures))
    relative = torch.empty(len(ks), len(scored))
    for rows, found, hits in parts:
        knn[:, rows] = gold_on_grid(found.distances, hits, ks, temperatures, found.log_weights)
        for at, k in enumerate(ks):
            relative[at, rows] = relative_distance(replace(found, distances=found.distances[:, :k]))
    nearest = scored.retrieved(1, tokens)
    lm = scored.lm_log_probs[tokens].exp().clamp_(min=LEAST_PROBABILITY)[:, None]
    return [
        Evidence(k, temperatures, knn[at, tokens], lm, nearest, relative[at, tokens], tokens)
        for at, k in enumerate(ks)
    ]


def temperatures_for(scored: ScoredText) -> Tensor:
    """The grid for a text in which something was found, float32, shape (m,), ascending."""
    found = scored.found
    return grid(scored.distances[found[:: max(1, len(found) // _SAMPLE)]])


_OCTAVES = (-6.0, 3.0)
_STEP = 0.5


def grid(distances: Tensor) -> Tensor:
    """Temperatures around the neighbors' typical distance from the nearest one, ascending by half octaves.

    The distances, shape (n, k), are of a sample of tokens for which something was found, ascending.
    """
    gaps = torch.where(distances.isfinite(), distances - distances[:, :1], 0.0)
    spread = float((gaps.sum(1) / distances.isfinite().sum(1)).mean())
    # The temperature of SK-MT's formula is of the size of the distances themselves.
    largest = max(spread * 2 ** _OCTAVES[1], 2 * float(distances[:, 0].abs().mean()))
    smallest = spread * 2 ** _OCTAVES[0] or largest / 2
    if largest <= 0:  # nothing but exact copies: any T will do
        smallest, largest = 0.5, 1.0
    steps = int(np.ceil(np.log2(largest / smallest) / _STEP)) + 1
    return smallest * 2 ** (_STEP * torch.arange(steps))


def gold_on_grid(
    distances: Tensor,
    hits: Tensor,
    ks: Sequence[int],
    temperatures: Tensor,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Compute p_kNN of the gold token of n tokens among the first neighbors, for each k and temperature.

    Args:
        distances: float32, shape (n, k), +inf where one is missing.
        hits: whether a neighbor carries the token, bool, shape (n, k).
        ks: ascending.
        temperatures: shape (m,).
        log_weights: of the neighbors, shape (n, k); see `Retrieved`.

    Returns:
        float32, shape (len(ks), n, m); 0 where nothing is found.
    """
    knn = torch.empty(len(ks), len(distances), len(temperatures))
    slices = [slice(start, stop) for start, stop in zip([0, *ks], ks, strict=False)]
    for rows in torch.split(torch.arange(len(distances)), max(1, CHUNK_VALUES // ks[-1])):
        near = distances[rows, : ks[-1]]
        nearest = near.amin(1, keepdim=True)
        gaps = torch.where(nearest.isfinite(), nearest, 0.0) - near
        factors = None if log_weights is None else log_weights[rows, : ks[-1]].exp()
        for column, temperature in enumerate(temperatures):
            weights = (gaps / temperature).exp_()
            if factors is not None:
                weights *= factors
            total = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            weights *= hits[rows, : ks[-1]]
            gold = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            knn[:, rows, column] = (gold / total.clamp_(min=LEAST_PROBABILITY)).clamp_(max=1.0)
    return knn


def between_points(knn: Tensor, temperatures: Tensor, wanted: Tensor | float) -> Tensor:
    """Take p_kNN at any temperature: between the points, on the cubic through the nearest four.

    Args:
        knn: at each temperature, shape (n, m).
        temperatures: ascending by a constant factor, shape (m,), m = 1 or m >= 4.
        wanted: a temperature for each token, shape (n,), or one for all; at most the last one.
    """
    if len(temperatures) == 1:
        return knn[:, 0]
    scale, last = temperatures.log(), len(temperatures) - 1
    place = (torch.as_tensor(wanted).log() - scale[0]) / (scale[1] - scale[0])
    place = place.clamp(0, last).expand(len(knn))
    first = (place.floor() - 1).clamp(0, last - 3)
    at, total = place - first, torch.zeros(len(knn))
    for node in range(4):
        factor = torch.ones(len(knn))
        for other in range(4):
            if other != node:
                factor = factor * (at - other) / (node - other)
        total += factor * knn.gather(1, first.long()[:, None] + node)[:, 0]
    return total.clamp_(0, 1)
