"""What follows the end of a text where the stored text has the same words: a draft of what comes next."""

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
    """What stands after the end of a text elsewhere."""

    matched: int
    """Tokens before it that are those of the text."""
    tokens: NDArray[np.int64]
    """That come next there, shape (at most as many as wanted,)."""
    shares: NDArray[np.float64]
    """Of the places where all before it is the same, how many go on with each token, of the shape of
    `tokens`; 0 where there is one place, or they were not counted."""


def draft_from(text: SortedText, tokens: NDArray[np.int64], most: int, least: int = 2) -> Draft:
    """Find the longest end of a text in stored documents, and what follows it there.

    Of several places that with the longest end, and where none is longer than the order knows, what follows
    most often; where they are hundreds, in some of them.

    Args:
        text: the documents.
        tokens: of the other text, shape (n,); the last `DEPTH` and some count.
        most: tokens that are wanted.
        least: a shorter end is none.
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
