"""Where retrieval helps: the loss by how often the store has the token, and by how near it was found.

kNN language models were expected to help with rare tokens; Nishida et al. 2025 found that they help with
frequent ones. Both can be seen here, as what Wang et al. 2023 found: most tokens get a little worse.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_PARTS = 10


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens for which some value is within bounds."""

    low: float
    """The least value that occurs, or of frequencies may occur; inclusive."""
    high: float
    """The largest, likewise; both are infinite where nothing was found."""
    tokens: int
    base_ppl: float
    """Of the model alone."""
    knn_ppl: float
    """Of the mixture."""
    helped: float
    """Share of the tokens to which p_kNN gives more probability than p_LM."""


class TokenLosses:
    """Collects what slices are made of; 21 bytes for every token. At least one batch must be added."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def add(self, gold: Tensor, lm: Tensor, mixed: Tensor, helped: Tensor, nearest: Tensor) -> None:
        """Take in a batch of tokens.

        Of each log p_LM, log p of the mixture, whether p_kNN > p_LM, and the distance to the nearest
        neighbor, +inf where there is none.
        """
        self._parts.append(tuple(column.cpu().numpy() for column in (gold, lm, mixed, helped, nearest)))

    def by_frequency(self, counts: NDArray[np.int64]) -> tuple[Slice, ...]:
        """Divide by how often the token is stored: never, 1 to 9 times, 10 to 99 times and so on."""
        frequencies = counts[self._columns()[0]]
        largest = int(frequencies.max(initial=0))
        powers = [0, *(10**power for power in range(1 + len(str(largest))))]
        found = []
        for low, high in pairwise(powers):
            within = (frequencies >= low) & (frequencies < high)
            if within.any():
                found.append(self._slice(within, low, high - 1))
        return tuple(found)

    def by_distance(self, parts: int = _PARTS) -> tuple[Slice, ...]:
        """Divide by the distance to the nearest neighbor into parts of about the same size.

        There is one more of the tokens for which nothing was found, and fewer where many distances are equal.
        """
        nearest = self._columns()[4]
        found = np.isfinite(nearest)
        slices = []
        if found.any():
            edges = np.unique(np.quantile(nearest[found], np.arange(1, parts) / parts, method="lower"))
            bins = np.where(found, np.searchsorted(edges, nearest, side="left"), -1)
            for number in range(len(edges) + 1):
                within = bins == number
                if within.any():
                    values = nearest[within]
                    slices.append(self._slice(within, float(values.min()), float(values.max())))
        if not found.all():
            slices.append(self._slice(~found, math.inf, math.inf))
        return tuple(slices)

    def _columns(self) -> tuple[NDArray[Any], ...]:
        if len(self._parts) > 1:
            self._parts = [tuple(np.concatenate(column) for column in zip(*self._parts, strict=True))]
        return self._parts[0]

    def _slice(self, within: NDArray[np.bool_], low: float, high: float) -> Slice:
        _, lm, mixed, helped, _ = self._columns()
        tokens = int(within.sum())
        return Slice(
            low,
            high,
            tokens,
            base_ppl=perplexity(lm[within].sum(dtype=np.float64), tokens),
            knn_ppl=perplexity(mixed[within].sum(dtype=np.float64), tokens),
            helped=float(helped[within].mean()),
        )


def perplexity(total: float, units: int) -> float:
    """Exponentiate the mean negative log-likelihood of tokens, words or bytes; infinite beyond floats."""
    try:
        return math.exp(-total / units)
    except (OverflowError, ZeroDivisionError):
        return math.inf
