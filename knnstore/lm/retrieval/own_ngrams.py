"""What came after the same words before in the text itself: counts of its own n-grams.

Absolute discounting. Of a context h, its end h' without the first token, and a token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

c counts what stands before in this text, n(h) how many different tokens came after h. The shortest context is
one token. What that leaves goes to no token: all are divided by what they have together, and where the last
token stands here for the first time nothing is said. Nothing is kept from pass to pass: each counts in the
tokens behind it, so the rows of a batch may be reordered, copied and dropped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.mixing import Continuation
from knnstore.lm.reading import Tokens
from knnstore.lm.retrieval.ngrams import in_columns
from knnstore.lm.retrieval.prefix_states import WrittenTexts
from knnstore.lm.settings import KNNSettings
from knnstore.store import Occurrence

_DISCOUNT = 0.6
"""D, of all lengths."""

_BITS = 21  # of a symbol

Places = NDArray[np.int64]
Texts = Sequence[NDArray[np.integer[Any]]]


class ReadOwnNGrams:
    """The own n-grams of whole texts.

    Args:
        texts: token ids, shapes (n_i,).
        order: tokens of the longest n-grams.
    """

    def __init__(self, texts: Texts, order: int) -> None:
        self._laid, self._order = _LaidOut.of(texts), order
        self._probs, self._suffixes = _gold(self._laid, order)

    @classmethod
    def of(cls, texts: Texts, settings: KNNSettings) -> Self | None:
        """Count in texts as the settings say; None where these do not count."""
        if settings.own_ngrams is None:
            return None
        return cls(texts, settings.own_ngrams.order)

    def gold(self, documents: Tokens, positions: Tokens) -> tuple[Tensor, Tensor]:
        """What is said of n tokens: see `ReadNGrams.gold`; nan where nothing is."""
        at = self._laid.firsts[documents] + positions - 1
        return torch.from_numpy(self._probs[at]), torch.from_numpy(self._suffixes[at])

    def occurrences(self, positions: Tokens, most: int) -> list[list[Occurrence]]:
        """Where the tokens at some positions of the first text came after the same words before.

        At most so many places of each, those that give most to it.
        """
        symbols, first = self._laid.symbols, int(self._laid.firsts[0])
        at = first + positions
        found = _before(self._laid, at - 1, self._order)
        same = np.flatnonzero(symbols[found.places] == symbols[at][found.rows])
        same = same[np.lexsort((-found.probs[same], found.rows[same]))]
        ends = np.searchsorted(found.rows[same], np.arange(1, len(at)))
        return [
            [
                Occurrence(int(found.places[one]) - first, int(found.matched[one]), float(found.probs[one]))
                for one in of[:most]
            ]
            for of in np.split(same, ends)
        ]


class WrittenOwnNGrams:
    """The own n-grams that positions of a forward pass are predicted from.

    Args:
        laid: the texts, as far as they were read.
        at: the context of each position by its last token among all, -1 for none, shape (n,).
        order: tokens of the longest n-grams.
    """

    def __init__(self, laid: "_LaidOut", at: Places, order: int) -> None:
        self._laid, self._at, self._order = laid, at, order

    @classmethod
    def of(cls, settings: KNNSettings, written: WrittenTexts, kept: Tensor) -> Self | None:
        """Look back in texts; None where the settings do not count their n-grams.

        Args:
            settings: in force.
            written: the texts.
            kept: indices into the positions of the pass, int64, shape (n,), in any order.
        """
        if settings.own_ngrams is None:
            return None
        laid = _LaidOut.of(written.tokens)
        return cls(laid, written.places(laid.firsts, kept), settings.own_ngrams.order)

    def rows(self, rows: slice, device: torch.device) -> Continuation:
        """What they say at some of the n positions."""
        at = self._at[rows]
        asked = np.flatnonzero(at >= 0)
        found = _before(self._laid, at[asked], self._order)
        came = self._laid.symbols[found.places] - 1
        weights, tokens = in_columns(asked[found.rows], found.probs, came, len(at))
        suffixes = torch.zeros((len(at), 3), dtype=torch.int64)
        suffixes[asked] = torch.from_numpy(found.suffixes)
        return Continuation(weights.to(device), tokens.to(device), suffixes=suffixes.to(device))


class _LaidOut(NamedTuple):
    """Texts one after another."""

    symbols: Places
    """Tokens plus 1, and a 0 before each text: no context goes beyond, since it is there only once."""
    firsts: Places
    """The place of each text's first token."""
    text: Places
    """Of each place, which text it is in."""

    @classmethod
    def of(cls, texts: Texts) -> "_LaidOut":
        lengths = np.array([len(text) + 1 for text in texts], np.int64)
        begun = [np.append(0, text.astype(np.int64) + 1) for text in texts]
        symbols = np.concatenate([np.zeros(0, np.int64), *begun])
        return cls(symbols, np.cumsum(lengths) - lengths + 1, np.repeat(np.arange(len(texts)), lengths))

    @property
    def keys(self) -> Places:
        """A number for each place, the same where the same symbol is in the same text."""
        return self.text << _BITS | self.symbols


class _Before(NamedTuple):
    """What came before after the ends of q contexts, place by place."""

    rows: Places
    """After which context, ascending, shape (e,)."""
    places: Places
    """Where it stands, shape (e,)."""
    matched: Places
    """How many tokens of the context stand before it there, shape (e,)."""
    probs: NDArray[np.float32]
    """What it has of the distribution, shape (e,): those of a context sum to 1."""
    suffixes: Places
    """Of each context, see `Continuation`, shape (q, 3)."""


def _before(laid: _LaidOut, at: Places, order: int) -> _Before:
    """Look back from contexts, given by the places of their last tokens."""
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
    return _Before(rows, ends + 1, matched, (probs / (1 - left)[rows]).astype(np.float32), suffixes)


def _gold(laid: _LaidOut, order: int) -> tuple[NDArray[np.float32], Places]:
    """For each place the probability of what comes next, nan where nothing is said; and its suffix."""
    contexts, following = laid.keys, np.roll(laid.symbols, -1)
    probs, left = np.zeros((2, len(contexts)))
    left += 1
    suffixes = np.zeros((len(contexts), 3), np.int64)
    for length in range(1, order):
        if length > 1:
            contexts = contexts << _BITS | np.roll(laid.symbols, length - 1)
        contexts = np.unique(contexts, return_inverse=True)[1]
        total, in_order = _earlier(contexts)
        seen, _ = _earlier(contexts << _BITS | following)
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


def _earlier(values: Places) -> tuple[Places, Places]:
    """How many equal values stand before each, and the order of all by value and place."""
    in_order = np.argsort(values, kind="stable")
    ordered, places = values[in_order], np.arange(len(values))
    begins = np.ones(len(values), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    earlier = np.empty(len(values), np.int64)
    earlier[in_order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return earlier, in_order
