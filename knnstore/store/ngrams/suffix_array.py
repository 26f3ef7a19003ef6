"""Suffix array of documents: the indices of all symbols of a text, sorted by the symbols from there on.

Only the first `DEPTH` symbols from an index on decide its order.
The symbols of a document are a start symbol, its tokens, and `END`. The symbol of a token is its id plus 1.
`END` is 0, so it sorts before all tokens, and no n-gram goes beyond the end of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

DEPTH = 8
"""Number of symbols by which the suffix array is sorted: length of the longest n-gram that can be counted."""

END = 0
"""The symbol that stands after a document's last token."""

MOST = 1 << 31
"""Limit of the number of symbols that can be sorted together; the number must be below it."""

Symbols = NDArray[np.uint32]
Places = NDArray[np.int64]
_KEY_BITS = 64


def lay_out_texts(
    texts: Sequence[NDArray[np.integer[Any]]], start: int, begins: Sequence[bool] | None = None
) -> tuple[Symbols, Places]:
    """Join texts to one array of symbols: for each text a start symbol, its token ids plus 1, and `END`.

    Args:
        texts: token ids of each text, shapes (n_i,).
        start: the start symbol, which stands before a document's first token.
        begins: for each text, True if it begins a document; other texts get no start symbol. None means that
            all texts begin documents.

    Returns:
        The symbols of all texts, uint32, and the index of each text's first token in the symbols, shape
        (texts,).
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
    """The symbols (start symbol, tokens, `END`) of some documents, with their suffix array."""

    symbols: NDArray[np.uint16 | np.uint32]
    """Symbols of all documents, joined as `lay_out_texts` does, shape (s,)."""

    firsts: Places
    """Index of each document's first token in `symbols`, ascending, shape (documents,)."""

    positions: Places
    """The position of each document's first token in the store, shape (documents,)."""

    order: NDArray[np.int32]
    """The suffix array: all indices of `symbols` except the indices of `END`, sorted by the `DEPTH` symbols
    that begin at each index, shape (n,)."""

    @classmethod
    def from_texts(cls, texts: Sequence[NDArray[np.integer[Any]]], positions: Places, start: int) -> Self:
        """Join documents to one array of symbols, with a start and an end symbol around each, and sort it.

        Args:
            texts: token ids of each document, below start - 1, shapes (n_i,). All documents together, with
                their start and end symbols, must have fewer than `MOST` symbols.
            positions: position in the store of each document's first token, shape (texts,).
            start: integer that is put before each document's first token; it must be larger than all token
                ids plus one.
        """
        symbols, firsts = lay_out_texts(texts, start)
        order = _sort_places(symbols, firsts, start.bit_length())
        narrow = np.uint16 if start < np.iinfo(np.uint16).max - 1 else np.uint32
        return cls(symbols.astype(narrow, copy=False), firsts, positions, order)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the arrays take in memory."""
        return sum(one.nbytes for one in (self.symbols, self.firsts, self.positions, self.order))

    def store_positions(self, places: Places) -> Places:
        """Convert indices of tokens in `symbols` to positions of the tokens in the store.

        Args:
            places: indices into `symbols`, any shape.

        Returns:
            Positions, int64, in the shape of `places`.
        """
        documents = np.searchsorted(self.firsts, places, side="right") - 1
        return self.positions[documents] + places - self.firsts[documents]

    def keep_documents(self, mask: NDArray[np.bool_]) -> Self:
        """Return an object with only some of the documents. Nothing is sorted again.

        Args:
            mask: True for each document to keep, shape (documents,). If all are True, `self` is returned.
        """
        if mask.all():
            return self
        lengths = np.diff(self.firsts, append=len(self.symbols) + 1)
        kept_symbols = np.repeat(mask, lengths)
        shifts = np.repeat(np.cumsum(np.where(mask, 0, lengths)), lengths).astype(np.int32)
        order = self.order[kept_symbols[self.order]]
        firsts = self.firsts[mask] - shifts[self.firsts[mask]]
        return type(self)(self.symbols[kept_symbols], firsts, self.positions[mask], order - shifts[order])


def _sort_places(symbols: Symbols, firsts: Places, bits: int) -> NDArray[np.int32]:
    """Build the suffix array of documents: sort all indices of the joined symbols, except those of `END`.

    Indices are sorted first by as many symbols as fit into a 64-bit number, then by pairs of ranks (prefix
    doubling). If two indices have equal symbols up to an `END`, the symbols after the `END` decide their
    order.

    Args:
        symbols: the symbols of all documents, as `lay_out_texts` returns them.
        firsts: index of each document's first token; only the number of documents is used.
        bits: number of bits of the largest symbol.

    Returns:
        The sorted indices, int32, shape (n,).
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
