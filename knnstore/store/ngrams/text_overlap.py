"""Find stored text in other text: compare runs of tokens, or runs of letters.

Two documents that contain the same passage share its symbols, whatever stands before and after it. Tokens of
the same passage differ where spaces or line breaks differ, but its letters do not, so `Letters` converts
tokens to letters without spaces. `Runs` indexes every run of `RUN` symbols by a polynomial hash modulo 2^64.
All hashes of a text are differences of one cumulative sum, so a document is compared about as fast as it is
read, and nothing is stored.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Letters:
    """Converts tokens to their letters without spaces.

    Args:
        spellings: spelling of each token of the vocabulary, without spaces.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        self._letters = np.frombuffer("".join(spellings).encode("utf-32-le", "surrogatepass"), "<u4")
        self._ends = np.cumsum([0, *map(len, spellings)])

    def of(self, tokens: NDArray[np.unsignedinteger]) -> NDArray[np.uint32]:
        """Return the code points of the letters of a text's tokens, uint32, shape (letters,).

        Token ids beyond the vocabulary count as the last token.
        """
        known_tokens = np.minimum(tokens.astype(np.int64), len(self._ends) - 2)
        starts = self._ends[known_tokens]
        lengths = self._ends[known_tokens + 1] - starts
        letters_before = np.cumsum(lengths) - lengths
        indices = np.repeat(starts - letters_before, lengths) + np.arange(lengths.sum())
        letters: NDArray[np.uint32] = self._letters[indices]
        return letters


RUN_LETTERS = 128
"""Number of letters of a run, about as many as 32 tokens of English text have."""
RUN = 32
"""Number of tokens of a run. Different articles of a newspaper often share runs of 16 tokens, and few of
32."""
KNOWN = 0.5
"""A text counts as stored if this share of its symbols is in stored runs. Two documents are the same text if
this share of the shorter one is in the other."""

_FILTER_SIZE = np.uint64(1 << 22)
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)

Symbols = NDArray[np.unsignedinteger]


class Overlap(NamedTuple):
    """The part of a text that is stored."""

    share: float
    """Share of the text's symbols that are in stored runs; 0 or 1 for a text shorter than a run."""
    documents: frozenset[str]
    """Content hashes of the stored documents that are the same text, see `KNOWN`. Documents that share only a
    usual heading are left out, unless the others together contain as much of the text: then all documents
    with a run of it are included."""


class SharedTexts(NamedTuple):
    """Indices of the indexed texts that share runs with a compared document."""

    same: set[int]
    """Texts that are the same text as the document, see `KNOWN`."""
    others: set[int]
    """Other texts that share a run with the document."""


class Runs:
    """Index of the runs of texts, to find these runs in other documents.

    A text shorter than a run is found only as a whole: by all its quarters of a run, or as the same text.

    Args:
        texts: symbols of each text, integers of shape (n,).
        run: number of symbols of a run.
    """

    def __init__(self, texts: Sequence[Symbols], run: int = RUN) -> None:
        self._run, self._least = run, run // 4
        self._lengths = np.array([len(one) for one in texts], np.int64)
        self._long = _RunIndex(texts, run)
        is_short = self._lengths < run
        self._parts_of_short, self._parts_of_long = (
            _RunIndex(
                [one if chosen else one[:0] for one, chosen in zip(texts, are, strict=True)], self._least
            )
            for are in (is_short, ~is_short)
        )
        self._shortest: defaultdict[bytes, set[int]] = defaultdict(set)
        for number in np.flatnonzero((self._lengths > 0) & (self._lengths < self._least)).tolist():
            self._shortest[_convert_to_bytes(texts[number])].add(number)
        self._whole = np.zeros(len(texts), bool)
        self._found, self._elsewhere = np.zeros((2, self._long.size), bool)

    def compare_document(self, text: Symbols) -> SharedTexts:
        """Compare a document with the indexed texts, and record the shared runs for `shares`.

        Returns the texts that share a run with the document.
        """
        numbers, shared = self._parts_of_short.count_shared(text)
        same = set(numbers[shared >= np.minimum(self._lengths[numbers], len(text))].tolist())
        if len(text) < self._least:
            same |= self._shortest.get(_convert_to_bytes(text), set())
        self._whole[[number for number in same if self._lengths[number] <= len(text)]] = True
        if len(text) < self._run:
            numbers, shared = self._parts_of_long.count_shared(text)
            return SharedTexts(same | set(numbers[shared >= len(text)].tolist()), set())
        places = self._long.find_places(text)
        numbers, shared = self._long.count_covered(places)
        is_same = shared >= KNOWN * np.minimum(self._lengths[numbers], len(text))
        self._found[places] = True
        self._elsewhere[places[np.isin(self._long.find_texts(places), numbers[~is_same])]] = True
        return SharedTexts(same | set(numbers[is_same].tolist()), set(numbers[~is_same].tolist()))

    def shares(self, *, elsewhere: bool = False) -> list[float]:
        """Return the share of each indexed text's symbols in runs of the documents compared so far, 0 to 1.

        With `elsewhere`, only runs of documents that are not the same text as the indexed one count.
        """
        shares = self._whole.astype(float) * (not elsewhere)
        numbers, covered = self._long.count_covered(
            np.flatnonzero(self._elsewhere if elsewhere else self._found)
        )
        shares[numbers] = covered / self._lengths[numbers]
        return [float(share) for share in shares]


class _RunIndex:
    """Hash index of the places where runs of texts begin. Places are numbered text after text."""

    def __init__(self, texts: Sequence[Symbols], run: int) -> None:
        hashes = [hash_runs(one, run) for one in texts]
        self._run = run
        self._starts = np.cumsum([0, *map(len, hashes)])
        self.size = int(self._starts[-1])
        joined = np.concatenate([np.zeros(0, np.uint64), *hashes])
        self._hashes, self._which = np.unique(joined, return_inverse=True)
        self._maybe = np.zeros(_FILTER_SIZE if self.size else 1, bool)
        self._maybe[self._hashes % _FILTER_SIZE] = True

    def find_places(self, text: Symbols) -> NDArray[np.int64]:
        """Return the places of indexed runs that a text contains, ascending, int64; may be empty."""
        hashes = hash_runs(text, self._run) if self.size else np.zeros(0, np.uint64)
        hashes = hashes[self._maybe[hashes % _FILTER_SIZE]] if len(hashes) else hashes
        if not len(hashes):  # most are of none, and searching takes the longest
            return np.zeros(0, np.int64)
        indices = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        is_there = np.zeros(len(self._hashes), bool)
        is_there[indices[self._hashes[indices] == hashes]] = True
        return np.flatnonzero(is_there[self._which])

    def find_texts(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the text that contains each place."""
        return np.searchsorted(self._starts, places, side="right") - 1

    def count_covered(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the texts that contain ascending places, and how many symbols runs from there cover."""
        texts = self.find_texts(places)
        cover_lengths = np.full(len(places), self._run)
        np.minimum(cover_lengths[:-1], np.diff(places), out=cover_lengths[:-1], where=texts[1:] == texts[:-1])
        numbers, which = np.unique(texts, return_inverse=True)
        return numbers, np.bincount(which, cover_lengths, len(numbers)).astype(np.int64)

    def count_shared(self, text: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indexed texts that share runs with a text, with their numbers of shared symbols."""
        return self.count_covered(self.find_places(text))


def hash_runs(tokens: Symbols, run: int = RUN) -> NDArray[np.uint64]:
    """Hash each run of symbols: uint64, shape (n - run + 1,); empty if the text is shorter than a run."""
    count = len(tokens)
    if count < run:
        return np.zeros(0, np.uint64)
    powers, inverses = (of[:count] for of in _compute_powers(1 << count.bit_length()))
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    return (sums[run:] - sums[:-run]) * inverses[: count - run + 1]


@lru_cache(maxsize=1)
def _compute_powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers 0 to `count` - 1 of the hash factor and of its inverse, modulo 2^64."""
    factors = np.full((2, count), [[_FACTOR], [_INVERSE]], np.uint64)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverses


def _convert_to_bytes(tokens: Symbols) -> bytes:
    """Return symbols as bytes, four for each, to be used as a dictionary key."""
    return tokens.astype("<u4").tobytes()
