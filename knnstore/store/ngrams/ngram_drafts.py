"""Drafts from stored text: the tokens that follow the words at the end of a text."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.suffix_array import DEPTH, END, Places, SortedText, Symbols

_LONGEST_END = DEPTH - 1  # so that the order says what follows
_PLACES_COMPARED = 64
_PLACES_COUNTED = 512
_FURTHER_BACK = 64
"""Symbols."""


class Draft(NamedTuple):
    """The tokens that follow the end of a text at another place."""

    matched: int
    """Number of tokens before the place that equal the end of the text."""
    tokens: NDArray[np.int64]
    """The tokens that follow there, int64, at most the wanted number."""
    shares: NDArray[np.float64]
    """Share of the places with the same preceding tokens that continue with each token, shape as `tokens`; 0
    for a single place, or if places were not counted."""


def draft_from(text: SortedText, tokens: NDArray[np.int64], most: int, least: int = 2) -> Draft:
    """Find the longest end of a text in stored documents, and the tokens that follow there.

    Among several places, the one with the longest matching end is used. If no end is longer than the depth of
    the suffix array, the most frequent continuation is used; of hundreds of places only some are counted.

    Args:
        text: the stored documents.
        tokens: tokens of the other text, shape (n,); only the last ones are used.
        most: largest number of tokens to return.
        least: smallest number of matching tokens.
    """
    end = tokens[-_LONGEST_END - _FURTHER_BACK :].astype(np.uint32) + np.uint32(1)
    length, longest, places = least - 1, min(_LONGEST_END, len(end)), np.zeros(0, np.int64)
    while length < longest:  # where a longer end is, there are the shorter ones
        middle = (length + longest + 1) // 2
        found = _places_of(text, end[-middle:])
        if len(found):
            length, places = middle, found
        else:
            longest = middle - 1
    if not len(places):
        return Draft(0, tokens[:0], np.zeros(0))
    shares = np.zeros(most)
    if length == _LONGEST_END and len(places) <= _PLACES_COMPARED:
        place, length = _longest(text, places - length, end, length)
    else:
        place, counted = _most_often(text, places[:: 1 + len(places) // _PLACES_COUNTED])
        shares[: len(counted)] = counted[:most]
    after = text.symbols[place : place + most]
    ended = np.flatnonzero(after == END)
    drafted = after[: ended[0] if len(ended) else most].astype(np.int64) - 1
    return Draft(length, drafted, shares[: len(drafted)])


def _places_of(text: SortedText, wanted: Symbols) -> Places:
    """Return the places after occurrences of symbols, ordered by continuation; ends of texts are left out."""
    symbols, length, sought = text.symbols, len(wanted), wanted.tolist()

    def key(place: np.int32) -> list[int]:
        found: list[int] = symbols[place : place + length].tolist()
        return found

    low = bisect_left(text.order, sought, key=key)
    if low == len(text.order) or key(text.order[low]) != sought:
        return np.zeros(0, np.int64)
    high = bisect_right(text.order, sought, low, key=key)
    places = text.order[low:high].astype(np.int64) + length
    return places[np.searchsorted(symbols[places], END, side="right") :]


def _longest(text: SortedText, begins: Places, end: Symbols, matched: int) -> tuple[int, int]:
    """Return the place after the longest matching end of a text, and the length of the match."""
    best, length = int(begins[0]) + matched, matched
    back = end[:-matched][-_FURTHER_BACK:][::-1]
    for begin in begins.tolist():
        before = text.symbols[max(0, begin - len(back)) : begin][::-1]
        differs = np.flatnonzero(before != back[: len(before)])
        further = int(differs[0]) if len(differs) else len(before)
        if matched + further > length:
            best, length = begin + matched, matched + further
    return best, length


def _most_often(text: SortedText, places: Places) -> tuple[int, list[float]]:
    """Return a place with the most frequent continuation, and the share of places that agree."""
    shares = []
    for ahead in range(DEPTH):
        if len(places) == 1:
            break
        after = text.symbols.take(places + ahead, mode="clip")
        found, counts = np.unique(after, return_counts=True)
        most = counts.argmax()
        shares.append(counts[most] / len(places))
        places = places[after == found[most]]
        if found[most] == END:
            break
    return int(places[0]), shares
