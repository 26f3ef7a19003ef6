"""Stored documents as text to fit settings on, which find themselves no more than held-out ones do."""

import numpy as np

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import HeldOut
from knnstore.store import KNNStore, Selection

_LONGEST = 2048
"""Tokens that a document is cut to: the beginnings of many tell more than all of a few."""
_FOLDS = 16
"""Documents are left out by the fold, so that not every one needs its own counts of n-grams."""


def choose_stored(store: KNNStore, reader: TextReader, selection: Selection, tokens: int) -> HeldOut:
    """Choose beginnings of stored documents at random until there are so many tokens; the same each time.

    Each does not retrieve from its own document, nor from any that has half of its text, nor from those of
    the others in its fold.

    Returns:
        All of them; fewer tokens where there is less text.
    """
    chosen: dict[str, TextDocument] = {}
    there = zip(store.select(selection), store.lengths(selection).items(), strict=True)
    for document, (number, length) in sorted(there, key=lambda one: one[0].content_hash):
        if tokens <= 0:
            break
        text = reader.text(store.text(number)[:_LONGEST].tolist())
        if document.content_hash not in chosen and text.strip():
            chosen[document.content_hash] = TextDocument(str(number), text)
            tokens -= min(length, _LONGEST)
    documents, own = list(chosen.values()), list(chosen)
    known = HeldOut.of(store, reader, documents, selection).stored
    stored: dict[str, frozenset[str]] = {}
    for fold in np.array_split(np.arange(len(documents)), min(_FOLDS, len(documents)) or 1):
        members = [documents[at].content_hash for at in fold]
        left = frozenset(own[at] for at in fold).union(*(known.get(hash, ()) for hash in members))
        stored |= dict.fromkeys(members, left)
    return HeldOut(documents, stored)
