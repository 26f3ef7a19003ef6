"""Counts of all n-grams of some documents, and what interpolated Kneser-Ney needs of them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ranked_bits import Places, RankedBits
from knnstore.store.ngrams.suffix_array import DEPTH, END, SortedText, Symbols

Flags = NDArray[np.bool_]


class Discounts(NamedTuple):
    """D of the n-grams of one length: n1 / (n1 + 2 n2), of those that count once and twice."""

    continued: float
    """Discount of continuation counts, where an n-gram counts once for each different preceding symbol."""
    raw: float
    """Discount of plain counts, where an n-gram counts as often as it occurs."""


class NGramCounts:
    """Counts of the n-grams of some documents, of any length up to `DEPTH`. See the package's text.

    Args:
        text: the documents.
        vocabulary: number of tokens; all tokens of the text are below it.
    """

    def __init__(self, text: SortedText, vocabulary: int) -> None:
        self.text = text
        self.start = vocabulary + 1
        """The symbol before a document's first token, see `lay_out_texts`."""
        self.discounts: dict[int, Discounts] = {}
        """Discounts of each length from 2 on."""
        singles, short = np.zeros(0, bool), list[Places]()
        new, continued = list[RankedBits](), list[RankedBits]()
        for length, flags in enumerate(_flags(text, self.start), 1):
            short.append(np.flatnonzero(~flags.whole))
            if length == 1:
                singles = flags.continued
                continue
            runs = np.flatnonzero(flags.new)
            new.append(RankedBits(flags.new))
            continued.append(RankedBits(flags.continued))
            self.discounts[length] = Discounts(_discount(flags.continued, runs), _discount(flags.whole, runs))
        self._new = RankedBits.joined(new)
        """For each length from 2 on: bits of the suffix array, set at the first suffix of each n-gram."""
        self._continued = RankedBits.joined(continued[:-1])
        """For each length between these: set at the first suffix of each n-gram with its preceding symbol."""
        last = [np.setdiff1d(after, before, assume_unique=True) for before, after in pairwise(short)]
        # Of one length after another, so that all are looked for at once.
        self._last = np.concatenate([len(text.order) * at + of for at, of in enumerate(last)])
        first = text.symbols[text.order]
        self._bounds = np.searchsorted(first, np.arange(self.start + 3, dtype=first.dtype)).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(singles)])
        counts = before[self._bounds[2 : self.start + 1]] - before[self._bounds[1 : self.start]]
        self.unigrams = (counts / max(1, counts.sum())).astype(np.float32)
        """Distribution below all lengths, over the vocabulary, shape (v,); all 0 if no token is counted."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with the tokens."""
        arrays: list[NDArray[Any]] = [self._last, self._bounds, self.unigrams]
        bits = self._new.nbytes + self._continued.nbytes
        return self.text.nbytes + bits + sum(one.nbytes for one in arrays)

    def ranges(self, symbols: Symbols) -> tuple[Places, Places]:
        """Return the range of each symbol in the suffix array: start and stop."""
        known = np.minimum(symbols, self.start + 1)  # what is no symbol of ours is nowhere
        return self._bounds[known], self._bounds[known + 1]

    def followed(self, lengths: Places | int, ranges: Places) -> Places:
        """Return how many occurrences of n-grams, given by lengths and suffix ranges, have a next token."""
        before = np.searchsorted(self._last, ranges + (lengths - 1) * len(self.text.order))
        found: Places = np.subtract(*(ranges - before)[::-1])
        return found

    def different(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the number of different n-grams of given lengths, 2 or more, in suffix ranges."""
        return self._new.count(ranges, lengths - 2)

    def continued(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the continuation counts (different preceding symbols) of n-grams shorter than `DEPTH`."""
        return self._continued.count(ranges, lengths - 2)

    def listed(self, lengths: Places, ranges: Places) -> tuple[Places, Places]:
        """Where these come first; see `RankedBits.ones`."""
        return self._new.ones(ranges, lengths - 2)


class _Flags(NamedTuple):
    """Flags of the suffix array for the n-grams of one length that begin at each place."""

    new: Flags
    """The n-gram comes first here."""
    continued: Flags
    """It comes first here with the symbol before it."""
    whole: Flags
    """It does not go beyond the end of the document."""


def _flags(text: SortedText, start: int) -> Iterator[_Flags]:
    symbols, order = text.symbols, text.order
    begins = symbols[order] == start
    differs, whole = np.zeros(len(order), bool), np.ones(len(order), bool)
    differs[:1] = True
    nothing = np.zeros(len(order), bool)
    shorter: tuple[Flags, Flags] | None = None
    for length in range(1, DEPTH + 1):
        symbol = symbols.take(order + (length - 1), mode="clip")
        whole = whole & (symbol != END)
        differs[1:] |= symbol[1:] != symbol[:-1]
        new = differs & whole
        if shorter is not None:
            # An n-gram and the symbol before it are one symbol more, which begins a place before.
            by_place = np.zeros(len(symbols), bool)
            by_place[order] = new
            new_there, whole_there = shorter
            yield _Flags(new_there, np.where(begins, whole_there, by_place[order - 1]), whole_there)
        shorter = new, whole
    assert shorter is not None
    yield _Flags(shorter[0], nothing, shorter[1])


def _discount(counted: Flags, runs: Places) -> float:
    """n1 / (n1 + 2 n2) of the counts in runs of the order."""
    if not len(runs):
        return 0.0
    counts = np.add.reduceat(counted, runs, dtype=np.int64)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.0
