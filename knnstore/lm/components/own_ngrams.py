"""N-grams of the text itself: the tokens that followed the same words earlier in the same text.

Absolute discounting. Of a context h, its end h' without the first token, and a token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

c counts in the text before this position; n(h) is the number of different tokens that came after h. The
shortest context is one token. The probability that it leaves is not given to any token: all probabilities are
divided by their sum. Where the last token occurs for the first time, nothing is found.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.components.component import Citations, Form, Question
from knnstore.lm.components.ngrams import (
    Continuation,
    CountedNGrams,
    NGramSettings,
    TargetContinuation,
    arrange_by_row,
    cite_occurrences,
)
from knnstore.lm.contexts import Contexts
from knnstore.store import Occurrence

_DISCOUNT = 0.6
"""D, of all lengths."""

_BITS = 21  # of a symbol

Places = NDArray[np.int64]
Texts = Sequence[NDArray[np.integer[Any]]]


class OwnNGrams(CountedNGrams):
    """N-grams of each text itself; they are used together with the recent-text cache."""

    name = "own n-grams"

    def look_up(self, question: Question[NGramSettings], form: Form) -> Continuation | TargetContinuation:
        """Look up which tokens followed the ends of the contexts before, in the same text."""
        contexts, order = question.contexts, question.settings.order
        if form is not Form.DISTRIBUTION:
            return self.target(contexts, order)
        laid, rows, at = _concatenate_contexts(contexts)
        seen = _find_continuations(laid, at, order)
        weights, tokens = arrange_by_row(
            rows[seen.rows], seen.probs, laid.symbols[seen.places] - 1, len(contexts)
        )
        suffixes = torch.zeros((len(contexts), 3), dtype=torch.int64)
        suffixes[rows] = torch.from_numpy(seen.suffixes)
        return Continuation(weights, tokens, suffixes)

    def target(self, contexts: Contexts, order: int) -> TargetContinuation:
        """Return the probability that n-grams up to a length give to the next token of each context."""
        key = self.name, order
        if key not in contexts.known:  # once for all positions of the texts
            laid = _ConcatenatedTexts.concatenate(contexts.texts)
            contexts.known[key] = laid.firsts, *_compute_target_probs(laid, order)
        firsts, probs, suffixes = contexts.known[key]
        found, rows = TargetContinuation.empty(order, len(contexts)), np.flatnonzero(contexts.owners >= 0)
        at = firsts[contexts.owners[rows]] + contexts.lengths[rows] - 1
        found.probs[rows], found.suffixes[rows] = torch.from_numpy(probs[at]), torch.from_numpy(suffixes[at])
        return found

    def cite(
        self, question: Question[NGramSettings], found: TargetContinuation, weights: Tensor, most: int
    ) -> Citations:
        """Name where the next token followed the same words earlier in the text, the largest shares first."""
        contexts = question.contexts
        laid, _, at = _concatenate_contexts(contexts)
        symbols, firsts = laid.symbols, laid.firsts[laid.text[at]]
        seen = _find_continuations(laid, at, question.settings.order)
        same = np.flatnonzero(symbols[seen.places] == symbols[at + 1][seen.rows])
        same = same[np.lexsort((-seen.probs[same], seen.rows[same]))]
        ends = np.searchsorted(seen.rows[same], np.arange(1, len(at)))
        occurrences = [
            [
                Occurrence(int(seen.places[one] - first), int(seen.matched[one]), float(seen.probs[one]))
                for one in places[:most]
            ]
            for first, places in zip(firsts, np.split(same, ends), strict=True)
        ]
        return cite_occurrences(self.name, contexts, weights, occurrences, is_same_text=True)


def _concatenate_contexts(contexts: Contexts) -> tuple["_ConcatenatedTexts", Places, Places]:
    """Lay out the texts up to the contexts.

    Returns:
        The texts; the indices of the contexts that are not padding, shape (m,); and the places of their last
        tokens.
    """
    cut = contexts.cut(_WHOLE_TEXT)
    laid = _ConcatenatedTexts.concatenate(cut.texts)
    return laid, cut.rows, laid.firsts[cut.owners] + cut.lengths - 1


_WHOLE_TEXT = 1 << 62
"""Tokens before a position, if the whole text counts."""


class _ConcatenatedTexts(NamedTuple):
    """Texts one after another."""

    symbols: Places
    """Tokens plus 1, and a 0 before each text, which no context crosses: it occurs once in a text."""
    firsts: Places
    """The place of each text's first token."""
    text: Places
    """Index of the text of each place."""

    @classmethod
    def concatenate(cls, texts: Texts) -> "_ConcatenatedTexts":
        """Put texts one after another, each after a 0."""
        lengths = np.array([len(text) + 1 for text in texts], np.int64)
        begun = [np.append(0, text.astype(np.int64) + 1) for text in texts]
        symbols = np.concatenate([np.zeros(0, np.int64), *begun])
        return cls(symbols, np.cumsum(lengths) - lengths + 1, np.repeat(np.arange(len(texts)), lengths))

    @property
    def keys(self) -> Places:
        """Number of each place; equal numbers mean the same symbol in the same text."""
        return self.text << _BITS | self.symbols


class _Continuations(NamedTuple):
    """Earlier tokens that followed the ends of q contexts: e places in all."""

    rows: Places
    """Index of the context that each place follows, ascending, shape (e,)."""
    places: Places
    """Index of the place in the symbols, shape (e,)."""
    matched: Places
    """Number of tokens of the context that precede the place, shape (e,)."""
    probs: NDArray[np.float32]
    """Probability of the place, shape (e,); the places of a context sum to 1."""
    suffixes: Places
    """Suffix of each context, see `Continuation`, shape (q, 3)."""


def _find_continuations(laid: _ConcatenatedTexts, at: Places, order: int) -> _Continuations:
    """Find the earlier places in the same text that follow a context's last token, and their probabilities.

    Each place also has the number of the context's last tokens, at most order - 1, that precede it. The
    probabilities are those of absolute discounting, see the module.

    Args:
        laid: the texts.
        at: place of the last token of each of q contexts, int64, shape (q,).
        order: tokens of the longest n-grams.
    """
    symbols, none = laid.symbols, np.zeros(0, np.int64)
    begins = (laid.firsts[laid.text[at]] - 1).tolist()
    found = [
        np.flatnonzero(symbols[begin:end] == symbols[end]) + begin
        for begin, end in zip(begins, at.tolist(), strict=True)
    ]
    rows = np.repeat(np.arange(len(at)), [len(one) for one in found])
    ends = np.concatenate([*found, none])
    matched, going = np.ones(len(rows), np.int64), np.arange(len(rows))
    for back in range(1, order - 1):
        going = going[symbols[ends[going] - back] == symbols[at[rows[going]] - back]]
        matched[going] += 1
    probs, left, suffixes = np.zeros(len(rows)), np.ones(len(at)), np.zeros((len(at), 3), np.int64)
    following = rows << _BITS | symbols[ends + 1]
    for length in range(order - 1, 0, -1):
        longer = np.flatnonzero(matched >= length)
        if not len(longer):
            continue
        kinds, which, seen = np.unique(following[longer], return_inverse=True, return_counts=True)
        total = np.bincount(rows[longer], minlength=len(at))
        distinct = np.bincount(kinds >> _BITS, minlength=len(at))
        there = total > 0
        of = rows[longer]
        probs[longer] += left[of] * ((seen - _DISCOUNT) / seen)[which] / total[of]
        left[there] *= _DISCOUNT * (distinct / np.maximum(total, 1))[there]
        first = there & (suffixes[:, 0] == 0)
        suffixes[first] = np.stack([np.full(len(at), length), total, distinct], 1)[first]
    return _Continuations(rows, ends + 1, matched, (probs / (1 - left)[rows]).astype(np.float32), suffixes)


def _compute_target_probs(laid: _ConcatenatedTexts, order: int) -> tuple[NDArray[np.float32], Places]:
    """Return each place's probability of its next token, NaN where no n-gram is found; and its suffix."""
    contexts, following = laid.keys, np.roll(laid.symbols, -1)
    probs, left = np.zeros((2, len(contexts)))
    left += 1
    suffixes = np.zeros((len(contexts), 3), np.int64)
    for length in range(1, order):
        if length > 1:
            contexts = contexts << _BITS | np.roll(laid.symbols, length - 1)
        contexts = np.unique(contexts, return_inverse=True)[1]
        total, in_order = _count_earlier_equals(contexts)
        seen, _ = _count_earlier_equals(contexts << _BITS | following)
        is_new = (seen == 0)[in_order]
        distinct = np.empty_like(seen)
        before = np.cumsum(is_new) - is_new
        distinct[in_order] = before - before[np.arange(len(before)) - total[in_order]]
        there = total > 0
        share = _DISCOUNT * distinct[there] / total[there]
        probs[there] = np.maximum(seen[there] - _DISCOUNT, 0) / total[there] + share * probs[there]
        left[there] *= share
        suffixes[there] = np.stack([np.full(len(total), length), total, distinct], 1)[there]
    is_said = suffixes[:, 0] > 0
    return np.where(is_said, probs / np.where(is_said, 1 - left, 1), np.nan).astype(np.float32), suffixes


def _count_earlier_equals(values: Places) -> tuple[Places, Places]:
    """Return the number of equal values before each value, and the order of all by value and place."""
    in_order = np.argsort(values, kind="stable")
    ordered, places = values[in_order], np.arange(len(values))
    begins = np.ones(len(values), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    earlier = np.empty(len(values), np.int64)
    earlier[in_order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return earlier, in_order
