"""N-grams of the stored text: the tokens that followed the last words of a text there, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import record_ids
from knnstore.errors import ConfigError
from knnstore.lm.components.component import Citations, Form, Place, Question
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import (
    LEAST_PROBABILITY,
    PRIOR_TOKENS,
    Contribution,
    fit_lambdas,
    mix_gold,
)
from knnstore.store import LONGEST_NGRAM, Matches, NGramCounts, Occurrence, Suffixes

Rows = slice | Tensor
_MIN_CITED_PLACES = 32
"""Least number of places that are named for each length of n-grams, if as many exist."""


@dataclass(frozen=True, slots=True)
class NGramSettings:
    """Order and weight of the n-grams of the selected documents; see `knnstore.store.ngrams`.

    Raises:
        ConfigError: a value is out of range.
    """

    order: int = 7
    """Tokens of the longest n-grams, between 2 and 8: one more than the contexts have."""

    lam: float = 0.25
    """λ, between 0 and 1: the weight of the counts against the mixture of model and store."""

    by_length: tuple[float, ...] | None = None
    """λ by the number of tokens (0, 1, …) of the longest end of the context that was found; the last value
    holds for all longer ones. `lam` is then only their mean. None: `lam` holds for all lengths."""

    def __post_init__(self) -> None:
        if self.by_length is not None:
            object.__setattr__(self, "by_length", tuple(self.by_length))
        if type(self.order) is not int or not 2 <= self.order <= LONGEST_NGRAM:
            raise ConfigError(
                f"n-grams of 2 to {LONGEST_NGRAM} tokens are counted, their order cannot be {self.order!r}"
            )
        for lam in (self.lam, *(self.by_length or ())):
            if not 0 <= lam <= 1:
                raise ConfigError(f"lambda of n-grams must be between 0 and 1, got {lam}")


class Continuation(NamedTuple):
    """Distributions of counted n-grams in n contexts, over few tokens each, and a rest for all tokens."""

    weights: Tensor
    """Probability of each of k places, float32, shape (n, k)."""
    tokens: Tensor
    """Tokens at the places, int64, shape (n, k); arbitrary where the weight is zero."""
    suffixes: Tensor
    """The longest end of each context that is found: its length in tokens, its count, and the number of
    different next tokens; zeros where none is found. int64, shape (n, 3)."""
    rest: Tensor | None = None
    """Probability that each context leaves to `unigrams`, float32, shape (n,); None leaves nothing."""
    unigrams: Tensor | None = None
    """A distribution over the vocabulary, float32, shape (v,)."""

    @classmethod
    def empty(cls, count: int) -> "Continuation":
        """Return the distributions of `count` contexts for a store without text: all weights are zero."""
        tokens = torch.zeros((count, 1), dtype=torch.int64)
        return cls(tokens.float(), tokens, torch.zeros((count, 3), dtype=torch.int64))

    @property
    def width(self) -> int:
        """Places of each context."""
        return self.weights.shape[1]

    def rows(self, rows: Rows) -> "Continuation":
        """Return the distributions in some of the contexts."""
        rest = None if self.rest is None else self.rest[rows]
        return self._replace(
            weights=self.weights[rows], tokens=self.tokens[rows], suffixes=self.suffixes[rows], rest=rest
        )

    def to(self, device: torch.device) -> "Continuation":
        """Return the same on a device."""
        return Continuation(*(None if one is None else one.to(device) for one in self))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence["Continuation"]) -> "Continuation":
        """Concatenate the distributions of several groups of contexts, all from the same counts.

        Distributions with fewer places are padded with zeros.
        """
        width = max(part.width for part in parts)
        weights, tokens = (
            torch.cat([pad(getattr(part, name), (0, width - part.width)) for part in parts])
            for name in ("weights", "tokens")
        )
        rests = [part.rest for part in parts if part.rest is not None]
        suffixes = torch.cat([part.suffixes for part in parts])
        return cls(weights, tokens, suffixes, torch.cat(rests) if rests else None, parts[0].unigrams)

    def contribution(self, settings: NGramSettings, name: str) -> Contribution:
        """Weigh the distributions by the λ of their lengths."""
        lam = select_ngram_lambdas(settings, self.suffixes[:, 0])
        return Contribution(self.weights, lam, self.tokens, rest=self.rest, base=self.unigrams, name=name)


class TargetContinuation(NamedTuple):
    """Probability that counted n-grams give to the target token of each of n contexts."""

    order: int
    """Tokens of the longest n-grams."""
    probs: Tensor
    """Probability of each token, float32, shape (n,); NaN where nothing is counted."""
    suffixes: Tensor
    """See `Continuation`, int64, shape (n, 3)."""

    @classmethod
    def empty(cls, order: int, count: int) -> "TargetContinuation":
        """Return the probabilities of `count` contexts for a store without text: NaN."""
        suffixes = torch.zeros((count, 3), dtype=torch.int64)
        return cls(order, torch.full((count,), torch.nan), suffixes)

    @property
    def width(self) -> int:
        """Always 1."""
        return 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of the longest end of each context that was found, int64, shape (n,)."""
        return self.suffixes[:, 0]

    def rows(self, rows: Rows) -> "TargetContinuation":
        """Return the probabilities in some of the contexts."""
        return self._replace(probs=self.probs[rows], suffixes=self.suffixes[rows])

    def to(self, device: torch.device) -> "TargetContinuation":
        """Return the same on a device."""
        return self._replace(probs=self.probs.to(device), suffixes=self.suffixes.to(device))

    @classmethod
    def joined(cls, parts: Sequence["TargetContinuation"]) -> "TargetContinuation":
        """Concatenate the probabilities of several groups of contexts."""
        probs, suffixes = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("probs", "suffixes")
        )
        return cls(parts[0].order, probs, suffixes)

    def contribution(self, settings: NGramSettings, name: str) -> Contribution:
        """Weigh the probabilities by the λ of their lengths."""
        known = self.probs.isfinite()
        weights = torch.stack([self.probs, 1 - self.probs], 1).where(known[:, None], 0.0)
        hits = torch.tensor([[True, False]]).expand(len(weights), -1)
        return Contribution(weights, select_ngram_lambdas(settings, self.lengths), hits=hits, name=name)


class NGramFitting(NamedTuple):
    """Fits the weight of n-grams; see `Fitting`."""

    found: TargetContinuation
    """Probability and suffix of each target token by n-grams, n entries."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> NGramSettings:
        """Find the likeliest λ by length, each drawn towards the best for all lengths by `PRIOR_TOKENS`."""
        rows = wanted & self.found.probs.isfinite()
        if not rows.any():
            return NGramSettings(self.found.order, 0.0)
        below = log_probs[rows].exp().clamp(min=LEAST_PROBABILITY)[:, None]
        probs, lengths = self.found.probs[rows][:, None], self.found.lengths[rows]
        overall, _ = fit_lambdas(below, probs, torch.zeros_like(lengths), 1)
        lam, _ = fit_lambdas(below, probs, lengths, self.found.order, overall[0], PRIOR_TOKENS)
        return NGramSettings(self.found.order, float(lam[lengths].mean()), tuple(lam[:, 0].tolist()))

    def mix(self, log_probs: Tensor, fitted: NGramSettings) -> Tensor:
        """Mix them into log p of each token, shape (n,)."""
        return mix_gold(log_probs, self.found.probs.nan_to_num(), self.lambdas(fitted))

    def lambdas(self, fitted: NGramSettings) -> Tensor:
        """Return λ of each token, shape (n,), 0 where no n-gram was found."""
        return select_ngram_lambdas(fitted, self.found.lengths) * self.found.probs.isfinite()

    def lam(self, fitted: NGramSettings) -> float:
        """Return the mean λ."""
        return fitted.lam


class CountedNGrams:
    """Base of both components of n-grams: λ by length, and features of the context."""

    name: str
    factors = (1.0,)
    width = 3

    def contribute(
        self, settings: NGramSettings, found: Continuation | TargetContinuation, factor: float = 1.0
    ) -> Contribution:
        """Weigh the findings by the λ of the longest end of each context; n-grams have no temperature."""
        return found.contribution(settings, self.name)

    def features(self, found: Continuation | TargetContinuation, unit: float) -> Tensor:
        """Return length, log count and log successors of the longest end of each context."""
        length, *counts = found.suffixes.to(torch.float32).unbind(1)
        return torch.stack([length, *(count.log1p() for count in counts)], 1)


class NGrams(CountedNGrams):
    """N-grams of the selected documents, with interpolated Kneser-Ney smoothing, see `NGramCounts`."""

    name = "n-grams"

    def look_up(self, question: Question[NGramSettings], form: Form) -> Continuation | TargetContinuation:
        """Look up the tokens that followed the ends of the contexts; see `TextComponent`."""
        contexts, order = question.contexts, question.settings.order
        counts = question.reader.ngrams(question.selection)
        is_empty = not counts.unigrams.any()
        if form is not Form.DISTRIBUTION:
            found = TargetContinuation.empty(order, len(contexts))
            if not is_empty:
                matches, rows, at = _match_contexts(counts, contexts, order)
                found.probs[rows] = torch.from_numpy(matches.gold(at, order))
                found.suffixes[rows] = stack_suffixes(matches.suffixes(at, order))
            return found
        if is_empty:
            return Continuation.empty(len(contexts))
        matches, rows, at = _match_contexts(counts, contexts, order)
        seen = matches.distribution(at, order)
        weights, tokens = arrange_by_row(rows[seen.rows], seen.probs, seen.tokens, len(contexts))
        rest, suffixes = torch.zeros(len(contexts)), torch.zeros((len(contexts), 3), dtype=torch.int64)
        rest[rows] = torch.from_numpy(seen.rest)
        suffixes[rows] = stack_suffixes(seen.suffixes)
        unigrams = torch.from_numpy(counts.unigrams)
        if len(unigrams) < question.vocabulary:
            unigrams = pad(unigrams, (0, question.vocabulary - len(unigrams)))
        return Continuation(weights, tokens, suffixes, rest, unigrams)

    def cite(
        self, question: Question[NGramSettings], found: TargetContinuation, weights: Tensor, most: int
    ) -> Citations:
        """Name where the next token followed the end of its context in the stored text; see `Component`.

        Each length of n-grams gives at most `_MIN_CITED_PLACES` places, or `most` if that is more: those with
        the most tokens of the context before them. Documents are credited for all of these places.
        """
        contexts, order = question.contexts, question.settings.order
        matches, _, at = _match_contexts(question.reader.ngrams(question.selection), contexts, order)
        occurrences = matches.occurrences(at, order, max(most, _MIN_CITED_PLACES))
        return cite_occurrences(self.name, contexts, weights, occurrences)


def cite_occurrences(
    name: str,
    contexts: Contexts,
    weights: Tensor,
    occurrences: Sequence[Sequence[Occurrence]],
    *,
    is_same_text: bool = False,
) -> Citations:
    """Return the places of n-grams that end in the next token of each context.

    Args:
        name: name of the component.
        contexts: n positions.
        weights: see `Component.cite`, shape (n, places).
        occurrences: the occurrences for each position.
        is_same_text: True if they are positions in the same text; False if they are in the store.
    """
    targets = contexts.targets(np.arange(len(contexts)))
    every = list[list[Place]]()
    for token, share, found in zip(targets.tolist(), weights.sum(1).tolist(), occurrences, strict=True):
        positions = np.array([one.position for one in found], np.int64)
        ids = record_ids(positions, np.full(len(found), token)).tolist()
        every.append(
            [
                Place(token, share * one.share, name, matched=one.matched, position=one.position)
                if is_same_text
                else Place(token, share * one.share, name, id=id, matched=one.matched)
                for id, one in zip(ids, found, strict=True)
            ]
        )
    return Citations(every, every)


def _match_contexts(
    counts: NGramCounts, contexts: Contexts, order: int
) -> tuple[Matches, NDArray[np.int64], NDArray[np.int64]]:
    """Find the n-grams that end in the contexts.

    Returns:
        The matches; the indices of the contexts that are not padding, shape (m,); and their places in the
        matches.
    """
    cut = contexts.cut(order)
    matches = Matches.of(counts, cut.texts, cut.is_whole)
    return matches, cut.rows, matches.firsts[cut.owners] + cut.lengths - 1


def select_ngram_lambdas(ngrams: NGramSettings, lengths: Tensor) -> Tensor:
    """Return λ of n-grams for each length of the longest end that was found: float32, shape as `lengths`."""
    table = torch.tensor(ngrams.by_length or (ngrams.lam,), device=lengths.device)
    return table[lengths.clamp(max=len(table) - 1)]


def arrange_by_row(
    rows: NDArray[np.int64], probs: NDArray[np.float32], tokens: NDArray[np.int64], count: int
) -> tuple[Tensor, Tensor]:
    """Arrange entries, given by ascending row, as two matrices of `count` rows: probabilities and tokens."""
    if count == 1 and len(rows):
        return torch.from_numpy(probs)[None], torch.from_numpy(tokens)[None]
    per_row = np.bincount(rows, minlength=count)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    shape = count, max(1, int(per_row.max(initial=0)))
    weights, spread = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    weights[rows, column], spread[rows, column] = probs, tokens
    return torch.from_numpy(weights), torch.from_numpy(spread)


def stack_suffixes(suffixes: Suffixes) -> Tensor:
    """Convert suffixes to the tensor of `Continuation.suffixes`, int64, shape (n, 3)."""
    return torch.from_numpy(np.stack(suffixes, 1))
