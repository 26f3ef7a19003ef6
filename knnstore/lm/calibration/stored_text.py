"""Stored documents as text to fit settings on, which find themselves no more than held-out ones do."""

import numpy as np

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import HeldOut
from knnstore.store import Reader, Selection

_LONGEST = 2048
"""Tokens that a document is cut to: the beginnings of many tell more than all of a few."""
_FOLDS = 16
"""Documents are left out by the fold, so that not every one needs its own counts of n-grams."""


def choose_stored(store: Reader, reader: TextReader, selection: Selection, tokens: int) -> HeldOut:
    """Choose beginnings of stored documents at random until there are so many tokens; the same each time.

    None is to retrieve from its own document, from another that has half of its text, or from those of its
    fold.

    Returns:
        These beginnings; fewer tokens where there is less text.
    """
    chosen: dict[str, TextDocument] = {}
    lengths = store.lengths(selection)
    for number in sorted(lengths, key=_scattered):
        if tokens <= 0:
            break
        text = reader.text(store.text(number)[:_LONGEST].tolist())
        if text.strip():
            document = TextDocument(str(number), text)
            chosen[document.content_hash] = document
            tokens -= min(lengths[number], _LONGEST)
    known = HeldOut.of(store, reader, chosen.values(), selection).stored  # by which it finds its own document
    hashes = [hash for hash in chosen if hash in known]
    stored: dict[str, frozenset[str]] = {}
    for fold in np.array_split(hashes, min(_FOLDS, len(hashes)) or 1):
        stored |= dict.fromkeys(fold.tolist(), frozenset().union(*(known[hash] for hash in fold)))
    return HeldOut([chosen[hash] for hash in hashes], stored)


def _scattered(number: int) -> int:
    """Where a document comes in an order that has nothing to do with that of adding (Knuth's hash)."""
    return number * 2_654_435_761 % 2**32
