"""Bit vectors that tell in constant time how many bits are set before any index (the rank of the index).

The tables for this add a quarter to the size of the bits.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_WORD_BITS = 6
_WORD = 1 << _WORD_BITS
_IN_WORD = _WORD - 1
_BLOCK_BITS = 2
_BLOCK = 1 << _BLOCK_BITS
"""Number of words in a block. The bits of all but the last word of a block can be counted in one byte."""
_BELOW = (np.uint64(1) << np.arange(_WORD, dtype=np.uint64)) - np.uint64(1)
_ALL = ~np.uint64(0)


class RankedBits:
    """One or several immutable sequences of n bits, whose set bits are counted in constant time.

    `join_rows` makes an object with several sequences. The argument `row` of the methods chooses a sequence.

    Args:
        bits: bits of a single sequence, bool, shape (n,).
    """

    def __init__(self, bits: NDArray[np.bool_]) -> None:
        packed = np.packbits(bits, bitorder="little")
        blocks = len(bits) // (_WORD * _BLOCK) + 1  # the place after the last bit has a word too
        self._width = blocks * _BLOCK
        self._words = np.zeros(self._width, "<u8")
        self._words.view(np.uint8)[: len(packed)] = packed
        counts = np.bitwise_count(self._words).reshape(-1, _BLOCK)
        self._within = (counts.cumsum(1, dtype=np.uint8) - counts).ravel()  # modulo 256, and at most 192
        self._before = np.zeros(blocks, np.int32)
        np.cumsum(counts[:-1].sum(1, dtype=np.int32), out=self._before[1:])

    @classmethod
    def join_rows(cls, rows: Sequence[Self]) -> Self:
        """Return one object that contains the sequences of bits of several objects.

        Args:
            rows: one or more objects with one sequence of bits each. All sequences have the same length.
        """
        joined_rows = copy(rows[0])
        joined_rows._words, joined_rows._within, joined_rows._before = (
            np.concatenate(parts)
            for parts in zip(*((one._words, one._within, one._before) for one in rows), strict=True)
        )
        return joined_rows

    @property
    def nbytes(self) -> int:
        """Number of bytes that the object takes in memory."""
        return self._words.nbytes + self._within.nbytes + self._before.nbytes

    def count(self, ranges: Places, row: Places | int = 0) -> Places:
        """Count the set bits in ranges of indices.

        Args:
            ranges: start and stop of each range, shape (2, ...).
            row: index of each range's sequence, any shape that broadcasts with (...).

        Returns:
            The counts, int64, shape (...).
        """
        counts: Places = np.subtract(*self.rank(ranges, row)[::-1])
        return counts

    def rank(self, places: Places, row: Places | int = 0) -> Places:
        """Count the set bits before indices.

        Args:
            places: indices, 0 to n, any shape.
            row: index of the sequence for each of `places`, in a shape that broadcasts.

        Returns:
            The counts, int64, in the shape of `places`.
        """
        words = (places >> _WORD_BITS) + row * self._width
        ranks: Places = np.bitwise_count(self._words[words] & _BELOW[places & _IN_WORD]).astype(np.int64)
        ranks += self._within[words]
        ranks += self._before[words >> _BLOCK_BITS]
        return ranks

    def find_set_bits(self, ranges: Places, row: Places) -> tuple[Places, Places]:
        """Find all set bits in r ranges of indices.

        Args:
            ranges: start and stop of each range, shape (2, r); no stop is before its start.
            row: index of each range's sequence, shape (r,).

        Returns:
            For each set bit that was found: the number of its range, ascending, and the index of the bit,
            ascending within a range.
        """
        starts, stops = ranges
        first, last = ranges >> _WORD_BITS
        counts = np.where(starts < stops, last - first + 1, 0)
        owner = np.repeat(np.arange(len(starts)), counts)
        word = np.arange(len(owner)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        bits = self._words[word + (row * self._width)[owner]]
        bits &= np.where(word == first[owner], ~_BELOW[starts[owner] & _IN_WORD], _ALL)
        bits &= np.where(word == last[owner], _BELOW[stops[owner] & _IN_WORD], _ALL)
        nonzero_words = np.flatnonzero(bits)
        word_index, bit = np.nonzero(
            np.unpackbits(bits[nonzero_words].view(np.uint8), bitorder="little").reshape(-1, _WORD)
        )
        return owner[nonzero_words[word_index]], (word[nonzero_words[word_index]] << _WORD_BITS) + bit
