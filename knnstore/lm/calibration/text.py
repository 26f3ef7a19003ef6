"""Choosing the text to fit settings to: held-out documents, and stored documents.

A stored document is left out of its own search.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from knnstore.documents import SOURCE, TextDocument
from knnstore.errors import InputError
from knnstore.lm.calibration.judging import check_text_size
from knnstore.lm.reading import TextReader
from knnstore.lm.scoring import HeldOut
from knnstore.store import EVERYTHING, Reader, Selection

_MAX_DOCUMENT_TOKENS = 2048
"""Number of tokens to which a stored document is cut: many beginnings are a better sample than few
documents."""
_FOLDS = 16
"""Number of groups of stored documents that are left out together. The number is small because each group
needs new counts of n-grams."""
_MAX_LEFT_OUT_SHARE = 0.5
"""Largest share of all documents that may be left out of the search for one stored document. A stored
document that would need more is not used."""


@dataclass(frozen=True)
class TextToFit:
    """Documents to fit settings to, and the stored documents that must be left out for each one."""

    documents: list[TextDocument]
    """Held-out documents, then beginnings of stored documents."""
    reached: Mapping[str, frozenset[str]]
    """Stored documents that the search for a document leaves out. It maps the content hash of the document to
    the content hashes of the stored documents."""
    in_store: int
    """Number of the documents that are in the store, selected or not."""
    own: frozenset[str]
    """Content hashes of the held-out documents."""
    stored: frozenset[str]
    """Content hashes of the stored documents that count as the same text as one of `documents`. Also has the
    stored documents that are left out together with one of these."""

    @property
    def hashes(self) -> frozenset[str]:
        """Content hashes of all documents: `own` and `stored` together."""
        return self.own | self.stored

    def is_known_to(self, fitted_on: frozenset[str]) -> bool:
        """Check whether settings were fitted to this text, so that the text cannot judge them.

        True if the settings were fitted to more than half of the documents. There is one exception: if they
        were fitted to all documents and to further ones, the result is False.

        Args:
            fitted_on: content hashes of the documents that the settings were fitted to.
        """
        known = fitted_on & self.hashes
        return 2 * len(known) > len(self.hashes) and not fitted_on > self.hashes

    def check_stored(self, store: Reader) -> None:
        """Check that all documents of `stored` are still in the store, before settings are saved.

        When a document is removed, settings that were fitted to it are deleted. Settings that are saved after
        the removal would not be deleted.

        Raises:
            InputError: a stored document was removed or replaced.
        """
        gone = len(self.stored) - len(store.find_stored_hashes(self.stored))
        if gone:
            raise InputError(
                f"nothing is saved: {gone:,} of the stored documents that the settings were fitted to were "
                "removed or replaced in the meantime; calibrate again"
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
    """Choose the text to fit settings to: all held-out documents, and stored documents with `tokens` tokens.

    Args:
        store: the store.
        reader: the object that tokenizes the documents.
        documents: held-out documents; a text that occurs twice is used once.
        selection: the stored documents that are searched, and from which documents are chosen.
        tokens: number of tokens of stored documents; 0 for no stored documents.
        leave_out: True to accept a held-out document that is in the store, and to leave the stored copy out
            of the document's own search; False to raise an error for this document.

    Raises:
        InputError: a held-out document is in the store and `leave_out` is False, no stored document can be
            used, or there is too little text.
    """
    distinct = {document.content_hash: document for document in reader.document_tokenizer.read(documents)}
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
    texts = reader.tokenize_documents(listed)
    check_text_size(np.repeat(np.arange(len(texts)), [len(one) for one in texts]))
    return TextToFit(listed, reached, len(stored), frozenset(distinct), frozenset().union(*stored.values()))


def choose_stored(store: Reader, reader: TextReader, selection: Selection, tokens: int) -> HeldOut:
    """Choose beginnings of stored documents with about `tokens` tokens in total; the choice is deterministic.

    The chosen documents are divided into groups. When a document is scored, the search leaves out all
    documents of its group, and the stored documents that share much text with a document of the group. A
    document is not chosen if the search for it alone would leave out more than half of the store.

    Args:
        store: the store.
        reader: the object that decodes the stored tokens.
        selection: the stored documents to choose from.
        tokens: total number of tokens to reach; the result has fewer if the store has less text.

    Returns:
        The beginnings, and for each the content hashes of the stored documents to leave out.
    """
    chosen: dict[str, TextDocument] = {}
    numbers: dict[str, int] = {}
    lengths = store.lengths(selection)
    for number in sorted(lengths, key=_compute_shuffle_key):
        if tokens <= 0:
            break
        length = min(lengths[number] - len(reader.document_tokenizer.end), _MAX_DOCUMENT_TOKENS)
        source = store.metadata([number]).get(number, {}).get(SOURCE) if reader.reads_pairs else None
        text = reader.decode(store.tokens_by_number(number)[:length].tolist())
        document = TextDocument(str(number), text, source=source)
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
    """Return a sort key that shuffles document numbers deterministically (Knuth's multiplicative hash)."""
    return number * 2_654_435_761 % 2**32
