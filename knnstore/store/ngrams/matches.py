"""Look-up of the n-grams of texts: probabilities of the next tokens, and their places in the store."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ngram_counts import NGramCounts
from knnstore.store.ngrams.ranked_bits import Places
from knnstore.store.ngrams.suffix_array import DEPTH, END, Symbols, lay_out_texts

_PLACES_AT_ONCE = 1 << 13
"""Number of places that are looked up at once, so that the data fit into a CPU's cache."""
_MAX_FEW = 32
"""Largest number of symbols that plain Python looks up faster than numpy."""


class Suffixes(NamedTuple):
    """For each of q contexts: its longest suffix that occurs in the store with a token after it."""

    lengths: NDArray[np.int64]
    """Number of symbols of the suffix, the start symbol included; 0 if none was found; shape (q,)."""
    counts: Places
    """Number of occurrences of the suffix with a next token, shape (q,)."""
    successors: Places
    """Number of different tokens after the suffix, shape (q,)."""


class Distribution(NamedTuple):
    """Sparse distributions of the next token in q contexts, with e entries, plus a rest of unigrams."""

    rows: Places
    """Index of the context of each entry, ascending, shape (e,)."""
    tokens: Places
    """Token of each entry, shape (e,). A token may have several entries in a context; their probabilities add
    up."""
    probs: NDArray[np.float32]
    """Probability of each entry, shape (e,)."""
    rest: NDArray[np.float32]
    """Weight of the distribution `NGramCounts.unigrams` in each context, shape (q,)."""
    suffixes: Suffixes


class Occurrence(NamedTuple):
    """One place of the stored text where a token follows the last symbols of a context."""

    position: int
    """Position of the token in the store."""
    matched: int
    """Number of symbols of the context that precede the token there."""
    share: float
    """Part of the token's probability that comes from this place."""


class _ContextLevels(NamedTuple):
    """Suffixes of q contexts, of l lengths from the longest to a single symbol."""

    lengths: Places
    """Number of symbols of each length, descending, shape (l,)."""
    there: NDArray[np.bool_]
    """True if a context has a suffix of this length that occurs with a next token, shape (q, l)."""
    ranges: Places
    """Start and stop of each suffix's range in the suffix array, shape (2, q, l)."""
    successors: Places
    """Number of different next tokens, shape (q, l)."""
    total: Places
    """Sum of the counts of all next tokens; 1 if the suffix was not found; shape (q, l)."""
    discounts: NDArray[np.float64]
    """Discount of each length, shape (l,)."""
    left: NDArray[np.float64]
    """Weight of all shorter suffixes in the mixture; 1 if this suffix was not found; shape (q, l)."""

    @property
    def above(self) -> NDArray[np.float64]:
        """Total weight of each length together with all shorter suffixes, shape (q, l)."""
        return np.concatenate([np.ones_like(self.left[:, :1]), self.left[:, :-1]], 1).cumprod(1)


class Matches:
    """The ranges of all n-grams of some texts in the suffix array of the stored text.

    `of` makes it from texts. A context is given by the index of its last symbol in the joined symbols of the
    texts (`firsts` has the first tokens). The argument `order` of the methods is the length of the longest
    n-grams that are used, 2 to `DEPTH`.

    Args:
        counts: counts of the stored text.
        symbols: joined symbols of the texts, as `lay_out_texts` returns.
        firsts: index of each text's first token in the symbols.
    """

    def __init__(self, counts: NGramCounts, symbols: Symbols, firsts: Places) -> None:
        self._counts = counts
        self._symbols = symbols
        self.firsts = firsts
        """Index of each text's first token in the joined symbols, shape (texts,)."""
        self._ranges = np.zeros((2, DEPTH, len(symbols)), np.int64)  # by length - 1 and first symbol
        if len(symbols) <= _MAX_FEW:
            self._find_ranges_of_few()
            return
        for at in range(0, len(symbols), _PLACES_AT_ONCE):
            self._find_ranges(np.arange(at, min(at + _PLACES_AT_ONCE, len(symbols))))

    @classmethod
    def of(
        cls,
        counts: NGramCounts,
        texts: Sequence[NDArray[np.integer[Any]]],
        begins: Sequence[bool] | None = None,
    ) -> Self:
        """Look up all n-grams of some texts.

        Args:
            counts: counts of the stored text.
            texts: token ids, shapes (n_i,).
            begins: True for texts that begin a document; default is all.
        """
        return cls(counts, *lay_out_texts(texts, counts.start, begins))

    def gold(self, at: Places, order: int) -> NDArray[np.float32]:
        """Return the Kneser-Ney probability of the token after each context, float32, shape (q,).

        Args:
            at: the contexts, shape (q,), each with a token after it. A token outside the vocabulary has the
                unigram probability 0.
            order: length of the longest n-grams that are used.
        """
        unigrams = self._counts.unigrams
        tokens = self._symbols[at + 1].astype(np.int64) - 1
        is_known = tokens < len(unigrams)
        probs = np.where(is_known, unigrams[np.where(is_known, tokens, 0)], 0).astype(np.float64)
        levels = self._compute_levels(at, order)
        seen = self._count_ngrams(self._extend_ranges(at, levels), levels.lengths + 1, order)
        for level in reversed(range(order - 1)):
            own_share = np.maximum(seen[:, level] - levels.discounts[level], 0) / levels.total[:, level]
            probs = np.where(levels.there[:, level], own_share + levels.left[:, level] * probs, probs)
        return probs.astype(np.float32)

    def distribution(self, at: Places, order: int) -> Distribution:
        """Return the distribution of the next token after each of the contexts `at`, shape (q,)."""
        text, levels = self._counts.text, self._compute_levels(at, order)
        starts, stops = levels.ranges.reshape(2, -1)
        stops = np.where(levels.there.ravel(), stops, starts)
        lengths = np.tile(levels.lengths, len(at))
        owners, places = self._counts.list_first_places(lengths + 1, np.stack([starts, stops]))
        is_last = np.append(owners, -1)[1:] != owners
        ends = np.where(is_last, stops[owners], np.append(places, 0)[1:])
        lengths, (rows, level) = lengths[owners], np.divmod(owners, order - 1)
        seen = self._count_ngrams(np.stack([places, ends]), lengths + 1, order)
        probs = np.maximum(seen - levels.discounts[level], 0) / levels.total[rows, level]
        probs *= levels.above[rows, level]
        tokens = text.symbols[text.order[places] + lengths].astype(np.int64) - 1
        rest = levels.left.prod(1).astype(np.float32)
        return Distribution(rows, tokens, probs.astype(np.float32), rest, self._select_longest(levels))

    def suffixes(self, at: Places, order: int) -> Suffixes:
        """Return the longest suffix of each context that occurs in the store with a token after it."""
        return self._select_longest(self._compute_levels(at, order))

    def occurrences(self, at: Places, order: int, most: int) -> list[list[Occurrence]]:
        """Return places in the store where the token after a context follows the context's last symbols.

        Places with the longest match come first. If no places are left out, the shares of a context add up to
        the token's probability without the part of the unigrams.

        Args:
            at: the contexts, shape (q,), each with a token after it.
            order: length of the longest n-grams that are used.
            most: largest number of new places for each suffix length.

        Returns:
            A list of places for each context; empty if none was found.
        """
        text = self._counts.text
        places_by_context: list[dict[int, tuple[int, float]]] = [{} for _ in at]
        levels = self._compute_levels(at, order)
        ranges = self._extend_ranges(at, levels)
        every_seen = self._count_ngrams(ranges, levels.lengths + 1, order)
        for number, length in enumerate(levels.lengths.tolist()):
            starts, stops = ranges[..., number]
            rows = np.flatnonzero(levels.there[:, number] & (stops > starts))
            counts, seen = (stops - starts)[rows], every_seen[rows, number]
            shares = np.maximum(seen - levels.discounts[number], 0.0) / levels.total[rows, number] / counts
            shares *= levels.above[rows, number]
            columns = (one.tolist() for one in (rows, starts[rows], counts, shares))
            for row, start, count, each in zip(*columns, strict=True):
                places = places_by_context[row]
                for place, (matched, share) in places.items():  # they have this shorter end as well
                    places[place] = matched, share + each
                listed = text.order[start : start + min(count, most + len(places))] + length
                for place in [place for place in listed.tolist() if place not in places][:most]:
                    places[place] = length, each
        return [self._make_occurrences(of) for of in places_by_context]

    def _make_occurrences(self, found: Mapping[int, tuple[int, float]]) -> list[Occurrence]:
        """Convert matched length and share by place in the stored symbols to a list of occurrences."""
        positions = self._counts.text.positions_of(np.array(list(found), np.int64)).tolist()
        return [Occurrence(at, *of) for at, of in zip(positions, found.values(), strict=True)]

    def _compute_levels(self, at: Places, order: int) -> _ContextLevels:
        """Return counts and weights of all suffixes of the contexts, of `order` - 1 symbols down to one."""
        counts, lengths = self._counts, np.arange(order - 1, 0, -1)
        begins = at[:, None] - lengths + 1
        ranges = self._ranges[:, lengths - 1, np.maximum(begins, 0)]
        successors = counts.count_different(lengths + 1, ranges)
        total = np.empty_like(successors)
        total[:, 0] = counts.count_followed(order - 1, ranges[..., 0])
        total[:, 1:] = counts.continued(lengths[1:] + 1, ranges[..., 1:])
        is_found = (begins >= 0) & (total > 0)
        total = np.where(is_found, total, 1)
        discounts = np.array([counts.discounts[length + 1].continued for length in lengths.tolist()])
        discounts[0] = counts.discounts[order].raw
        left = np.where(is_found, discounts * successors / total, 1.0)
        return _ContextLevels(lengths, is_found, ranges, successors, total, discounts, left)

    def _select_longest(self, levels: _ContextLevels) -> Suffixes:
        """Return the longest found suffix of each context."""
        rows, longest = np.arange(len(levels.there)), levels.there.argmax(1)
        is_found = levels.there[rows, longest]
        lengths = levels.lengths[longest]
        counts = self._counts.count_followed(lengths, levels.ranges[:, rows, longest])
        successors = levels.successors[rows, longest]
        return Suffixes(*(np.where(is_found, of, 0) for of in (lengths, counts, successors)))

    def _extend_ranges(self, at: Places, levels: _ContextLevels) -> Places:
        """Return the range of each suffix together with its next symbol, shape (2, q, l)."""
        begins = np.maximum(at[:, None] - levels.lengths + 1, 0)
        return self._ranges[:, levels.lengths, begins]

    def _count_ngrams(self, ranges: Places, lengths: Places, order: int) -> Places:
        """Return the counts of n-grams: plain for the length `order`, else continuation counts.

        Args:
            ranges: start and stop of each n-gram in the suffix array.
            lengths: length of each n-gram.
            order: length of the longest n-grams that are used.
        """
        starts, stops = ranges
        continued = self._counts.continued(np.minimum(lengths, DEPTH - 1), ranges)
        return np.where(lengths == order, stops - starts, continued)

    def _find_ranges(self, at: Places) -> None:
        """Find the ranges of all n-grams that begin at places of the texts, and store them in `_ranges`.

        N-grams are extended by one symbol at a time, until none is found.
        """
        low, high = self._counts.ranges(self._symbols[at])
        self._ranges[:, 0, at] = low, high
        for length in range(1, DEPTH):
            wanted = self._symbols.take(at + length, mode="clip")
            going = (low < high) & (wanted != END)
            at, low, high, wanted = at[going], low[going], high[going], wanted[going]
            if not len(at):
                return
            low, high = self._narrow_ranges(length, low, high, wanted)
            self._ranges[:, length, at] = low, high

    def _narrow_ranges(
        self, length: int, low: Places, high: Places, wanted: Symbols
    ) -> tuple[Places, Places]:
        """Return the part of each nonempty range in which the symbol `wanted` follows after `length` symbols.

        Bisects all ranges at once. A part may be empty: start equals stop.
        """
        symbols, order = self._counts.text.symbols, self._counts.text.order
        smallest = np.concatenate(
            [wanted, wanted + 1]
        )  # the first that is as large begins the part, or ends it
        low, high = np.concatenate([low, low]), np.concatenate([high, high])
        bounds, open_rows = high, np.arange(len(low))
        while True:
            middle = (low + high) >> 1
            less = symbols[order[middle] + length] < smallest
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
            is_open = low < high
            bounds[open_rows] = low
            if not is_open.all():
                if not is_open.any():
                    break
                open_rows, low, high, smallest = (
                    open_rows[is_open],
                    low[is_open],
                    high[is_open],
                    smallest[is_open],
                )
        return bounds[: len(wanted)], bounds[len(wanted) :]

    def _find_ranges_of_few(self) -> None:
        """Do the same as `_find_ranges` for all places of a short text, faster, in plain Python."""
        symbols = self._symbols.tolist()
        self._ranges[:, 0] = self._counts.ranges(self._symbols)
        for first, first_range in enumerate(self._ranges[:, 0].T.tolist()):
            low, high = first_range
            for length, wanted in enumerate(symbols[first + 1 : first + DEPTH], 1):
                if low == high or wanted == END:
                    break
                low, high = self._narrow_range(length, low, high, wanted)
                self._ranges[:, length, first] = low, high

    def _narrow_range(self, length: int, low: int, high: int, wanted: int) -> tuple[int, int]:
        """Return the part of one range in which the symbol `wanted` follows after `length` symbols."""
        symbols, order = self._counts.text.symbols.data, self._counts.text.order.data

        def key(place: int) -> int:
            return symbols[place + length]

        start = bisect_left(order, wanted, low, high, key=key)
        return start, bisect_right(order, wanted, start, high, key=key)
