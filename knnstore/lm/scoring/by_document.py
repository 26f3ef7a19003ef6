"""Perplexity document by document, and how far that of all is known."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import TextDocument
from knnstore.lm.scoring.intervals import Interval, blocks_of, interval_of
from knnstore.lm.scoring.scores import TokenScores


@dataclass(frozen=True, slots=True)
class DocumentScore:
    """How well one document is predicted."""

    id: str
    metadata: Mapping[str, Any]
    tokens: int
    """Tokens predicted, >= 1."""
    base_ppl: float
    """Of the model alone."""
    knn_ppl: float
    """Of the mixture."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """How well some documents are predicted together, with intervals of 95 % over documents."""

    documents: int
    tokens: int
    base: Interval
    """Perplexity of the model alone."""
    knn: Interval
    """Of the mixture."""
    change: Interval
    """The second divided by the first: retrieval helps, beyond chance, where all of it is below 1."""


class Intervals(NamedTuple):
    """Perplexities of all tokens with their intervals."""

    base: Interval
    knn: Interval
    change: Interval


class DocumentLosses:
    """Collects the losses of tokens; 24 bytes each."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def add(self, scores: TokenScores, log_probs: Tensor) -> None:
        """Take in n tokens, with log p of the mixture of each, shape (n,)."""
        losses = -scores.lm_log_probs.numpy(), -log_probs.numpy()
        self._parts.append((scores.documents, scores.positions, *losses))

    def scores(self, documents: Sequence[TextDocument]) -> tuple[DocumentScore, ...]:
        """The perplexities of each document that has a token to predict, in the order given."""
        at, _, base, knn = self._columns()
        lengths = np.bincount(at, minlength=len(documents))
        sums = [np.bincount(at, losses, len(documents)) for losses in (base, knn)]
        return tuple(
            DocumentScore(
                document.id,
                document.metadata,
                int(length),
                *(math.exp(min(700.0, loss[number] / length)) for loss in sums),
            )
            for number, (document, length) in enumerate(zip(documents, lengths.tolist(), strict=True))
            if length
        )

    def intervals(self) -> Intervals:
        """How far the perplexities of all tokens are known; long documents count as blocks: `blocks_of`."""
        at, positions, base, knn = self._columns()
        order = np.lexsort((positions, at))
        blocks = blocks_of(at[order])
        lengths = np.bincount(blocks)
        sums = [np.bincount(blocks, losses[order]).astype(np.float64) for losses in (base, knn)]
        return Intervals(*(interval_of(one, lengths) for one in (*sums, sums[1] - sums[0])))

    def _columns(self) -> list[NDArray[Any]]:
        return [np.concatenate(column) for column in zip(*self._parts, strict=True)]


def grouped(scores: Sequence[DocumentScore], field: str) -> dict[Any, GroupScore]:
    """Divide documents by the value of a field of their metadata; None stands for those without it."""
    members: dict[Any, list[DocumentScore]] = {}
    for one in scores:
        members.setdefault(_hashable(one.metadata.get(field)), []).append(one)
    return {value: _together(group) for value, group in members.items()}


def _together(group: Sequence[DocumentScore]) -> GroupScore:
    lengths = np.array([one.tokens for one in group])
    base, knn = (np.log([getattr(one, name) for one in group]) * lengths for name in ("base_ppl", "knn_ppl"))
    intervals = (interval_of(losses, lengths) for losses in (base, knn, knn - base))
    return GroupScore(len(group), int(lengths.sum()), *intervals)


def _hashable(value: Any) -> Any:
    return str(value) if isinstance(value, list | dict) else value
