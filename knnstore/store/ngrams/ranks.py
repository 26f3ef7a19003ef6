"""Bits of which any prefix can be counted at once: one bit each, and half a bit for the counts."""

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_WORD = 64
_BELOW = (np.uint64(1) << np.arange(_WORD, dtype=np.uint64)) - np.uint64(1)
_ALL = ~np.uint64(0)


class RankedBits:
    """An immutable sequence of n bits.

    Args:
        bits: bool, shape (n,).
    """

    def __init__(self, bits: NDArray[np.bool_]) -> None:
        packed = np.packbits(bits, bitorder="little")
        self._words = np.zeros(len(bits) // _WORD + 1, "<u8")  # the place after the last bit has a word too
        self._words.view(np.uint8)[: len(packed)] = packed
        self._before = np.zeros(len(self._words), np.int32)
        np.cumsum(np.bitwise_count(self._words[:-1]), out=self._before[1:])

    def count(self, starts: Places, stops: Places) -> Places:
        """How many bits are set in each range; any shape."""
        return self.rank(stops) - self.rank(starts)

    def rank(self, places: Places) -> Places:
        """How many bits are set before each place, 0 to n; any shape."""
        words, bits = places // _WORD, places % _WORD
        within: Places = np.bitwise_count(self._words[words] & _BELOW[bits]).astype(np.int64)
        return within + self._before[words]

    def ones(self, starts: Places, stops: Places) -> tuple[Places, Places]:
        """Find the bits that are set in r ranges.

        Args:
            starts: shape (r,).
            stops: shape (r,), none before its start.

        Returns:
            Which range each is in, ascending, and its place, ascending within a range.
        """
        first, last = starts // _WORD, stops // _WORD
        counts = np.where(starts < stops, last - first + 1, 0)
        owner = np.repeat(np.arange(len(starts)), counts)
        word = np.arange(len(owner)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        found = self._words[word]
        found &= np.where(word == first[owner], ~_BELOW[starts[owner] % _WORD], _ALL)
        found &= np.where(word == last[owner], _BELOW[stops[owner] % _WORD], _ALL)
        held = np.flatnonzero(found)
        at, bit = np.nonzero(np.unpackbits(found[held].view(np.uint8), bitorder="little").reshape(-1, _WORD))
        return owner[held[at]], word[held[at]] * _WORD + bit
