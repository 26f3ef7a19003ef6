"""The text that settings are fitted to: held-out documents, and stored ones that do not find themselves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from knnstore.documents import TextDocument, documents_of
from knnstore.errors import InputError
from knnstore.lm.calibration.judging import check_text_size
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import HeldOut
from knnstore.store import EVERYTHING, Reader, Selection

_MAX_DOCUMENT_TOKENS = 2048
"""Tokens to which a document is cut: the beginnings of many documents tell more than a few whole ones."""
_FOLDS = 16
"""Stored documents are left out in this number of groups: each group needs its own counts of n-grams."""
_MAX_LEFT_OUT_SHARE = 0.5
"""A stored document is not used if more than this share of all documents had to be left out for it."""


@dataclass(frozen=True)
class TextToFit:
    """Documents to fit settings to."""

    documents: list[TextDocument]
    """Held-out documents, then beginnings of stored ones."""
    reached: Mapping[str, frozenset[str]]
    """Stored documents that each document does not retrieve from; see `HeldOut.stored`."""
    in_store: int
    """Number of documents that are anywhere in the store."""
    own: frozenset[str]
    """Content hashes of held-out documents."""
    stored: frozenset[str]
    """Content hashes of stored documents."""

    @property
    def hashes(self) -> frozenset[str]:
        """Content hashes of all documents."""
        return self.own | self.stored

    def is_known_to(self, fitted_on: frozenset[str]) -> bool:
        """Check whether settings were fitted to most of this text, and not to much other text.

        Args:
            fitted_on: content hashes of the documents that the settings were fitted to.
        """
        known = fitted_on & self.hashes
        return 2 * len(known) > len(self.hashes) and not fitted_on > self.hashes

    def check_stored(self, store: Reader) -> None:
        """Check that all stored documents are still in the store.

        Otherwise settings would be saved that the removal of these documents could not remove any more.

        Raises:
            InputError: a stored document was removed or replaced.
        """
        gone = len(self.stored) - len(store.stored_content(self.stored))
        if gone:
            raise InputError(
                f"nothing is saved: {gone:,} of the stored documents that it was fitted to were removed or "
                "replaced meanwhile; calibrate again"
            )


def choose_text(
    store: Reader,
    reader: TextReader,
    documents: Iterable[object],
    selection: Selection,
    tokens: int,
    *,
    leave_out: bool,
) -> TextToFit:
    """Read held-out documents, and choose stored documents with a number of tokens.

    See `calibrate` for the arguments and the errors.
    """
    distinct = {document.content_hash: document for document in documents_of(documents)}
    held_out = HeldOut.compare_with_store(store, reader, distinct.values(), selection)
    if not leave_out:
        held_out.refuse_stored()
    listed, reached = held_out
    stored = (
        HeldOut.compare_with_store(store, reader, listed, EVERYTHING).stored if selection.domains else reached
    )
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
    check_text_size(np.repeat(np.arange(len(texts)), [len(one) for one in texts]))
    return TextToFit(listed, reached, len(stored), frozenset(distinct), frozenset().union(*stored.values()))


def choose_stored(store: Reader, reader: TextReader, selection: Selection, tokens: int) -> HeldOut:
    """Choose beginnings of stored documents up to a number of tokens; the choice is the same each time.

    Each leaves out its own document, documents with the same text (see `HeldOut`), and those of its group.

    Returns:
        The beginnings, with fewer tokens if the store has less text.
    """
    chosen: dict[str, TextDocument] = {}
    numbers: dict[str, int] = {}
    lengths = store.lengths(selection)
    for number in sorted(lengths, key=_compute_shuffle_key):
        if tokens <= 0:
            break
        text = reader.text(store.text(number)[:_MAX_DOCUMENT_TOKENS].tolist())
        document = TextDocument(str(number), text)
        if text.strip() and document.content_hash not in chosen:
            chosen[document.content_hash], numbers[document.content_hash] = document, number
            tokens -= min(lengths[number], _MAX_DOCUMENT_TOKENS)
    known, own = (
        HeldOut.compare_with_store(store, reader, chosen.values(), EVERYTHING).stored,
        store.content_hashes(lengths),
    )
    reached = {
        hash: known.get(hash, frozenset()) | {own[number]}
        for hash, number in numbers.items()
        if number in own
    }
    hashes = [hash for hash, left in reached.items() if len(left) <= _MAX_LEFT_OUT_SHARE * len(lengths)]
    stored: dict[str, frozenset[str]] = {}
    for fold in np.array_split(hashes, min(_FOLDS, len(hashes)) or 1):
        stored |= dict.fromkeys(fold.tolist(), frozenset().union(*(reached[hash] for hash in fold)))
    return HeldOut([chosen[hash] for hash in hashes], stored)


def _compute_shuffle_key(number: int) -> int:
    """Return a document's key in an order that is independent of the order of adding (Knuth's hash)."""
    return number * 2_654_435_761 % 2**32
