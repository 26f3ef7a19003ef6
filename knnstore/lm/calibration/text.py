"""Text to fit settings to: held-out documents, and stored ones that find themselves no more than these do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from knnstore.documents import TextDocument, documents_of
from knnstore.errors import InputError
from knnstore.lm.calibration.judging import check_enough
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import HeldOut
from knnstore.store import EVERYTHING, Reader, Selection

_LONGEST = 2048
"""Tokens that a document is cut to: the beginnings of many tell more than all of a few."""
_FOLDS = 16
"""Documents are left out by the fold, so that not every one needs its own counts of n-grams."""
_MOST_LEFT_OUT = 0.5
"""A document for which a larger share of all is to be left out tells nothing of the others."""


@dataclass(frozen=True)
class TextToFit:
    """What is fitted to."""

    documents: list[TextDocument]
    reached: Mapping[str, frozenset[str]]
    """What each leaves out of the search; see `HeldOut.stored`."""
    in_store: int
    """How many are anywhere in the store."""
    own: frozenset[str]
    """Content hashes of held-out documents."""
    stored: frozenset[str]
    """Those of stored ones."""

    @property
    def hashes(self) -> frozenset[str]:
        """All of them."""
        return self.own | self.stored

    def is_known_to(self, fitted_on: frozenset[str]) -> bool:
        """Whether settings that were fitted to these documents were to most of this text, and to no more."""
        known = fitted_on & self.hashes
        return 2 * len(known) > len(self.hashes) and not fitted_on > self.hashes

    def check_stored(self, store: Reader) -> None:
        """Refuse to save what would not go with a document that went while it was fitted to.

        Raises:
            InputError: a stored document was removed or replaced.
        """
        gone = len(self.stored) - len(store.stored_content(self.stored))
        if gone:
            raise InputError(
                f"nothing is saved: {gone:,} of the stored documents that it was fitted to were removed or "
                "replaced meanwhile; calibrate again"
            )


def text_to_fit(
    store: Reader,
    reader: TextReader,
    documents: Iterable[object],
    selection: Selection,
    tokens: int,
    *,
    leave_out: bool,
) -> TextToFit:
    """Read held-out documents, and choose stored ones of so many tokens; see `calibrate`, also for errors."""
    distinct = {document.content_hash: document for document in documents_of(documents)}
    held_out = HeldOut.of(store, reader, distinct.values(), selection)
    if not leave_out:
        held_out.refuse_stored()
    listed, reached = held_out
    stored = HeldOut.of(store, reader, listed, EVERYTHING).stored if selection.domains else reached
    if tokens:
        drawn = choose_stored(store, reader, selection, tokens)
        if not (drawn.documents or listed):
            raise InputError(
                "no stored document can be predicted by the others: there are too few, or most of them have "
                "most of their text in common; give held-out text"
            )
        listed = [*listed, *(one for one in drawn.documents if one.content_hash not in distinct)]
        reached, stored = {**drawn.stored, **reached}, {**drawn.stored, **stored}
    texts = reader.tokenized(listed)
    check_enough(np.repeat(np.arange(len(texts)), [len(one) for one in texts]))
    return TextToFit(listed, reached, len(stored), frozenset(distinct), frozenset().union(*stored.values()))


def choose_stored(store: Reader, reader: TextReader, selection: Selection, tokens: int) -> HeldOut:
    """Choose beginnings of stored documents until there are so many tokens; the same each time.

    None is to retrieve from its own document, from another that is the same text (see `HeldOut`), or from
    those of its fold.

    Returns:
        These beginnings; fewer tokens where there is less text.
    """
    chosen: dict[str, TextDocument] = {}
    numbers: dict[str, int] = {}
    lengths = store.lengths(selection)
    for number in sorted(lengths, key=_scattered):
        if tokens <= 0:
            break
        text = reader.text(store.text(number)[:_LONGEST].tolist())
        document = TextDocument(str(number), text)
        if text.strip() and document.content_hash not in chosen:
            chosen[document.content_hash], numbers[document.content_hash] = document, number
            tokens -= min(lengths[number], _LONGEST)
    known, own = HeldOut.of(store, reader, chosen.values(), EVERYTHING).stored, store.content_hashes(lengths)
    reached = {
        hash: known.get(hash, frozenset()) | {own[number]}
        for hash, number in numbers.items()
        if number in own
    }
    hashes = [hash for hash, left in reached.items() if len(left) <= _MOST_LEFT_OUT * len(lengths)]
    stored: dict[str, frozenset[str]] = {}
    for fold in np.array_split(hashes, min(_FOLDS, len(hashes)) or 1):
        stored |= dict.fromkeys(fold.tolist(), frozenset().union(*(reached[hash] for hash in fold)))
    return HeldOut([chosen[hash] for hash in hashes], stored)


def _scattered(number: int) -> int:
    """Where a document comes in an order that has nothing to do with that of adding (Knuth's hash)."""
    return number * 2_654_435_761 % 2**32
