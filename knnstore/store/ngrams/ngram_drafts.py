"""Drafts from stored text: the tokens that follow the words at the end of a text."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.suffix_array import DEPTH, END, Places, SortedText, Symbols

_MAX_SUFFIX = DEPTH - 1  # so that the order says what follows
_PLACES_COMPARED = 64
_PLACES_COUNTED = 512
_MAX_FURTHER_BACK = 64
"""Symbols."""


class Draft(NamedTuple):
    """The tokens that follow the end of a text at another place."""

    matched: int
    """Number of tokens before the place that equal the last tokens of the text; 0 if no place was found."""
    tokens: NDArray[np.int64]
    """Tokens that follow there, int64, at most the requested number; empty if no place was found."""
    shares: NDArray[np.float64]
    """Share of the places with the same preceding tokens that continue with each token, shape as `tokens`; 0
    for a single place, or if places were not counted."""


def draft_from(text: SortedText, tokens: NDArray[np.int64], most: int, least: int = 2) -> Draft:
    """Find the longest suffix of a text in stored documents, and return the tokens that follow there.

    Among several places, the one with the longest match is used. If no match is as long as the suffix array
    can show, the most frequent continuation is used; of hundreds of places only a sample is counted.

    Args:
        text: the stored documents.
        tokens: tokens of the text to continue, shape (n,); only the last ones are used.
        most: largest number of tokens to return.
        least: smallest number of matching tokens.

    Returns:
        The draft; without tokens if no suffix of `least` tokens is stored.
    """
    end = tokens[-_MAX_SUFFIX - _MAX_FURTHER_BACK :].astype(np.uint32) + np.uint32(1)
    length, longest, places = least - 1, min(_MAX_SUFFIX, len(end)), np.zeros(0, np.int64)
    while length < longest:  # where a longer end is, there are the shorter ones
        middle = (length + longest + 1) // 2
        found_places = _find_places_after(text, end[-middle:])
        if len(found_places):
            length, places = middle, found_places
        else:
            longest = middle - 1
    if not len(places):
        return Draft(0, tokens[:0], np.zeros(0))
    shares = np.zeros(most)
    if length == _MAX_SUFFIX and len(places) <= _PLACES_COMPARED:
        place, length = _extend_match(text, places - length, end, length)
    else:
        place, counted = _find_most_frequent(text, places[:: 1 + len(places) // _PLACES_COUNTED])
        shares[: len(counted)] = counted[:most]
    after = text.symbols[place : place + most]
    ended = np.flatnonzero(after == END)
    draft_tokens = after[: ended[0] if len(ended) else most].astype(np.int64) - 1
    return Draft(length, draft_tokens, shares[: len(draft_tokens)])


def _find_places_after(text: SortedText, wanted: Symbols) -> Places:
    """Return the places after all occurrences of symbols, sorted by the next symbols.

    Occurrences at the end of a document are left out.
    """
    symbols, length, wanted_list = text.symbols, len(wanted), wanted.tolist()

    def key(place: np.int32) -> list[int]:
        symbols_there: list[int] = symbols[place : place + length].tolist()
        return symbols_there

    low = bisect_left(text.order, wanted_list, key=key)
    if low == len(text.order) or key(text.order[low]) != wanted_list:
        return np.zeros(0, np.int64)
    high = bisect_right(text.order, wanted_list, low, key=key)
    places = text.order[low:high].astype(np.int64) + length
    return places[np.searchsorted(symbols[places], END, side="right") :]


def _extend_match(text: SortedText, begins: Places, end: Symbols, matched: int) -> tuple[int, int]:
    """Extend matches backwards, and return the place after the longest match and the match's length.

    Args:
        text: the stored documents.
        begins: places where matches of `matched` symbols begin; at least one.
        end: last symbols of the text to continue.
        matched: number of symbols that match already.
    """
    best, length = int(begins[0]) + matched, matched
    back = end[:-matched][-_MAX_FURTHER_BACK:][::-1]
    for begin in begins.tolist():
        before = text.symbols[max(0, begin - len(back)) : begin][::-1]
        differs = np.flatnonzero(before != back[: len(before)])
        further = int(differs[0]) if len(differs) else len(before)
        if matched + further > length:
            best, length = begin + matched, matched + further
    return best, length


def _find_most_frequent(text: SortedText, places: Places) -> tuple[int, list[float]]:
    """Return a place with the most frequent continuation, and the share of places for each next symbol.

    At each symbol, only the places with the most frequent symbol are kept.
    """
    shares = []
    for ahead in range(DEPTH):
        if len(places) == 1:
            break
        after = text.symbols.take(places + ahead, mode="clip")
        next_symbols, counts = np.unique(after, return_counts=True)
        most = counts.argmax()
        shares.append(counts[most] / len(places))
        places = places[after == next_symbols[most]]
        if next_symbols[most] == END:
            break
    return int(places[0]), shares
