"""Adding documents to a domain, and making a domain equal to a set of documents (`add`, `sync`).

Each document is tokenized, a forward pass of the model gives the keys of its tokens, and the store saves
tokens and keys.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from knnstore.checks import check_distinct_names, check_name
from knnstore.documents import NOT_MEMBERS, SOURCE, OnBad, TextDocument, convert_rows_to_documents
from knnstore.errors import (
    DiskFullError,
    InputError,
    InvalidVectorError,
    ModelOutputError,
    UnusableDocumentError,
)
from knnstore.lm.reading.encoder import create_not_finite_error
from knnstore.lm.reading.new_documents import NewDocuments
from knnstore.lm.reading.reader import DocumentTokenizer, TextReader
from knnstore.lm.reading.windows import BATCH_TOKENS
from knnstore.progress import Progress
from knnstore.store import Ingest, KNNStore, NewDocument, Selection

_logger = logging.getLogger(__name__)

COMMIT_TOKENS = 65_536
"""Number of tokens at which a group of documents is committed; the last document may exceed it.

An interrupted run loses at most one group.
"""
COMMIT_SECONDS = 30.0
"""Time in seconds that the model should take for one group of documents that is committed together.

Half a minute, so that a group takes about a minute at most if the speed of the model halves.
"""
_ASSUMED_OPERATIONS = 2e10
"""Operations per second that are assumed before the speed of the machine is measured.

A token takes two operations for each weight of the model.
"""


@dataclass(frozen=True, slots=True)
class Added:
    """Counts of a call of `add`."""

    added: int
    """Number of documents whose ids were new in the domain."""
    replaced: int
    """Number of documents whose text had changed."""
    described: int
    """Number of documents with the same text but new metadata or tags."""
    unchanged: int
    """Number of documents that were stored already with the same text, metadata and tags."""
    tokens: int
    """Number of tokens that were stored. If the store keeps keys, the model processed these tokens."""
    seconds: float
    """Duration of the call in seconds."""

    @property
    def tokens_per_s(self) -> float:
        """Number of tokens stored per second; 0 if the duration is 0."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Synced:
    """Counts of a call of `sync`."""

    added: Added
    """Counts of the documents that were added, replaced or left unchanged."""
    removed: tuple[str, ...]
    """Ids of the documents that were removed, sorted."""


class Adds(Protocol):
    """Protocol of the object to which `add` adds documents: `KNNLMForCausalLM` or `KeylessText`.

    It has a store, and the tokenizer and the model that process the store's documents.
    """

    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def reader(self) -> TextReader:
        """The object that runs the model to compute keys.

        It is not used if the store has no keys and `tokenizer` is set.
        """

    def after_adding(self) -> None:
        """Run the steps that must follow after documents were added, such as saving default settings.

        `add` calls it if there was at least one document, even an unchanged one.
        """


def add(
    lm: Adds,
    documents: Iterable[object],
    *,
    domain: str,
    tags: Iterable[str] = (),
    on_bad: OnBad | None = None,
    commit_tokens: int = COMMIT_TOKENS,
    commit_seconds: float = COMMIT_SECONDS,
    batch_tokens: int = BATCH_TOKENS,
    total_bytes: int | None = None,
    progress: Progress | None = None,
) -> Added:
    """Add documents to a domain, and return counts.

    A document with the same id and text is not stored again; its metadata and tags are updated. A document
    with the same id and another text replaces the stored version. Documents are committed in groups: an
    interrupted run loses at most the last group, and a second run continues from the last commit. No
    documents give zero counts.

    Args:
        lm: the model; its store is opened for writing.
        documents: rows ``{"id", "text", ...metadata}``, bare texts or `TextDocument`s, with distinct ids. Any
            iterable, for example a `datasets` stream; it is read once. For an encoder-decoder model, pairs
            ``{"id", "source", "text", ...metadata}``, such as a sentence and its translation.
        domain: the domain's name; a new domain is created.
        tags: tags that are added to every document; tags that a stored document has are kept.
        on_bad: called with the error of each document that cannot be used, for example one without tokens or
            with a token that the model does not have; the document is skipped. None raises the first error.
        commit_tokens: number of tokens at which a group is committed; its last document may exceed the
            number.
        commit_seconds: time in seconds that the model should take for one group. A document is never divided.
        batch_tokens: number of tokens in one forward pass, padding included.
        total_bytes: size of all texts in UTF-8 bytes, if known, to estimate the remaining time.
        progress: progress display, which receives the number of tokens of each batch; None for no display.

    Raises:
        InputError: the domain or a tag is not a valid name; or a document cannot be used and `on_bad` is
            None. Committed groups stay. If the document has no tokens or an unknown token, the other
            documents of its chunk are committed before the error is raised.
        ModelOutputError: the model's hidden states of a document are NaN or infinite; the message names the
            document. Earlier groups stay committed.
        ReadOnlyError: the store was opened for reading.
    """
    shown, store = progress or Progress(), lm.store
    reader = None if store.is_keyless else replace(lm.reader, batch_tokens=batch_tokens)
    if reader is None:
        # `lm.reader` raises an error if the store has no tokenizer.
        tokenizer = DocumentTokenizer(lm.tokenizer or lm.reader.tokenizer, store.identity.vocab_size)
    else:
        tokenizer = reader.document_tokenizer
    check_name(domain, "the domain's name")
    given = check_distinct_names(tags, "tag")
    pace = _GroupSize(reader, commit_tokens, commit_seconds)
    started = time.perf_counter()
    tokens_stored = 0
    shown.start(f"adding to {domain}")

    group: list[NewDocument] = []
    waiting = 0  # number of tokens in the group

    def store_group() -> None:
        """Compute the keys of the documents in `group`, commit these documents, and empty `group`."""
        nonlocal group, waiting, tokens_stored
        documents, group, waiting = group, [], 0
        began, before = time.perf_counter(), tokens_stored
        with store.ingest(documents) as ingest:
            texts = [document.tokens for document in documents]
            for count in map(len, texts) if reader is None else _store_keys(reader, documents, ingest):
                tokens_stored += count
                shown.advance(count)
        pace.record_speed(tokens_stored - before, time.perf_counter() - began)

    # 1) Find the new and the changed documents; commit the group each time it is large enough.
    incoming = NewDocuments(store, tokenizer, documents, domain=domain, tags=given, on_bad=on_bad)
    for new in incoming:
        if total_bytes is not None and incoming.bytes_tokenized:
            remaining_bytes = total_bytes - incoming.bytes_unchanged
            shown.expect(round(remaining_bytes * incoming.tokens / incoming.bytes_tokenized))
        group.append(new.document)
        waiting += len(new.document.tokens)
        if waiting >= pace.group_tokens:
            store_group()
    # 2) Commit the last group. Index the store, also if an interrupted run has left that undone.
    if group:
        store_group()
    if incoming.refused is not None:
        raise incoming.refused
    if any(incoming.counts.values()):
        try:
            store.optimize()
        except DiskFullError as error:
            _logger.warning(
                "the documents are stored but not indexed yet (%s): run `knnstore optimize` later", error
            )
        lm.after_adding()
    incoming.warn_of_other_ids()
    shown.finish()
    return Added(**incoming.counts, tokens=tokens_stored, seconds=time.perf_counter() - started)


def sync(
    lm: Adds,
    documents: Iterable[object],
    *,
    domain: str,
    tags: Iterable[str] = (),
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Synced:
    """Make a domain contain exactly the documents: add new and changed ones, then remove all others.

    If a document cannot be used, the stored document with its id is kept. If a document cannot be used and
    its id is not known either, no document is removed.

    Args:
        lm: the model; its store is opened for writing.
        documents: rows ``{"id", "text", ...metadata}``, bare texts or `TextDocument`s, with distinct ids.
        domain: the domain's name.
        tags: tags that are added to every document; tags that a stored document has are kept.
        on_bad: called with the error of each document that cannot be used; the document is skipped. None
            raises the first error.
        progress: progress display, which receives the number of tokens of each batch; None for no display.

    Raises:
        InputError: no usable document was given; the domain is not changed. Also raised if a name is not
            valid, or if a document cannot be used and `on_bad` is None.
        ModelOutputError: the model's hidden states of a document are NaN or infinite.
    """
    seen: set[str] = set()
    nameless = 0

    def report_unusable(error: UnusableDocumentError) -> None:
        """Report the error at once, and remember the id, so that the stored version is not removed."""
        nonlocal nameless
        if on_bad is None:
            raise error
        on_bad(error)
        if error.reason in NOT_MEMBERS:
            return
        if error.id is None:
            nameless += 1
        else:
            seen.add(error.id)

    def iterate_documents() -> Iterator[TextDocument]:
        has_documents = False
        for document in convert_rows_to_documents(documents, on_bad=report_unusable):
            has_documents = True
            seen.add(document.id)
            yield document
        if not has_documents:
            raise InputError(f"no document was given: {domain} is not changed")

    added = add(lm, iterate_documents(), domain=domain, tags=tags, on_bad=report_unusable, progress=progress)
    stored = [] if nameless else lm.store.documents(domain=domain)
    removed = tuple(sorted(document.id for document in stored if document.id not in seen))
    if removed:
        lm.store.remove_selected(Selection((domain,), documents=removed))
    return Synced(added, removed)


def _store_keys(reader: TextReader, documents: Sequence[NewDocument], ingest: Ingest) -> Iterator[int]:
    """Compute and store the keys of documents, batch by batch; yield the number of keys of each batch.

    Args:
        reader: the object that runs the model.
        documents: the documents of a group.
        ingest: the open transaction that stores the keys.

    Raises:
        ModelOutputError: a key is NaN or infinite; the message names the document.
        InvalidVectorError: the adapter refuses a finite key, e.g. because it is out of range.
    """
    sources = None
    if reader.reads_pairs:
        sources = reader.document_tokenizer.tokenize_sources(
            [document.metadata[SOURCE] for document in documents]
        )
    for batch in reader.batch_windows([document.tokens for document in documents], sources):
        keys = reader.encoder.compute_keys(batch.input_ids, batch.at, batch.source).cpu().numpy()
        reader.encoder.check_once(batch.input_ids, batch.source)
        try:
            ingest.add(batch.documents, batch.positions, batch.gold, keys)
        except InvalidVectorError as error:
            finite = np.isfinite(keys).all(1)
            if finite.all():  # values outside the range of the engine
                raise
            document = documents[int(batch.documents[int(np.argmin(finite))])]
            found = create_not_finite_error(reader.encoder.model, "states")
            raise ModelOutputError(f"document {document.id!r}: {found}") from error
        yield len(batch.at)


class _GroupSize:
    """Chooses how many tokens are committed together, from the measured speed of the model.

    Args:
        reader: the object with the model. The size of the model gives a first estimate of its speed. None if
            the store needs no model.
        tokens: largest number of tokens in a group.
        seconds: time in seconds that a group should take.

    Attributes:
        group_tokens: number of tokens at which a group is committed, >= 1.
    """

    def __init__(self, reader: TextReader | None, tokens: int, seconds: float) -> None:
        self._max_tokens = self.group_tokens = tokens
        self._seconds = seconds
        if reader is not None:
            operations = 2 * sum(weights.numel() for weights in reader.encoder.model.parameters())
            self.record_speed(1, operations / _ASSUMED_OPERATIONS)

    def record_speed(self, tokens: int, seconds: float) -> None:
        """Set `group_tokens` from the speed of the latest group; does nothing if an argument is 0.

        Args:
            tokens: number of tokens of the group.
            seconds: time in seconds that the group took.
        """
        if tokens and seconds:
            self.group_tokens = max(1, min(self._max_tokens, round(tokens * self._seconds / seconds)))
