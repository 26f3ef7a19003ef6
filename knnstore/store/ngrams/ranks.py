"""Bits of which any prefix can be counted at once: one bit each, and a quarter for the counts."""

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_WORD = 64
_BLOCK = 4
"""Words, whose bits a byte can count."""
_BELOW = (np.uint64(1) << np.arange(_WORD, dtype=np.uint64)) - np.uint64(1)
_ALL = ~np.uint64(0)


class RankedBits:
    """An immutable sequence of n bits.

    Args:
        bits: bool, shape (n,).
    """

    def __init__(self, bits: NDArray[np.bool_]) -> None:
        packed = np.packbits(bits, bitorder="little")
        blocks = len(bits) // (_WORD * _BLOCK) + 1  # the place after the last bit has a word too
        self._words = np.zeros(blocks * _BLOCK, "<u8")
        self._words.view(np.uint8)[: len(packed)] = packed
        counts = np.bitwise_count(self._words).reshape(-1, _BLOCK)
        self._within = (counts.cumsum(1, dtype=np.uint8) - counts).ravel()  # modulo 256, and at most 192
        self._before = np.zeros(blocks, np.int32)
        np.cumsum(counts[:-1].sum(1, dtype=np.int32), out=self._before[1:])

    @property
    def nbytes(self) -> int:
        """What they take in memory."""
        return self._words.nbytes + self._within.nbytes + self._before.nbytes

    def count(self, starts: Places, stops: Places) -> Places:
        """How many bits are set in each range; any shape."""
        return self.rank(stops) - self.rank(starts)

    def rank(self, places: Places) -> Places:
        """How many bits are set before each place, 0 to n; any shape."""
        words, bits = places // _WORD, places % _WORD
        found: Places = np.bitwise_count(self._words[words] & _BELOW[bits]).astype(np.int64)
        found += self._within[words]
        found += self._before[words // _BLOCK]
        return found

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
