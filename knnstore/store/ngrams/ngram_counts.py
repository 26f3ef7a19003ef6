"""Counts of all n-grams of documents, with the discounts of interpolated Kneser-Ney."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ranked_bits import Places, RankedBits
from knnstore.store.ngrams.suffix_array import DEPTH, END, SortedText, Symbols

Flags = NDArray[np.bool_]


class Discounts(NamedTuple):
    """Discounts of the n-grams of one length: n1 / (n1 + 2 n2).

    n1 is the number of n-grams with count 1, n2 of those with count 2.
    """

    continued: float
    """Discount of continuation counts, where an n-gram counts once for each different preceding symbol."""
    raw: float
    """Discount of plain counts, where an n-gram counts as often as it occurs."""


class NGramCounts:
    """Counts of the n-grams of documents, of every length up to `DEPTH`.

    An n-gram is given by its length and its range (start and stop) in the suffix array. The docstring of the
    package `knnstore.store.ngrams` explains the counts and the data structure.

    Args:
        text: the sorted documents.
        vocabulary: number of tokens of the vocabulary; all token ids of the text are smaller.
    """

    def __init__(self, text: SortedText, vocabulary: int) -> None:
        self.text = text
        self.start = vocabulary + 1
        """Symbol before a document's first token; see `lay_out_texts`."""
        self.discounts: dict[int, Discounts] = {}
        """Discounts of each length from 2 on."""
        singles, short = np.zeros(0, bool), list[Places]()
        new, continued = list[RankedBits](), list[RankedBits]()
        for length, flags in enumerate(_compute_flags(text, self.start), 1):
            short.append(np.flatnonzero(~flags.whole))
            if length == 1:
                singles = flags.continued
                continue
            runs = np.flatnonzero(flags.new)
            new.append(RankedBits(flags.new))
            continued.append(RankedBits(flags.continued))
            self.discounts[length] = Discounts(
                _compute_discount(flags.continued, runs), _compute_discount(flags.whole, runs)
            )
        self._new = RankedBits.join_rows(new)
        """For each length from 2 on: bits of the suffix array, set at the first suffix of each n-gram."""
        self._continued = RankedBits.join_rows(continued[:-1])
        """For each length from 2 to `DEPTH` - 1: bits of the suffix array, set at the first suffix of each
        n-gram with its preceding symbol."""
        last = [np.setdiff1d(after, before, assume_unique=True) for before, after in pairwise(short)]
        # Of one length after another, so that all are looked for at once.
        self._last = np.concatenate([len(text.order) * at + of for at, of in enumerate(last)])
        first = text.symbols[text.order]
        self._bounds = np.searchsorted(first, np.arange(self.start + 3, dtype=first.dtype)).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(singles)])
        counts = before[self._bounds[2 : self.start + 1]] - before[self._bounds[1 : self.start]]
        self.unigrams = (counts / max(1, counts.sum())).astype(np.float32)
        """Unigram distribution over the vocabulary, float32, shape (v,); all 0 if the documents have no
        token."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory, including the sorted documents."""
        arrays: list[NDArray[Any]] = [self._last, self._bounds, self.unigrams]
        bits = self._new.nbytes + self._continued.nbytes
        return self.text.nbytes + bits + sum(one.nbytes for one in arrays)

    def ranges(self, symbols: Symbols) -> tuple[Places, Places]:
        """Return start and stop of each symbol's range in the suffix array; empty for unknown symbols."""
        known_symbols = np.minimum(symbols, self.start + 1)  # what is no symbol of ours is nowhere
        return self._bounds[known_symbols], self._bounds[known_symbols + 1]

    def count_followed(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the number of occurrences of n-grams that are followed by a token in their document."""
        last_before = np.searchsorted(self._last, ranges + (lengths - 1) * len(self.text.order))
        counts: Places = np.subtract(*(ranges - last_before)[::-1])
        return counts

    def count_different(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the number of different n-grams of `lengths`, 2 or more, in ranges of the suffix array."""
        return self._new.count(ranges, lengths - 2)

    def continued(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the continuation counts (different preceding symbols) of n-grams shorter than `DEPTH`."""
        return self._continued.count(ranges, lengths - 2)

    def list_first_places(self, lengths: Places, ranges: Places) -> tuple[Places, Places]:
        """Return the place of the first occurrence of each different n-gram of `lengths` in ranges.

        Returns the index of the range and the place of each; see `RankedBits.find_ones`.
        """
        return self._new.find_ones(ranges, lengths - 2)


class _Flags(NamedTuple):
    """Flags for the n-grams of one length that begin at each place of the suffix array, bool, shape (n,)."""

    new: Flags
    """True at the first occurrence of an n-gram in the suffix array."""
    continued: Flags
    """True at the first occurrence of an n-gram together with the symbol before it."""
    whole: Flags
    """True if the n-gram does not go beyond the end of its document."""


def _compute_flags(text: SortedText, start: int) -> Iterator[_Flags]:
    """Yield the flags for each length from 1 to `DEPTH`. `start` is the symbol that begins documents."""
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


def _compute_discount(counted: Flags, runs: Places) -> float:
    """Return n1 / (n1 + 2 n2) for the counts of `counted` flags in runs of the suffix array; 0 if n1 is 0."""
    if not len(runs):
        return 0.0
    counts = np.add.reduceat(counted, runs, dtype=np.int64)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.0
