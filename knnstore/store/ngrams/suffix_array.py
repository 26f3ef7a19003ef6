"""Text in the order of what follows: every position of some documents, sorted by its next symbols.

A document is laid out as a start, its tokens, `END`. Symbols are tokens plus 1, so that `END`, 0, sorts
before all of them: what goes beyond the end of a document is nothing, and documents never meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

DEPTH = 8
"""Symbols that positions are sorted by: the longest n-gram that can be counted."""

END = 0
"""The symbol after a document's last token."""

MOST = 1 << 31
"""Symbols that can be sorted together."""

Symbols = NDArray[np.uint32]
Places = NDArray[np.int64]
_KEY_BITS = 64


def lay_out_texts(
    texts: Sequence[NDArray[np.integer[Any]]], start: int, begins: Sequence[bool] | None = None
) -> tuple[Symbols, Places]:
    """Lay texts out one after another.

    Args:
        texts: token ids, shapes (n_i,).
        start: the symbol that stands before a document's first token.
        begins: True for texts that begin a document; default is all. Others have no start symbol.

    Returns:
        The symbols, and for each text the place of its first token, shape (texts,).
    """
    heads = np.ones(len(texts), np.int64) if begins is None else np.array(begins, np.int64)
    lengths = np.array([len(text) for text in texts], np.int64)
    stops = np.cumsum(heads + lengths + 1)
    symbols = np.zeros(int(stops[-1]) if len(texts) else 0, np.uint32)
    firsts = stops - 1 - lengths
    for text, first in zip(texts, firsts.tolist(), strict=True):
        symbols[first : first + len(text)] = text
        symbols[first : first + len(text)] += 1
    symbols[firsts[heads > 0] - 1] = start
    return symbols, firsts


@dataclass(frozen=True, slots=True)
class SortedText:
    """Documents with the suffix array of their positions."""

    symbols: NDArray[np.uint16 | np.uint32]
    """Symbols of all documents, see `lay_out_texts`, shape (s,)."""

    firsts: Places
    """The place of each document's first token in them, ascending, shape (documents,)."""

    positions: Places
    """The position of each document's first token in the store, shape (documents,)."""

    order: NDArray[np.int32]
    """Every place but the ends, sorted by the `DEPTH` symbols from there on: shape (n,)."""

    @classmethod
    def of(cls, texts: Sequence[NDArray[np.integer[Any]]], positions: Places, start: int) -> Self:
        """Sort documents.

        Args:
            texts: token ids below `start` - 1, shapes (n_i,); with two more for each fewer than `MOST`.
            positions: positions of their first tokens, shape (texts,).
            start: the largest symbol.
        """
        symbols, firsts = lay_out_texts(texts, start)
        order = _sorted(symbols, firsts, start.bit_length())
        narrow = np.uint16 if start < np.iinfo(np.uint16).max - 1 else np.uint32
        return cls(symbols.astype(narrow, copy=False), firsts, positions, order)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(one.nbytes for one in (self.symbols, self.firsts, self.positions, self.order))

    def positions_of(self, places: Places) -> Places:
        """Return the store's positions of the tokens at the given places."""
        documents = np.searchsorted(self.firsts, places, side="right") - 1
        return self.positions[documents] + places - self.firsts[documents]

    def only(self, chosen: NDArray[np.bool_]) -> Self:
        """Return the sorted text of the documents in a mask, without sorting again."""
        if chosen.all():
            return self
        lengths = np.diff(self.firsts, append=len(self.symbols) + 1)
        kept = np.repeat(chosen, lengths)
        moved = np.repeat(np.cumsum(np.where(chosen, 0, lengths)), lengths).astype(np.int32)
        order = self.order[kept[self.order]]
        firsts = self.firsts[chosen] - moved[self.firsts[chosen]]
        return type(self)(self.symbols[kept], firsts, self.positions[chosen], order - moved[order])


def _sorted(symbols: Symbols, firsts: Places, bits: int) -> NDArray[np.int32]:
    """Sort by what fits into one key, then by pairs of ranks, each of which doubles the depth at most.

    What comes after an end orders only what is equal up to there.
    """
    depth = min(DEPTH, _KEY_BITS // bits)
    keys = np.zeros(len(symbols), np.uint64)
    for _ in range(depth):  # of a place its symbol, then the key of the next place
        keys[:-1] = keys[1:] >> np.uint64(bits)
        keys |= symbols.astype(np.uint64) << np.uint64(_KEY_BITS - bits)
    order = np.argsort(keys)
    while depth < DEPTH:
        ranks = np.empty(len(symbols), np.uint64)
        ordered = keys[order]
        ranks[order] = np.cumsum(ordered != np.roll(ordered, 1), dtype=np.uint64)
        further = min(depth, DEPTH - depth)
        keys = ranks << np.uint64(32)
        keys[:-further] |= ranks[further:]
        depth += further
        order = np.argsort(keys)
    return order[len(firsts) :].astype(np.int32)  # the ends come first
