"""Drafts: tokens that may continue a text, because they follow the same words in stored documents."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.suffix_array import DEPTH, END, Places, SortedText, Symbols

_MAX_SUFFIX = DEPTH - 1  # so that the order says what follows
_PLACES_COUNTED = 512


class Draft(NamedTuple):
    """Tokens that may continue a text: they follow the text's last tokens at a place in a stored document."""

    matched: int
    """Number of tokens before the place that were found equal to the last tokens of the text, at most
    `DEPTH` - 1; 0 if no place was found."""
    tokens: NDArray[np.int64]
    """Tokens from the place on, int64, at most the requested number; empty if no place was found."""
    shares: NDArray[np.float64]
    """Share of stored places that continue with each token of `tokens`, 0 to 1, same shape.

    Only places with the text's last tokens and all earlier tokens of the draft count. The share is 0 from
    where only one place is left, and after the first `DEPTH` tokens.
    """


def draft_continuation(text: SortedText, tokens: NDArray[np.int64], most: int, least: int = 2) -> Draft:
    """Find the last tokens of a text in stored documents, and return the tokens that follow there.

    As many last tokens as possible are matched, at most `DEPTH` - 1. If they occur at several places, the
    most frequent continuation is returned; if there are many places, only a sample of them is counted.

    Args:
        text: the stored documents with their suffix array.
        tokens: token ids of the text to continue, shape (n,); only the last tokens are used.
        most: largest number of tokens to return.
        least: smallest number of tokens that must match.

    Returns:
        The draft; it has no tokens if the documents do not contain the last `least` tokens with a next token.
    """
    end = tokens[-_MAX_SUFFIX:].astype(np.uint32) + np.uint32(1)
    length, longest, places = least - 1, len(end), np.zeros(0, np.int64)
    while length < longest:  # bisection: a text that contains a longer end also contains the shorter ends
        middle = (length + longest + 1) // 2
        found_places = _find_places_after(text, end[-middle:])
        if len(found_places):
            length, places = middle, found_places
        else:
            longest = middle - 1
    if not len(places):
        return Draft(0, tokens[:0], np.zeros(0))
    shares = np.zeros(most)
    place, counted = _find_most_frequent_continuation(text, places[:: 1 + len(places) // _PLACES_COUNTED])
    shares[: len(counted)] = counted[:most]
    after = text.symbols[place : place + most]
    ended = np.flatnonzero(after == END)
    draft_tokens = after[: ended[0] if len(ended) else most].astype(np.int64) - 1
    return Draft(length, draft_tokens, shares[: len(draft_tokens)])


def _find_places_after(text: SortedText, wanted: Symbols) -> Places:
    """Find all occurrences of a series of symbols in stored documents, and return the places after them.

    Occurrences at the end of a document are left out.

    Args:
        text: the stored documents with their suffix array.
        wanted: the series of symbols (token ids plus 1), at most `DEPTH` - 1.

    Returns:
        For each occurrence, the index in `text.symbols` of the first symbol after it. The indices are sorted
        by the symbols that stand there and behind. Empty if there is no occurrence.
    """
    symbols, length, wanted_list = text.symbols, len(wanted), wanted.tolist()

    def key(place: np.int32) -> list[int]:
        """Return the symbols from a place of the stored documents on, as many as are searched.

        A symbol is a token or the start of a document.
        """
        symbols_there: list[int] = symbols[place : place + length].tolist()
        return symbols_there

    low = bisect_left(text.order, wanted_list, key=key)
    if low == len(text.order) or key(text.order[low]) != wanted_list:
        return np.zeros(0, np.int64)
    high = bisect_right(text.order, wanted_list, low, key=key)
    places = text.order[low:high].astype(np.int64) + length
    return places[np.searchsorted(symbols[places], END, side="right") :]


def _find_most_frequent_continuation(text: SortedText, places: Places) -> tuple[int, list[float]]:
    """Choose the place in stored documents whose continuation is most frequent among several places.

    The continuation of a place is the series of symbols from the place on. In each of at most `DEPTH` steps,
    the most frequent next symbol is chosen, and only the places with this symbol are kept. The steps end when
    one place is left, or when the documents end.

    Args:
        text: the stored documents with their suffix array.
        places: indices into `text.symbols`, at least one.

    Returns:
        The first place that is left; and for each step the share of the places that were kept, 0 to 1.
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
