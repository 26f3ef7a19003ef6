"""Perplexity by document, by group of documents, by token frequency, and by distance to the nearest neighbor.

`DocumentLosses` collects losses for the scores of documents and the confidence intervals, `TokenLosses` for
the slices by frequency and by distance. kNN language models were expected to help with rare tokens; Nishida
et al. 2025 found that they help with frequent tokens. Wang et al. 2023 found that most tokens get slightly
worse. The slices show both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import TextDocument
from knnstore.lm.scoring.confidence_intervals import Interval, assign_blocks, compute_interval
from knnstore.lm.scoring.token_scores import TokenScores

_DISTANCE_SLICES = 10


@dataclass(frozen=True, slots=True)
class DocumentScore:
    """The perplexities of one document."""

    id: str
    """Id of the document."""
    metadata: Mapping[str, Any]
    """Metadata of the document."""
    tokens: int
    """Number of predicted tokens, >= 1."""
    base_ppl: float
    """Perplexity of the model alone."""
    knn_ppl: float
    """Perplexity of the mixture."""


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The perplexities of a group of documents, with 95 % confidence intervals over its documents."""

    documents: int
    """Number of documents in the group, >= 1."""
    tokens: int
    """Number of predicted tokens of the group."""
    base: Interval
    """Perplexity of the model alone."""
    knn: Interval
    """Perplexity of the mixture."""
    change: Interval
    """`knn` divided by `base`. Retrieval helps significantly if the whole interval is below 1."""


class Intervals(NamedTuple):
    """The perplexities of all tokens with their 95 % confidence intervals."""

    base: Interval
    """Perplexity of the model alone."""
    knn: Interval
    """Perplexity of the mixture."""
    change: Interval
    """`knn` divided by `base`."""


class DocumentLosses:
    """Collects the losses of scored tokens, and computes perplexities of documents and confidence intervals.

    A token takes 24 bytes. At least one batch must be added before a result is computed.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[NDArray[Any], ...]] = []

    def add_scores(self, scores: TokenScores, log_probs: Tensor) -> None:
        """Add n scored tokens.

        Args:
            scores: the tokens.
            log_probs: log p of the mixture of each token, shape (n,).
        """
        losses = -scores.lm_log_probs.numpy(), -log_probs.numpy()
        self._batches.append((scores.documents, scores.positions, *losses))

    def document_scores(self, documents: Sequence[TextDocument]) -> tuple[DocumentScore, ...]:
        """Return the perplexities of each document that has a predicted token, in the order of the documents.

        Args:
            documents: all scored documents; `TokenScores.documents` has indices into this sequence.
        """
        owners, _, base, knn = self._concatenate_columns()
        lengths = np.bincount(owners, minlength=len(documents))
        sums = [np.bincount(owners, losses, len(documents)) for losses in (base, knn)]
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

    def compute_intervals(self) -> Intervals:
        """Compute the perplexities of all tokens, with confidence intervals over documents.

        If there are few documents, the intervals are over blocks (parts of documents).
        """
        owners, positions, base, knn = self._concatenate_columns()
        order = np.lexsort((positions, owners))
        blocks = assign_blocks(owners[order])
        lengths = np.bincount(blocks)
        sums = [np.bincount(blocks, losses[order]).astype(np.float64) for losses in (base, knn)]
        return Intervals(*(compute_interval(losses, lengths) for losses in (*sums, sums[1] - sums[0])))

    def _concatenate_columns(self) -> list[NDArray[Any]]:
        """Return four arrays over all tokens: document, position, loss of the model, loss of the mixture."""
        return [np.concatenate(column) for column in zip(*self._batches, strict=True)]


def score_groups(scores: Sequence[DocumentScore], field: str) -> dict[Any, GroupScore]:
    """Group documents by the value of a metadata field, and return the perplexities of each group.

    Args:
        scores: the perplexities of each document.
        field: name of the metadata field. Documents without the field are in the group None. Lists and
            objects are grouped by their string.

    Returns:
        The perplexities by the value of the field.
    """
    groups: dict[Any, list[DocumentScore]] = {}
    for score in scores:
        value = score.metadata.get(field)
        groups.setdefault(str(value) if isinstance(value, list | dict) else value, []).append(score)
    return {value: _score_group(group) for value, group in groups.items()}


def _score_group(group: Sequence[DocumentScore]) -> GroupScore:
    """Compute the perplexities of at least one document together, with intervals over the documents."""
    lengths = np.array([score.tokens for score in group])
    base, knn = (
        np.log([getattr(score, name) for score in group]) * lengths for name in ("base_ppl", "knn_ppl")
    )
    intervals = (compute_interval(losses, lengths) for losses in (base, knn, knn - base))
    return GroupScore(len(group), int(lengths.sum()), *intervals)


@dataclass(frozen=True, slots=True)
class Slice:
    """Perplexities of the tokens whose frequency (or distance to the nearest neighbor) is in one range."""

    low: float
    """Lower bound, inclusive: the least distance of the tokens, or the least frequency of the range."""
    high: float
    """Upper bound, inclusive. Both bounds are infinite for tokens without a neighbor."""
    tokens: int
    """Number of tokens in the slice."""
    base_ppl: float
    """Perplexity of the model alone."""
    knn_ppl: float
    """Perplexity of the mixture."""
    helped: float
    """Fraction of the tokens with p_kNN > p_LM."""


class TokenLosses:
    """Collects losses of tokens, and computes slices: perplexities of tokens by frequency and by distance.

    A token takes 21 bytes. At least one batch must be added before a slice is computed.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[NDArray[Any], ...]] = []

    def add_batch(self, gold: Tensor, lm: Tensor, mixed: Tensor, helped: Tensor, nearest: Tensor) -> None:
        """Add the losses of n tokens.

        Args:
            gold: gold tokens, int64, shape (n,); the other arguments have the same shape.
            lm: log p_LM.
            mixed: log p of the mixture.
            helped: True where the components together give the token a higher probability than the model;
                bool.
            nearest: distance to the nearest neighbor, +inf where none was found.
        """
        self._batches.append(tuple(column.cpu().numpy() for column in (gold, lm, mixed, helped, nearest)))

    def slice_by_frequency(self, counts: NDArray[np.int64]) -> tuple[Slice, ...]:
        """Compute perplexities of tokens by their frequency in the store: 0, 1 to 9, 10 to 99, and so on.

        Args:
            counts: number of records of each token of the vocabulary, shape (v,).

        Returns:
            The slices that contain a token, in ascending order.
        """
        frequencies = counts[self._concatenate_columns()[0]]
        largest = int(frequencies.max(initial=0))
        edges = [0, *(10**power for power in range(1 + len(str(largest))))]
        slices = []
        for low, high in pairwise(edges):
            within = (frequencies >= low) & (frequencies < high)
            if within.any():
                slices.append(self._score_slice(within, low, high - 1))
        return tuple(slices)

    def slice_by_distance(self, count: int = _DISTANCE_SLICES) -> tuple[Slice, ...]:
        """Compute perplexities of tokens by the distance to the nearest neighbor.

        Args:
            count: number of slices with about equal numbers of tokens.

        Returns:
            The slices in ascending order; fewer than `count` if many distances are equal. Tokens without a
            neighbor are in one more slice, which is the last.
        """
        nearest = self._concatenate_columns()[4]
        is_found = np.isfinite(nearest)
        slices = []
        if is_found.any():
            edges = np.unique(np.quantile(nearest[is_found], np.arange(1, count) / count, method="lower"))
            bins = np.where(is_found, np.searchsorted(edges, nearest, side="left"), -1)
            for number in range(len(edges) + 1):
                within = bins == number
                if within.any():
                    distances = nearest[within]
                    slices.append(self._score_slice(within, float(distances.min()), float(distances.max())))
        if not is_found.all():
            slices.append(self._score_slice(~is_found, math.inf, math.inf))
        return tuple(slices)

    def _concatenate_columns(self) -> tuple[NDArray[Any], ...]:
        """Return the five arguments of `add_batch` for all tokens."""
        if len(self._batches) > 1:
            self._batches = [tuple(np.concatenate(column) for column in zip(*self._batches, strict=True))]
        return self._batches[0]

    def _score_slice(self, within: NDArray[np.bool_], low: float, high: float) -> Slice:
        """Compute the perplexities of some tokens, and the share of them that the store helped.

        Args:
            within: True for these tokens, bool, shape (n,); at least one.
            low: lowest value by which the tokens were selected; it is only copied to the result.
            high: highest value, likewise.
        """
        _, lm, mixed, helped, _ = self._concatenate_columns()
        tokens = int(within.sum())
        return Slice(
            low,
            high,
            tokens,
            base_ppl=compute_perplexity(lm[within].sum(dtype=np.float64), tokens),
            knn_ppl=compute_perplexity(mixed[within].sum(dtype=np.float64), tokens),
            helped=float(helped[within].mean()),
        )


def compute_perplexity(log_prob: float, units: int) -> float:
    """Return exp(-log_prob / units); infinity if the value is too large for a float, or if `units` is 0.

    Args:
        log_prob: sum of the log-probabilities of the tokens, in nats.
        units: number of tokens, words or bytes.
    """
    try:
        return math.exp(-log_prob / units)
    except (OverflowError, ZeroDivisionError):
        return math.inf
