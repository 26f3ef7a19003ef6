"""What counts of n-grams say about some texts: probabilities, and the places that they are from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.counts import NGramCounts
from knnstore.store.ngrams.ranks import Places
from knnstore.store.ngrams.sorting import DEPTH, END, Symbols, laid_out

_TOGETHER = 1 << 13
"""Places that are looked up at once: what stays in a CPU's cache."""


class Suffixes(NamedTuple):
    """The longest end of each of q contexts that was found with a token after it."""

    lengths: NDArray[np.int64]
    """Symbols, the start of a document counted; 0 where none was found; shape (q,)."""
    counts: Places
    """How often it is there with a token after it, shape (q,)."""
    successors: Places
    """How many different tokens come after it, shape (q,)."""


class Distribution(NamedTuple):
    """What may come next in q contexts: what was seen, and over all the vocabulary what was not."""

    rows: Places
    """Of which context each entry is, ascending, shape (e,)."""
    tokens: Places
    """Shape (e,); one may be there several times for a context, and its probabilities add up."""
    probs: NDArray[np.float32]
    """Shape (e,)."""
    rest: NDArray[np.float32]
    """The weight of `NGramCounts.unigrams` in each context, shape (q,)."""


class Occurrence(NamedTuple):
    """One place of the stored text where a token comes after the end of a context."""

    position: int
    """Of the token, in the store."""
    matched: int
    """How many symbols of the context come before it there."""
    share: float
    """What it gives to the probability of the token."""


class _Level(NamedTuple):
    """The ends of one length of q contexts."""

    there: NDArray[np.bool_]
    """Whether a context is so long, and its end was found with a token after it, shape (q,)."""
    starts: Places
    """Where it is in the order, shape (q,)."""
    stops: Places
    total: Places
    """The counts of all that comes next, 1 where nothing does."""
    discount: float
    """What each of them is less by."""
    left: NDArray[np.float64]
    """The share of what shorter ends say, 1 where this one is not there."""


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
        self._starts, self._stops = np.zeros(
            (2, DEPTH, len(symbols)), np.int64
        )  # by length - 1 and first symbol
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
            counts: of the stored text.
            texts: token ids, shapes (n_i,).
            begins: which of them are the beginning of a document; default is all.
        """
        return cls(counts, *laid_out(texts, counts.start, begins))

    def gold(self, at: Places, order: int) -> NDArray[np.float32]:
        """The probability of the token that comes after each context in its text.

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
        for length in range(1, order):
            level = self._level(at, length, order)
            seen = self._count(length + 1, *self._at(at, length, length + 1), order)
            own = np.maximum(seen - level.discount, 0) / level.total
            probs = np.where(level.there, own + level.left * probs, probs)
        return probs.astype(np.float32)

    def distribution(self, at: Places, order: int) -> Distribution:
        """All that may come next in each of the contexts, shape (q,)."""
        text, rest, parts = self._counts.text, np.ones(len(at)), []
        for length in reversed(range(1, order)):
            level = self._level(at, length, order)
            if not level.there.any():
                continue
            stops = np.where(level.there, level.stops, level.starts)
            rows, places = self._counts.new[length + 1].ones(level.starts, stops)
            is_last = np.diff(rows, append=-1) != 0
            ends = np.where(is_last, stops[rows], np.roll(places, -1))
            seen = self._count(length + 1, places, ends, order)
            probs = rest[rows] * np.maximum(seen - level.discount, 0) / level.total[rows]
            parts.append((rows, text.symbols[text.order[places] + length].astype(np.int64) - 1, probs))
            rest = rest * level.left
        if not parts:
            parts.append((np.zeros(0, np.int64), np.zeros(0, np.int64), rest[:0]))
        rows, tokens, probs = (np.concatenate(column) for column in zip(*parts, strict=True))
        by_row = np.argsort(rows, kind="stable")
        probs = probs[by_row].astype(np.float32)
        return Distribution(rows[by_row], tokens[by_row], probs, rest.astype(np.float32))

    def suffixes(self, at: Places, order: int) -> Suffixes:
        """The longest end of each of the contexts, shape (q,), that was found."""
        lengths, counts, successors = np.zeros((3, len(at)), np.int64)
        for length in range(1, order):
            there, starts, stops, *_ = self._level(at, length, order)
            lengths[there] = length
            counts[there] = self._counts.followed(length, starts[there], stops[there])
            successors[there] = self._counts.new[length + 1].count(starts[there], stops[there])
        return Suffixes(lengths, counts, successors)

    def occurrences(self, at: Places, order: int, most: int) -> list[list[Occurrence]]:
        """Where the tokens that come after contexts were found, at most so many places for each length.

        Shares add up to a token's probability but for the unigrams' part, unless there are more places.
        Those that have most of the context come first.
        """
        text, rest = self._counts.text, np.ones(len(at))
        found: list[dict[int, tuple[int, float]]] = [{} for _ in at]
        for length in reversed(range(1, order)):
            level = self._level(at, length, order)
            starts, stops = self._at(at, length, length + 1)
            rows = np.flatnonzero(level.there & (stops > starts))
            counts = (stops - starts)[rows]
            seen = self._count(length + 1, starts[rows], stops[rows], order)
            shares = rest[rows] * np.maximum(seen - level.discount, 0.0) / level.total[rows] / counts
            columns = (one.tolist() for one in (rows, starts[rows], counts, shares))
            for row, start, count, each in zip(*columns, strict=True):
                places = found[row]
                for place, (matched, share) in places.items():  # they have this shorter end as well
                    places[place] = matched, share + each
                listed = text.order[start : start + min(count, most + len(places))] + length
                for place in [place for place in listed.tolist() if place not in places][:most]:
                    places[place] = length, each
            rest = rest * level.left
        return [self._occurrences(of) for of in found]

    def _occurrences(self, found: Mapping[int, tuple[int, float]]) -> list[Occurrence]:
        positions = self._counts.text.positions_of(np.array(list(found), np.int64)).tolist()
        return [Occurrence(at, *of) for at, of in zip(positions, found.values(), strict=True)]

    def _level(self, at: Places, length: int, order: int) -> _Level:
        counts = self._counts
        starts, stops = self._at(at, length, length)
        if length + 1 == order:
            total, discount = counts.followed(length, starts, stops), counts.discounts[length + 1].raw
        else:
            total, discount = (
                counts.continued[length + 1].count(starts, stops),
                counts.discounts[length + 1].continued,
            )
        there = (at >= length - 1) & (total > 0)
        total = np.where(there, total, 1)
        left = np.where(there, discount * counts.new[length + 1].count(starts, stops) / total, 1.0)
        return _Level(there, starts, stops, total, discount, left)

    def _at(self, at: Places, context: int, length: int) -> tuple[Places, Places]:
        """Where the n-grams of a length are that begin with the end of a length of each context."""
        begin = np.maximum(at - context + 1, 0)
        return self._starts[length - 1, begin], self._stops[length - 1, begin]

    def _count(self, length: int, starts: Places, stops: Places, order: int) -> Places:
        """The counts of n-grams of a length."""
        return stops - starts if length == order else self._counts.continued[length].count(starts, stops)

    def _find(self, at: Places) -> None:
        """Find what begins at some places, a symbol longer each time, as long as there is any."""
        low, high = self._counts.ranges(self._symbols[at])
        self._starts[0, at], self._stops[0, at] = low, high
        for length in range(1, DEPTH):
            wanted = self._symbols.take(at + length, mode="clip")
            going = (low < high) & (wanted != END)
            at, low, high, wanted = at[going], low[going], high[going], wanted[going]
            if not len(at):
                return
            low, high = self._narrowed(length, low, high, wanted)
            self._starts[length, at], self._stops[length, at] = low, high

    def _narrowed(self, length: int, low: Places, high: Places, wanted: Symbols) -> tuple[Places, Places]:
        """The part of each range of the order, none empty, in which a symbol comes after so many."""
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
