"""Look-up of n-grams for texts: probabilities of the next tokens, and the places that they come from."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ngram_counts import NGramCounts
from knnstore.store.ngrams.ranked_bits import Places
from knnstore.store.ngrams.suffix_array import DEPTH, END, Symbols, lay_out_texts

_TOGETHER = 1 << 13
"""Places that are looked up at once: what stays in a CPU's cache."""
_FEW = 32
"""Symbols, that Python looks up sooner than numpy."""


class Suffixes(NamedTuple):
    """The longest end of each of q contexts that was found with a token after it."""

    lengths: NDArray[np.int64]
    """Symbols, the start of a document counted; 0 where none was found; shape (q,)."""
    counts: Places
    """Number of occurrences with a next token, shape (q,)."""
    successors: Places
    """Number of different next tokens, shape (q,)."""


class Distribution(NamedTuple):
    """Distributions of the next token in q contexts: seen tokens, and a rest over the whole vocabulary."""

    rows: Places
    """Index of the context of each entry, ascending, shape (e,)."""
    tokens: Places
    """Shape (e,); one may be there several times for a context, and its probabilities add up."""
    probs: NDArray[np.float32]
    """Shape (e,)."""
    rest: NDArray[np.float32]
    """The weight of `NGramCounts.unigrams` in each context, shape (q,)."""
    suffixes: Suffixes


class Occurrence(NamedTuple):
    """One place of the stored text where a token comes after the end of a context."""

    position: int
    """Position of the token in the store."""
    matched: int
    """Number of symbols of the context that precede the token there."""
    share: float
    """Its part of the probability of the token."""


class _Levels(NamedTuple):
    """The ends of q contexts, from the longest that counts to single symbols: l lengths."""

    lengths: Places
    """Symbols of each, shape (l,)."""
    there: NDArray[np.bool_]
    """True if a context has this length and its end was found with a next token, shape (q, l)."""
    ranges: Places
    """Range in the suffix array, start and stop, shape (2, q, l)."""
    successors: Places
    """Number of different next tokens, shape (q, l)."""
    total: Places
    """The counts of all that comes next, 1 where nothing does, shape (q, l)."""
    discounts: NDArray[np.float64]
    """Discount of each length, shape (l,)."""
    left: NDArray[np.float64]
    """The share of what shorter ends say, 1 where this one is not there, shape (q, l)."""

    @property
    def above(self) -> NDArray[np.float64]:
        """Weight of this length and of all shorter ends, shape (q, l)."""
        return np.concatenate([np.ones_like(self.left[:, :1]), self.left[:, :-1]], 1).cumprod(1)


class Matches:
    """The n-grams of some texts, where they are in the order of the stored text.

    A context is named by the place of its last symbol in `symbols`. `order` is always the length of the
    longest n-grams that count, 2 to `DEPTH`.
    """

    def __init__(self, counts: NGramCounts, symbols: Symbols, firsts: Places) -> None:
        self._counts = counts
        self._symbols = symbols
        self.firsts = firsts
        """The place of each text's first token."""
        self._ranges = np.zeros((2, DEPTH, len(symbols)), np.int64)  # by length - 1 and first symbol
        if len(symbols) <= _FEW:
            self._find_few()
            return
        for at in range(0, len(symbols), _TOGETHER):
            self._find(np.arange(at, min(at + _TOGETHER, len(symbols))))

    @classmethod
    def of(
        cls,
        counts: NGramCounts,
        texts: Sequence[NDArray[np.integer[Any]]],
        begins: Sequence[bool] | None = None,
    ) -> Self:
        """Find all n-grams of some texts.

        Args:
            counts: counts of the stored text.
            texts: token ids, shapes (n_i,).
            begins: True for texts that begin a document; default is all.
        """
        return cls(counts, *lay_out_texts(texts, counts.start, begins))

    def gold(self, at: Places, order: int) -> NDArray[np.float32]:
        """Return the probability of the target token of each context.

        Args:
            at: the contexts, shape (q,), each with a token after it.
            order: see the class.

        Returns:
            Shape (q,).
        """
        unigrams = self._counts.unigrams
        tokens = self._symbols[at + 1].astype(np.int64) - 1
        known = tokens < len(unigrams)
        probs = np.where(known, unigrams[np.where(known, tokens, 0)], 0).astype(np.float64)
        levels = self._levels(at, order)
        seen = self._seen(self._following(at, levels), levels.lengths + 1, order)
        for level in reversed(range(order - 1)):
            own = np.maximum(seen[:, level] - levels.discounts[level], 0) / levels.total[:, level]
            probs = np.where(levels.there[:, level], own + levels.left[:, level] * probs, probs)
        return probs.astype(np.float32)

    def distribution(self, at: Places, order: int) -> Distribution:
        """Return the distribution of the next token in each of the contexts, shape (q,)."""
        text, levels = self._counts.text, self._levels(at, order)
        starts, stops = levels.ranges.reshape(2, -1)
        stops = np.where(levels.there.ravel(), stops, starts)
        lengths = np.tile(levels.lengths, len(at))
        owners, places = self._counts.listed(lengths + 1, np.stack([starts, stops]))
        is_last = np.append(owners, -1)[1:] != owners
        ends = np.where(is_last, stops[owners], np.append(places, 0)[1:])
        lengths, (rows, level) = lengths[owners], np.divmod(owners, order - 1)
        seen = self._seen(np.stack([places, ends]), lengths + 1, order)
        probs = np.maximum(seen - levels.discounts[level], 0) / levels.total[rows, level]
        probs *= levels.above[rows, level]
        tokens = text.symbols[text.order[places] + lengths].astype(np.int64) - 1
        rest = levels.left.prod(1).astype(np.float32)
        return Distribution(rows, tokens, probs.astype(np.float32), rest, self._longest(levels))

    def suffixes(self, at: Places, order: int) -> Suffixes:
        """Return the longest found end of each context, shape (q,)."""
        return self._longest(self._levels(at, order))

    def occurrences(self, at: Places, order: int, most: int) -> list[list[Occurrence]]:
        """Return the places in the store of the target tokens of contexts, a limited number for each length.

        Shares add up to a token's probability but for the unigrams' part, unless there are more places.
        Those that have most of the context come first.
        """
        text = self._counts.text
        found: list[dict[int, tuple[int, float]]] = [{} for _ in at]
        levels = self._levels(at, order)
        ranges = self._following(at, levels)
        every_seen = self._seen(ranges, levels.lengths + 1, order)
        for number, length in enumerate(levels.lengths.tolist()):
            starts, stops = ranges[..., number]
            rows = np.flatnonzero(levels.there[:, number] & (stops > starts))
            counts, seen = (stops - starts)[rows], every_seen[rows, number]
            shares = np.maximum(seen - levels.discounts[number], 0.0) / levels.total[rows, number] / counts
            shares *= levels.above[rows, number]
            columns = (one.tolist() for one in (rows, starts[rows], counts, shares))
            for row, start, count, each in zip(*columns, strict=True):
                places = found[row]
                for place, (matched, share) in places.items():  # they have this shorter end as well
                    places[place] = matched, share + each
                listed = text.order[start : start + min(count, most + len(places))] + length
                for place in [place for place in listed.tolist() if place not in places][:most]:
                    places[place] = length, each
        return [self._occurrences(of) for of in found]

    def _occurrences(self, found: Mapping[int, tuple[int, float]]) -> list[Occurrence]:
        positions = self._counts.text.positions_of(np.array(list(found), np.int64)).tolist()
        return [Occurrence(at, *of) for at, of in zip(positions, found.values(), strict=True)]

    def _levels(self, at: Places, order: int) -> _Levels:
        counts, lengths = self._counts, np.arange(order - 1, 0, -1)
        begins = at[:, None] - lengths + 1
        ranges = self._ranges[:, lengths - 1, np.maximum(begins, 0)]
        successors = counts.different(lengths + 1, ranges)
        total = np.empty_like(successors)
        total[:, 0] = counts.followed(order - 1, ranges[..., 0])
        total[:, 1:] = counts.continued(lengths[1:] + 1, ranges[..., 1:])
        there = (begins >= 0) & (total > 0)
        total = np.where(there, total, 1)
        discounts = np.array([counts.discounts[length + 1].continued for length in lengths.tolist()])
        discounts[0] = counts.discounts[order].raw
        left = np.where(there, discounts * successors / total, 1.0)
        return _Levels(lengths, there, ranges, successors, total, discounts, left)

    def _longest(self, levels: _Levels) -> Suffixes:
        rows, longest = np.arange(len(levels.there)), levels.there.argmax(1)
        found = levels.there[rows, longest]
        lengths = levels.lengths[longest]
        counts = self._counts.followed(lengths, levels.ranges[:, rows, longest])
        successors = levels.successors[rows, longest]
        return Suffixes(*(np.where(found, of, 0) for of in (lengths, counts, successors)))

    def _following(self, at: Places, levels: _Levels) -> Places:
        """Return the suffix range, start and stop, of each end with its next symbol, shape (2, q, l)."""
        begins = np.maximum(at[:, None] - levels.lengths + 1, 0)
        return self._ranges[:, levels.lengths, begins]

    def _seen(self, ranges: Places, lengths: Places, order: int) -> Places:
        """Return the counts of n-grams of several lengths whose suffix ranges go from start to stop."""
        starts, stops = ranges
        continued = self._counts.continued(np.minimum(lengths, DEPTH - 1), ranges)
        return np.where(lengths == order, stops - starts, continued)

    def _find(self, at: Places) -> None:
        """Find what begins at some places, a symbol longer each time, as long as there is any."""
        low, high = self._counts.ranges(self._symbols[at])
        self._ranges[:, 0, at] = low, high
        for length in range(1, DEPTH):
            wanted = self._symbols.take(at + length, mode="clip")
            going = (low < high) & (wanted != END)
            at, low, high, wanted = at[going], low[going], high[going], wanted[going]
            if not len(at):
                return
            low, high = self._narrowed(length, low, high, wanted)
            self._ranges[:, length, at] = low, high

    def _narrowed(self, length: int, low: Places, high: Places, wanted: Symbols) -> tuple[Places, Places]:
        """Return the part of each nonempty suffix range in which a symbol follows after `length` symbols."""
        symbols, order = self._counts.text.symbols, self._counts.text.order
        least = np.concatenate([wanted, wanted + 1])  # the first that is as large begins the part, or ends it
        low, high = np.concatenate([low, low]), np.concatenate([high, high])
        found, going = high, np.arange(len(low))
        while True:
            middle = (low + high) >> 1
            less = symbols[order[middle] + length] < least
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
            is_open = low < high
            found[going] = low
            if not is_open.all():
                if not is_open.any():
                    break
                going, low, high, least = going[is_open], low[is_open], high[is_open], least[is_open]
        return found[: len(wanted)], found[len(wanted) :]

    def _find_few(self) -> None:
        """Do the same as `_find` for few contexts, faster, as for each token of a generated text."""
        asked = self._symbols.tolist()
        self._ranges[:, 0] = self._counts.ranges(self._symbols)
        for first, found in enumerate(self._ranges[:, 0].T.tolist()):
            low, high = found
            for length, wanted in enumerate(asked[first + 1 : first + DEPTH], 1):
                if low == high or wanted == END:
                    break
                low, high = self._narrowed_one(length, low, high, wanted)
                self._ranges[:, length, first] = low, high

    def _narrowed_one(self, length: int, low: int, high: int, wanted: int) -> tuple[int, int]:
        """Do the same as `_narrowed` for one range."""
        symbols, order = self._counts.text.symbols.data, self._counts.text.order.data

        def key(place: int) -> int:
            return symbols[place + length]

        start = bisect_left(order, wanted, low, high, key=key)
        return start, bisect_right(order, wanted, start, high, key=key)
