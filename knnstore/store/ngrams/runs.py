"""Recognizing text by its symbols, tokens or letters: which runs of so many stand in other text too.

Another document around it, a part left out: the symbols between are the same. So are the letters where
spaces and ends of lines differ, of which the tokens are others. Each run
has a polynomial hash modulo 2^64, and all of a text are differences of one running sum; so stored text is
looked through once, at the speed of reading it, and nothing is kept.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RUN_LETTERS = 128
"""What 32 tokens have in English."""
RUN = 32
"""Tokens. Other articles of one newspaper, chapters of one book have runs of 16 in common, few of 32."""

_PLACES = np.uint64(1 << 22)
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)


class Overlap(NamedTuple):
    """What of a text is stored."""

    share: float
    """Of its symbols, those in runs that are stored; of a text shorter than a run all or none, as one whole
    document is the same or not."""
    documents: frozenset[str]
    """Content hashes of the stored documents that have such runs."""


class Runs:
    """The runs of some texts, to be found in others.

    Args:
        texts: the symbols of each, integers of shape (n,).
        run: how many symbols.
    """

    def __init__(self, texts: Sequence[NDArray[np.unsignedinteger]], run: int = RUN) -> None:
        self._run = run
        self._lengths = [len(tokens) for tokens in texts]
        hashes = [hashes_of(tokens, run) for tokens in texts]
        self._starts = np.cumsum([0, *map(len, hashes)])
        joined = np.concatenate([np.zeros(0, np.uint64), *hashes])
        self._hashes, self._which = np.unique(joined, return_inverse=True)
        self._found = np.zeros(len(self._hashes), bool)
        self._maybe = np.zeros(_PLACES, bool)
        self._maybe[self._hashes % _PLACES] = True
        self._short: defaultdict[bytes, set[int]] = defaultdict(set)
        for number, tokens in enumerate(texts):
            if 0 < len(tokens) < run:
                self._short[_bytes(tokens)].add(number)
        self._short_found: set[int] = set()

    def look_at(self, tokens: NDArray[np.unsignedinteger]) -> set[int]:
        """Look through a document: the numbers of the texts that have a run of it."""
        if len(tokens) < self._run:
            same = self._short.get(_bytes(tokens), set())
            self._short_found |= same
            return same
        if not len(self._hashes):
            return set()
        hashes = hashes_of(tokens, self._run)
        hashes = hashes[self._maybe[hashes % _PLACES]]  # most are of none, and searching takes the longest
        at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        there = at[self._hashes[at] == hashes]
        if not len(there):
            return set()
        self._found[there] = True
        places = np.flatnonzero(np.isin(self._which, there))
        return set((np.searchsorted(self._starts, places, side="right") - 1).tolist())

    def shares(self) -> list[float]:
        """Of the symbols of each text, those in runs of what was looked at."""
        shares = []
        for number, length in enumerate(self._lengths):
            found = self._found[self._which[self._starts[number] : self._starts[number + 1]]]
            if length < self._run:
                shares.append(float(number in self._short_found))
            else:
                covered = np.convolve(found, np.ones(self._run)) > 0
                shares.append(float(covered.mean()))
        return shares


def hashes_of(tokens: NDArray[np.unsignedinteger], run: int = RUN) -> NDArray[np.uint64]:
    """A hash of each run, uint64, shape (n - run + 1,), empty where there is none."""
    count = len(tokens)
    if count < run:
        return np.zeros(0, np.uint64)
    powers, inverses = (of[:count] for of in _powers(1 << count.bit_length()))
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    return (sums[run:] - sums[:-run]) * inverses[: count - run + 1]


@lru_cache(maxsize=1)
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """So many powers of the factor and of its inverse, from the zeroth."""
    factors = np.full((2, count), [[_FACTOR], [_INVERSE]], np.uint64)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverses


def _bytes(tokens: NDArray[np.unsignedinteger]) -> bytes:
    return tokens.astype("<u4").tobytes()
