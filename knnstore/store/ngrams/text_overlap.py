"""Find passages that texts and stored documents share, by comparing runs of tokens or runs of letters.

A run is a series of symbols (tokens or letters) of a fixed length. Two documents that contain the same
passage share its runs, whatever stands before and after the passage. Tokens of the same passage differ where
spaces or line breaks differ, but its letters do not, so `Letters` converts tokens to letters without spaces.
`Runs` indexes every run of some texts by a polynomial hash modulo 2^64. All hashes of a text are differences
of one cumulative sum, so a document is compared about as fast as it is read, and nothing is stored.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Letters:
    """Converts token ids to letters without spaces, so that texts can be compared in spite of other spacing.

    Args:
        spellings: spelling of each token of the vocabulary, by token id, without spaces.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        self._letters = np.frombuffer("".join(spellings).encode("utf-32-le", "surrogatepass"), "<u4")
        self._ends = np.cumsum([0, *map(len, spellings)])

    def from_tokens(self, tokens: NDArray[np.unsignedinteger]) -> NDArray[np.uint32]:
        """Return the Unicode code points of a text's letters, uint32, shape (letters,).

        Args:
            tokens: token ids of the text, shape (n,). Ids beyond the vocabulary count as the last token.
        """
        known_tokens = np.minimum(tokens.astype(np.int64), len(self._ends) - 2)
        starts = self._ends[known_tokens]
        lengths = self._ends[known_tokens + 1] - starts
        letters_before = np.cumsum(lengths) - lengths
        indices = np.repeat(starts - letters_before, lengths) + np.arange(lengths.sum())
        letters: NDArray[np.uint32] = self._letters[indices]
        return letters


RUN_LETTERS = 128
"""Length of a run when letters are compared, about as many letters as 32 tokens of English text have."""
RUN = 32
"""Length of a run when tokens are compared.

Different articles of a newspaper often share runs of 16 tokens, and rarely runs of 32 tokens.
"""
KNOWN = 0.5
"""A text counts as stored if stored documents contain at least this share of its symbols, in whole runs.

Two documents count as the same text if at least this share of the shorter document is in the other document.
"""

_FILTER_SIZE = np.uint64(1 << 22)
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)

Symbols = NDArray[np.unsignedinteger]


class Overlap(NamedTuple):
    """The part of a text that stored documents contain word for word."""

    share: float
    """Share of the text's symbols (tokens or letters) that are in runs of stored documents, 0 to 1; only 0 or
    1 for a text shorter than a run."""
    documents: frozenset[str]
    """SHA-256 of each stored document that counts as the same text.

    A document counts if at least half (`KNOWN`) of the shorter one of text and document is shared. Documents
    that share less, for example only a usual heading, are left out. They are included if together they
    contain at least half of the text.
    """


class SharedTexts(NamedTuple):
    """Indices of the texts that share runs (series of symbols of a fixed length) with a document."""

    same: set[int]
    """Texts that count as the same text as the document: at least half (`KNOWN`) of the shorter one of text
    and document is shared."""
    others: set[int]
    """Other texts that share a run with the document."""


class Runs:
    """Index of some texts, to find which parts of these texts a document contains.

    Texts are compared by runs: series of `run` symbols (tokens or letters). A text that is shorter than a run
    is found only if a document contains all of it.

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
        """Compare a document with the indexed texts, and record the shared runs for `covered_shares`.

        A run is a series of a fixed number of symbols (tokens or letters).

        Args:
            text: symbols of the document, shape (n,).

        Returns:
            Two sets of indices of texts. A text is in `same` if at least half of the shorter of text and
            document is in shared runs. A text is in `others` if it shares a run with the document, but less
            than half. If text or document is shorter than a run, the text is in `same` if the longer contains
            the whole shorter one, else in no set.
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

    def covered_shares(self, *, elsewhere: bool = False) -> list[float]:
        """Return for each indexed text the share of its symbols that the compared documents contain, 0 to 1.

        Compared documents are those that were passed to `compare_document`.

        Args:
            elsewhere: True ignores documents that count as the same text as the indexed text.
        """
        shares = self._whole.astype(float) * (not elsewhere)
        numbers, covered = self._long.count_covered(
            np.flatnonzero(self._elsewhere if elsewhere else self._found)
        )
        shares[numbers] = covered / self._lengths[numbers]
        return [float(share) for share in shares]


class _RunIndex:
    """Hash index of the runs of some texts.

    A run is a series of `run` symbols. The runs are numbered from 0: first all runs of the first text, then
    all runs of the second text, and so on. This number is the *place* of a run.

    Args:
        texts: symbols of each text, shapes (n_i,).
        run: number of symbols of a run.
    """

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
        """Return the places of all indexed runs that another text contains too, int64, ascending.

        Args:
            text: symbols of the other text, shape (n,). If it is shorter than a run, the result is empty.
        """
        hashes = hash_runs(text, self._run) if self.size else np.zeros(0, np.uint64)
        hashes = hashes[self._maybe[hashes % _FILTER_SIZE]] if len(hashes) else hashes
        if not len(hashes):  # most documents share no run, and the search takes the longest
            return np.zeros(0, np.int64)
        indices = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        is_there = np.zeros(len(self._hashes), bool)
        is_there[indices[self._hashes[indices] == hashes]] = True
        return np.flatnonzero(is_there[self._which])

    def find_texts(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the text to which each place belongs, int64, in the shape of `places`."""
        return np.searchsorted(self._starts, places, side="right") - 1

    def count_covered(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count how many symbols of each text are in runs that begin at some places.

        Args:
            places: places of runs, ascending.

        Returns:
            The indices of the texts with such a run, ascending, and the number of covered symbols of each
            of these texts. A symbol in several runs counts once.
        """
        texts = self.find_texts(places)
        cover_lengths = np.full(len(places), self._run)
        np.minimum(cover_lengths[:-1], np.diff(places), out=cover_lengths[:-1], where=texts[1:] == texts[:-1])
        numbers, which = np.unique(texts, return_inverse=True)
        return numbers, np.bincount(which, cover_lengths, len(numbers)).astype(np.int64)

    def count_shared(self, text: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the indexed texts that share runs with another text.

        Args:
            text: symbols of the other text, shape (n,).

        Returns:
            The indices of the texts that share a run, ascending; and for each of them the number of its
            symbols that are in shared runs.
        """
        return self.count_covered(self.find_places(text))


def hash_runs(tokens: Symbols, run: int = RUN) -> NDArray[np.uint64]:
    """Compute a hash of each run of a text. A run is a series of `run` successive symbols.

    Args:
        tokens: symbols of the text, shape (n,).
        run: number of symbols of a run.

    Returns:
        Hash of the run that begins at each symbol, uint64, shape (n - run + 1,); empty if n < run.
    """
    count = len(tokens)
    if count < run:
        return np.zeros(0, np.uint64)
    powers, inverses = (array[:count] for array in _compute_powers(1 << count.bit_length()))
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    return (sums[run:] - sums[:-run]) * inverses[: count - run + 1]


@lru_cache(maxsize=1)
def _compute_powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers 0 to count - 1 of the hash's factor, and of the factor's inverse, modulo 2^64."""
    factors = np.full((2, count), [[_FACTOR], [_INVERSE]], np.uint64)
    factors[:, 0] = 1
    powers, inverses = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverses


def _convert_to_bytes(tokens: Symbols) -> bytes:
    """Convert symbols to bytes, four for each symbol, so that a short text can be a key of a dict."""
    return tokens.astype("<u4").tobytes()
