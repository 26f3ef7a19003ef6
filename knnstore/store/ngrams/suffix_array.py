"""Suffix array of documents: every place of the text, sorted by the next `DEPTH` symbols.

A document is laid out as a start symbol, its tokens, and `END`. The symbol of a token is its id plus 1, so
that `END` = 0 sorts before all tokens. So no n-gram goes beyond the end of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

DEPTH = 8
"""Number of symbols that places are sorted by: the length of the longest n-gram that can be counted."""

END = 0
"""The symbol after a document's last token."""

MOST = 1 << 31
"""Upper limit of the number of symbols that can be sorted together."""

Symbols = NDArray[np.uint32]
Places = NDArray[np.int64]
_KEY_BITS = 64


def lay_out_texts(
    texts: Sequence[NDArray[np.integer[Any]]], start: int, begins: Sequence[bool] | None = None
) -> tuple[Symbols, Places]:
    """Join texts to one array of symbols: for each text its start symbol, its tokens plus 1, and `END`.

    Args:
        texts: token ids, shapes (n_i,).
        start: the symbol that stands before a document's first token.
        begins: True for each text that begins a document; default is all. Other texts get no start symbol.

    Returns:
        The symbols, uint32, and the index of each text's first token in the symbols, shape (texts,).
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
    """Index of each document's first token in `symbols`, ascending, shape (documents,)."""

    positions: Places
    """The position of each document's first token in the store, shape (documents,)."""

    order: NDArray[np.int32]
    """Suffix array: every index of `symbols` except those of `END`, sorted by the next `DEPTH` symbols,
    shape (n,)."""

    @classmethod
    def of(cls, texts: Sequence[NDArray[np.integer[Any]]], positions: Places, start: int) -> Self:
        """Sort documents by their n-grams.

        Args:
            texts: token ids of each document, below `start` - 1, shapes (n_i,). All tokens, plus two symbols
                for each document, must be fewer than `MOST`.
            positions: position in the store of each document's first token, shape (texts,).
            start: the symbol before a document's first token; the largest symbol.
        """
        symbols, firsts = lay_out_texts(texts, start)
        order = _sort_places(symbols, firsts, start.bit_length())
        narrow = np.uint16 if start < np.iinfo(np.uint16).max - 1 else np.uint32
        return cls(symbols.astype(narrow, copy=False), firsts, positions, order)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(one.nbytes for one in (self.symbols, self.firsts, self.positions, self.order))

    def positions_of(self, places: Places) -> Places:
        """Return the positions in the store of the tokens at `places`, which are indices of `symbols`."""
        documents = np.searchsorted(self.firsts, places, side="right") - 1
        return self.positions[documents] + places - self.firsts[documents]

    def keep_documents(self, mask: NDArray[np.bool_]) -> Self:
        """Return the sorted text of the documents in a mask, without sorting again."""
        if mask.all():
            return self
        lengths = np.diff(self.firsts, append=len(self.symbols) + 1)
        kept_symbols = np.repeat(mask, lengths)
        shifts = np.repeat(np.cumsum(np.where(mask, 0, lengths)), lengths).astype(np.int32)
        order = self.order[kept_symbols[self.order]]
        firsts = self.firsts[mask] - shifts[self.firsts[mask]]
        return type(self)(self.symbols[kept_symbols], firsts, self.positions[mask], order - shifts[order])


def _sort_places(symbols: Symbols, firsts: Places, bits: int) -> NDArray[np.int32]:
    """Return the suffix array of laid out symbols, without the places of `END`.

    Sorts first by the symbols that fit into one 64-bit key, then by pairs of ranks (prefix doubling). Symbols
    after an `END` only order places that are equal up to the `END`.

    Args:
        symbols: the symbols of all documents.
        firsts: index of each document's first token.
        bits: number of bits of the largest symbol.
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
