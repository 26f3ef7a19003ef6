"""p_kNN of the gold token for many temperatures at once: what T is chosen by."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_OCTAVES = (-6.0, 3.0)
_STEP = 0.5
_CHUNK_VALUES = 1 << 20
"""How many neighbours are weighed at once: what stays in a CPU's cache."""


def ladder(distances: Tensor) -> Tensor:
    """Choose temperatures around the neighbours' typical distance from the nearest one.

    Args:
        distances: of a sample of n tokens for which something was found, shape (n, k), ascending.

    Returns:
        float32, shape (m,), ascending by half octaves.
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


def gold_on_ladder(
    distances: Tensor,
    hits: Tensor,
    ks: Sequence[int],
    temperatures: Tensor,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Compute p_kNN of the gold token of n tokens at each k and each temperature.

    Args:
        distances: ascending, the first finite, float32, shape (n, k).
        hits: whether a neighbour carries the token, bool, shape (n, k).
        ks: ascending, the last at most k.
        temperatures: shape (m,).
        log_weights: of the neighbours, shape (n, k); see `Retrieved`.

    Returns:
        float32, shape (len(ks), n, m).
    """
    knn = torch.empty(len(ks), len(distances), len(temperatures))
    slices = [slice(start, stop) for start, stop in zip([0, *ks], ks, strict=False)]
    step = max(1, _CHUNK_VALUES // ks[-1])
    for start in range(0, len(distances), step):
        rows = slice(start, start + step)
        gaps = distances[rows, :1] - distances[rows, : ks[-1]]
        factors = None if log_weights is None else log_weights[rows, : ks[-1]].exp()
        for column, temperature in enumerate(temperatures):
            weights = (gaps / temperature).exp_()
            if factors is not None:
                weights *= factors
            total = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            weights *= hits[rows, : ks[-1]]
            gold = torch.stack([weights[:, part].sum(1) for part in slices]).cumsum(0)
            knn[:, rows, column] = (gold / total).clamp_(max=1.0)
    return knn


def between_rungs(knn: Tensor, temperatures: Tensor, wanted: Tensor | float) -> Tensor:
    """Take p_kNN at any temperature: between the rungs, on the cubic through the nearest four.

    Args:
        knn: at each temperature, shape (n, m).
        temperatures: ascending by a constant factor, shape (m,), m = 1 or m >= 4.
        wanted: a temperature for each token, shape (n,), or one for all; at most the last one.

    Returns:
        float32, shape (n,).
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
