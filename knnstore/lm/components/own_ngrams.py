"""The component `OwnNGrams`: it finds the last tokens earlier in the same text, and predicts what followed.

The probabilities use absolute discounting. For a context h, its suffix h' without the first token, and a
token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

c counts occurrences in the text before the position; n(h) is the number of different tokens that followed h.
The shortest context is one token. The probability that the shortest context would pass on is dropped: all
probabilities are divided by their sum. If the last token occurs for the first time, there is no prediction.

All texts are concatenated to one array of symbols (`_ConcatenatedTexts`). A place is an index of this array.
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
"""D, for contexts of all lengths."""

_BITS = 21  # bits of a symbol, when it is packed together with another number into 64 bits

Places = NDArray[np.int64]
Texts = Sequence[NDArray[np.integer[Any]]]


class OwnNGrams(CountedNGrams):
    """The component that predicts the next token by n-grams of the current text itself.

    Its settings are `CacheSettings.ngrams`.
    """

    name = "own n-grams"

    def look_up(self, question: Question[NGramSettings], form: Form) -> Continuation | TargetContinuation:
        """Predict the next token: find the last tokens earlier in the same text, and count what followed.

        Args:
            question: the positions and the order of the n-grams.
            form: the part of the result that is kept.

        Returns:
            A `Continuation` (several tokens for each position) if `form` is `Form.DISTRIBUTION`, else a
            `TargetContinuation` (the target token's probability only).
        """
        contexts, order = question.contexts, question.settings.order
        if form is not Form.DISTRIBUTION:
            return self.look_up_targets(contexts, order)
        texts, rows, at = _concatenate_contexts(contexts)
        seen = _find_continuations(texts, at, order)
        weights, tokens = arrange_by_row(
            rows[seen.rows], seen.probs, texts.symbols[seen.places] - 1, len(contexts)
        )
        suffixes = torch.zeros((len(contexts), 3), dtype=torch.int64)
        suffixes[rows] = torch.from_numpy(seen.suffixes)
        return Continuation(weights, tokens, suffixes)

    def look_up_targets(self, contexts: Contexts, order: int) -> TargetContinuation:
        """Return the probabilities that n-grams of each text give to the target tokens of n contexts.

        The probabilities of all positions of the texts are computed at the first call, and kept in
        `contexts.known`.

        Args:
            contexts: the positions; the texts contain the target tokens.
            order: number of tokens of the longest n-grams.
        """
        key = self.name, order
        if key not in contexts.known:  # once for all positions of the texts
            texts = _ConcatenatedTexts.concatenate(contexts.texts)
            contexts.known[key] = texts.firsts, *_compute_target_probs(texts, order)
        firsts, probs, suffixes = contexts.known[key]
        found, rows = TargetContinuation.empty(order, len(contexts)), np.flatnonzero(contexts.owners >= 0)
        at = firsts[contexts.owners[rows]] + contexts.lengths[rows] - 1
        found.probs[rows], found.suffixes[rows] = torch.from_numpy(probs[at]), torch.from_numpy(suffixes[at])
        return found

    def cite(
        self, question: Question[NGramSettings], found: TargetContinuation, weights: Tensor, most: int
    ) -> Citations:
        """List earlier occurrences of the target token in the same text, after the context's last token.

        Places where more of the preceding tokens match have larger probabilities.

        Args:
            question: the n positions, whose texts contain the target tokens.
            found: ignored.
            weights: weight of each column of the component's contribution, shape (n, columns).
            most: largest number of places of each token; the places with the largest probabilities are kept.
        """
        contexts = question.contexts
        texts, _, at = _concatenate_contexts(contexts)
        symbols, firsts = texts.symbols, texts.firsts[texts.text[at]]
        seen = _find_continuations(texts, at, question.settings.order)
        same = np.flatnonzero(symbols[seen.places] == symbols[at + 1][seen.rows])
        same = same[np.lexsort((-seen.probs[same], seen.rows[same]))]
        ends = np.searchsorted(seen.rows[same], np.arange(1, len(at)))
        occurrences = [
            [
                Occurrence(int(seen.places[hit] - first), int(seen.matched[hit]), float(seen.probs[hit]))
                for hit in places[:most]
            ]
            for first, places in zip(firsts, np.split(same, ends), strict=True)
        ]
        return cite_occurrences(self.name, contexts, weights, occurrences, is_same_text=True)


def _concatenate_contexts(contexts: Contexts) -> tuple["_ConcatenatedTexts", Places, Places]:
    """Concatenate the texts of contexts to one array, up to the target token of each text's last position.

    Args:
        contexts: n positions in texts.

    Returns:
        Three values. First the concatenated texts. Then the indices of the m contexts that are not padding,
        int64, shape (m,). Last, for each of these contexts, the place (index in the concatenated array) of
        its last token, int64, shape (m,).
    """
    cut = contexts.cut_to_positions(_WHOLE_TEXT)
    texts = _ConcatenatedTexts.concatenate(cut.texts)
    return texts, cut.rows, texts.firsts[cut.owners] + cut.lengths - 1


_WHOLE_TEXT = 1 << 62
"""Argument of `Contexts.cut_to_positions` that keeps all tokens before a position."""


class _ConcatenatedTexts(NamedTuple):
    """Several texts in one array, with a separator before each text. A place is an index of this array."""

    symbols: Places
    """For each of the p places: the token id plus 1, or 0 for the separator before a text. Shape (p,)."""
    firsts: Places
    """The place of the first token of each text."""
    text: Places
    """Index of the text of each place, shape (p,)."""

    @classmethod
    def concatenate(cls, texts: Texts) -> "_ConcatenatedTexts":
        """Concatenate texts; no texts give empty arrays."""
        lengths = np.array([len(text) + 1 for text in texts], np.int64)
        begun = [np.append(0, text.astype(np.int64) + 1) for text in texts]
        symbols = np.concatenate([np.zeros(0, np.int64), *begun])
        return cls(symbols, np.cumsum(lengths) - lengths + 1, np.repeat(np.arange(len(texts)), lengths))

    @property
    def keys(self) -> Places:
        """A number for each place, shape (p,).

        Two places have equal numbers if they have the same symbol and are in the same text.
        """
        return self.text << _BITS | self.symbols


class _Continuations(NamedTuple):
    """e earlier places in texts that continue the same last token (or tokens) as a context.

    A place is an index of the concatenated texts.
    """

    rows: Places
    """For each place the index of its context (one of q contexts), ascending, shape (e,)."""
    places: Places
    """Index into `_ConcatenatedTexts.symbols`, shape (e,)."""
    matched: Places
    """Number of tokens before the place that equal the end of the context, shape (e,)."""
    probs: NDArray[np.float32]
    """Probability of the place, shape (e,); the probabilities of one context sum to 1."""
    suffixes: Places
    """The longest suffix (end) of each context that occurs earlier: its length in tokens, its count, and the
    number of different next tokens. Shape (q, 3)."""


def _find_continuations(texts: _ConcatenatedTexts, at: Places, order: int) -> _Continuations:
    """Find the earlier places of a text that continue the end of a context, with their probabilities.

    A context is the text up to a token. A place is an index of the concatenated texts. For each context,
    every place of the same text is found that follows an earlier occurrence of the context's last token. The
    probabilities use absolute discounting; the module's docstring has the formula.

    Args:
        texts: the concatenated texts.
        at: place of the last token of each of q contexts, int64, shape (q,).
        order: number of tokens of the longest n-grams; at most order - 1 tokens of a context are compared.
    """
    # 1) Find the earlier occurrences of each context's last token.
    symbols, none = texts.symbols, np.zeros(0, np.int64)
    begins = (texts.firsts[texts.text[at]] - 1).tolist()
    found = [
        np.flatnonzero(symbols[begin:end] == symbols[end]) + begin
        for begin, end in zip(begins, at.tolist(), strict=True)
    ]
    rows = np.repeat(np.arange(len(at)), [len(places) for places in found])
    ends = np.concatenate([*found, none])
    # 2) Count how many tokens match, up to each occurrence.
    matched, matching = np.ones(len(rows), np.int64), np.arange(len(rows))
    for back in range(1, order - 1):
        matching = matching[symbols[ends[matching] - back] == symbols[at[rows[matching]] - back]]
        matched[matching] += 1
    # 3) Compute the probabilities, from the longest n-grams to the shortest.
    probs, left, suffixes = np.zeros(len(rows)), np.ones(len(at)), np.zeros((len(at), 3), np.int64)
    following = rows << _BITS | symbols[ends + 1]
    for length in range(order - 1, 0, -1):
        longer = np.flatnonzero(matched >= length)
        if not len(longer):
            continue
        kinds, which, seen = np.unique(following[longer], return_inverse=True, return_counts=True)
        total = np.bincount(rows[longer], minlength=len(at))
        distinct = np.bincount(kinds >> _BITS, minlength=len(at))
        occurs = total > 0
        row = rows[longer]
        probs[longer] += left[row] * ((seen - _DISCOUNT) / seen)[which] / total[row]
        left[occurs] *= _DISCOUNT * (distinct / np.maximum(total, 1))[occurs]
        is_longest = occurs & (suffixes[:, 0] == 0)
        suffixes[is_longest] = np.stack([np.full(len(at), length), total, distinct], 1)[is_longest]
    return _Continuations(rows, ends + 1, matched, (probs / (1 - left)[rows]).astype(np.float32), suffixes)


def _compute_target_probs(texts: _ConcatenatedTexts, order: int) -> tuple[NDArray[np.float32], Places]:
    """Compute, for every place, the probability of the next token by n-grams of the text up to the place.

    Args:
        texts: the concatenated texts, p places.
        order: number of tokens of the longest n-grams.

    Returns:
        Two arrays. First the probabilities, float32, shape (p,); NaN without a prediction. Then, for each
        place, the longest suffix that ends there and occurs earlier in the text: its length in tokens, its
        count, and the number of different next tokens; int64, shape (p, 3).
    """
    contexts, following = texts.keys, np.roll(texts.symbols, -1)
    probs, left = np.zeros((2, len(contexts)))
    left += 1
    suffixes = np.zeros((len(contexts), 3), np.int64)
    for length in range(1, order):
        if length > 1:
            contexts = contexts << _BITS | np.roll(texts.symbols, length - 1)
        contexts = np.unique(contexts, return_inverse=True)[1]
        total, in_order = _count_earlier_equals(contexts)
        seen, _ = _count_earlier_equals(contexts << _BITS | following)
        is_new = (seen == 0)[in_order]
        distinct = np.empty_like(seen)
        before = np.cumsum(is_new) - is_new
        distinct[in_order] = before - before[np.arange(len(before)) - total[in_order]]
        occurs = total > 0
        share = _DISCOUNT * distinct[occurs] / total[occurs]
        probs[occurs] = np.maximum(seen[occurs] - _DISCOUNT, 0) / total[occurs] + share * probs[occurs]
        left[occurs] *= share
        suffixes[occurs] = np.stack([np.full(len(total), length), total, distinct], 1)[occurs]
    is_predicted = suffixes[:, 0] > 0
    normalized = probs / np.where(is_predicted, 1 - left, 1)
    return np.where(is_predicted, normalized, np.nan).astype(np.float32), suffixes


def _count_earlier_equals(values: Places) -> tuple[Places, Places]:
    """Count, for each value of an array, the equal values before it; also sort the array.

    Args:
        values: numbers, shape (p,).

    Returns:
        The counts, and the indices that sort the values, both int64, shape (p,). The sort is stable: equal
        values stay in their order.
    """
    in_order = np.argsort(values, kind="stable")
    ordered, places = values[in_order], np.arange(len(values))
    begins = np.ones(len(values), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    earlier = np.empty(len(values), np.int64)
    earlier[in_order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return earlier, in_order
