"""Counts of all n-grams of documents, with the discounts of interpolated Kneser-Ney smoothing.

An n-gram is a series of symbols. A symbol is a token, or the start of a document. The docstring of the
package `knnstore.store.ngrams` explains the data structure.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ranked_bits import Places, RankedBits
from knnstore.store.ngrams.suffix_array import DEPTH, END, SortedText, Symbols

Flags = NDArray[np.bool_]
_BYTES_OF_STEP = 2300
"""Bytes that an entry of `NGramCounts.kept_steps` takes without its arrays (measured)."""


class Discounts(NamedTuple):
    """Kneser-Ney discounts for the n-grams of one length; a discount is subtracted from each count.

    A discount is n1 / (n1 + 2 n2), where n1 and n2 are the numbers of n-grams with count 1 and with count 2.
    """

    continued: float
    """Discount for continuation counts, where an n-gram counts once for each different preceding symbol."""
    raw: float
    """Discount for plain counts, where an n-gram counts as often as it occurs."""


class KeptStep(NamedTuple):
    """The n-grams' prediction after a text, kept by a step of generation for the next step of the text."""

    log_probs: tuple[float, ...]
    """Smoothed log-probabilities that n-grams gave to the last tokens of the text."""
    tokens: Places
    """Tokens that may follow the text, shape (e,); a token may occur several times."""
    probs: NDArray[np.float64]
    """Probability of each of `tokens`, shape (e,). Probabilities of the same token are added."""
    rest: float
    """Weight of the unigram distribution, which is added to the probabilities."""


class NGramCounts:
    """Counts of the n-grams (series of symbols) of documents, of every length up to `DEPTH`.

    A symbol is a token id plus 1, or the start of a document. The suffix array lists all places of the text,
    sorted by the symbols that follow. So all occurrences of an n-gram are a *range* of the suffix array:
    the indices from a start to below a stop. The methods receive n-grams as lengths and ranges. The docstring
    of the package `knnstore.store.ngrams` explains the counts and the data structure.

    Args:
        text: the documents with their suffix array.
        vocabulary: number of tokens of the vocabulary; all token ids of the text are smaller.
    """

    def __init__(self, text: SortedText, vocabulary: int) -> None:
        self.text = text
        self.start = vocabulary + 1
        """Symbol that stands before a document's first token."""
        self.discounts: dict[int, Discounts] = {}
        """Kneser-Ney discounts by the length of the n-grams, from 2 to `DEPTH`."""
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
        """For each length from 2 to `DEPTH`: one bit for each place of the suffix array, set at the first
        occurrence of each n-gram."""
        self._continued = RankedBits.join_rows(continued[:-1])
        """For each length from 2 to `DEPTH` - 1: one bit for each place of the suffix array, set at the first
        occurrence of each n-gram together with its preceding symbol."""
        last = [np.setdiff1d(after, before, assume_unique=True) for before, after in pairwise(short)]
        self._last = np.concatenate([len(text.order) * at + places for at, places in enumerate(last)])
        """For each length from 1 to `DEPTH` - 1: indices of the suffix array whose n-gram ends a document.
        The size of the suffix array times (length - 1) is added, so that one search finds all lengths."""
        first = text.symbols[text.order]
        self._bounds = np.searchsorted(first, np.arange(self.start + 3, dtype=first.dtype)).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(singles)])
        counts = before[self._bounds[2 : self.start + 1]] - before[self._bounds[1 : self.start]]
        self.unigrams = (counts / max(1, counts.sum())).astype(np.float32)
        """Probability of each token of the vocabulary without context, float32, shape (v,), the last part of
        the Kneser-Ney mixture; all 0 if the documents have no token."""
        self.is_empty = not counts.any()
        """True if the documents have no token."""
        self.ranges_of_ends: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """Cache of `Matches.look_up_ends`: the ranges of the last symbol, the last two symbols, ... of a
        text."""
        self.kept_steps: dict[tuple[Any, ...], KeptStep] = {}
        """Cache of the last steps of generation, by the order of the n-grams and the end of the text."""

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory, including the sorted documents and the kept steps."""
        arrays: list[NDArray[Any]] = [self._last, self._bounds, self.unigrams]
        bits = self._new.nbytes + self._continued.nbytes
        steps = list(self.kept_steps.values())  # a list, because threads may add steps
        kept = sum(_BYTES_OF_STEP + step.tokens.nbytes + step.probs.nbytes for step in steps)
        return self.text.nbytes + bits + sum(one.nbytes for one in arrays) + kept

    def find_symbol_ranges(self, symbols: Symbols) -> tuple[Places, Places]:
        """Return the range of the suffix array that contains all occurrences of each symbol.

        Args:
            symbols: token ids plus 1, or `start`, any shape.

        Returns:
            Start and stop of each range, int64, each in the shape of `symbols`; start equals stop for a
            symbol that does not occur.
        """
        known_symbols = np.minimum(symbols, self.start + 1)  # larger numbers are no symbols, and do not occur
        return self._bounds[known_symbols], self._bounds[known_symbols + 1]

    def count_followed(self, lengths: Places | int, ranges: Places) -> Places:
        """Count how often n-grams occur with a token after them, not at the end of a document.

        Args:
            lengths: number of symbols of each n-gram, shape (...) or one number for all n-grams.
            ranges: start and stop of each n-gram in the suffix array, shape (2, ...).

        Returns:
            The counts, int64, shape (...).
        """
        last_before = np.searchsorted(self._last, ranges + (lengths - 1) * len(self.text.order))
        counts: Places = np.subtract(*(ranges - last_before)[::-1])
        return counts

    def count_different(self, lengths: Places | int, ranges: Places) -> Places:
        """Count the different n-grams that occur in ranges of the suffix array.

        Args:
            lengths: number of symbols of the n-grams to count in each range, 2 to `DEPTH`, shape (...) or one
                number for all ranges.
            ranges: start and stop of each range, shape (2, ...).

        Returns:
            The counts, int64, shape (...).
        """
        return self._new.count(ranges, lengths - 2)

    def continuation_counts(self, lengths: Places | int, ranges: Places) -> Places:
        """Return the continuation counts of n-grams: the number of different symbols that precede them.

        An n-gram at the start of a document has no preceding symbol; there each occurrence counts.

        Args:
            lengths: number of symbols of each n-gram, 2 to `DEPTH` - 1, shape (...) or one number for all
                n-grams.
            ranges: start and stop of each n-gram in the suffix array, shape (2, ...). A wider range gives the
                sum over all n-grams of this length in it.

        Returns:
            The counts, int64, shape (...).
        """
        return self._continued.count(ranges, lengths - 2)

    def list_first_places(self, lengths: Places, ranges: Places) -> tuple[Places, Places]:
        """Find the different n-grams that occur in ranges of the suffix array.

        Args:
            lengths: number of symbols of the n-grams to find in each range, 2 to `DEPTH`, shape (r,).
            ranges: start and stop of each range, shape (2, r).

        Returns:
            For each n-gram that was found: the index of its range, and the index in the suffix array of the
            n-gram's first occurrence; both ascending.
        """
        return self._new.find_set_bits(ranges, lengths - 2)


class _Flags(NamedTuple):
    """Flags for n-grams of one length: for each index of the suffix array, facts about the n-gram there.

    The n-gram at an index consists of the symbols that begin at this index's place in the text. Each array is
    bool, shape (n,).
    """

    new: Flags
    """True if the index is the first index with this n-gram."""
    continued: Flags
    """True if the index adds 1 to the n-gram's continuation count: it is the first index with this n-gram and
    this preceding symbol, or the n-gram begins a document."""
    whole: Flags
    """True if the n-gram does not go beyond the end of its document."""


def _compute_flags(text: SortedText, start: int) -> Iterator[_Flags]:
    """Yield a `_Flags` for the n-grams of length 1, then of length 2, and so on up to `DEPTH`.

    For length `DEPTH`, `continued` is all False, because the longest n-grams need only plain counts.

    Args:
        text: the documents with their suffix array.
        start: the symbol that stands before a document's first token.
    """
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
            # An n-gram with its preceding symbol is an n-gram of the next length, one place earlier.
            by_place = np.zeros(len(symbols), bool)
            by_place[order] = new
            new_there, whole_there = shorter
            yield _Flags(new_there, np.where(begins, whole_there, by_place[order - 1]), whole_there)
        shorter = new, whole
    assert shorter is not None
    yield _Flags(shorter[0], nothing, shorter[1])


def _compute_discount(counted: Flags, runs: Places) -> float:
    """Return the Kneser-Ney discount n1 / (n1 + 2 n2) of the n-grams of one length.

    n1 and n2 are the numbers of n-grams with count 1 and with count 2. If n1 is 0, the discount is 0.

    Args:
        counted: for each index of the suffix array, True if it adds 1 to the count of the n-gram there.
        runs: first index of each different n-gram in the suffix array, ascending.
    """
    if not len(runs):
        return 0.0
    counts = np.add.reduceat(counted, runs, dtype=np.int64)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.0
