"""Adding documents to a domain, and making a domain equal to a set of documents (`add`, `sync`).

Each document is tokenized, a forward pass of the model gives the keys of its tokens, and the store saves
tokens and keys.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from knnstore.checks import check_name, distinct_names
from knnstore.documents import NOT_MEMBERS, OnBad, TextDocument, documents_of
from knnstore.errors import (
    DiskFullError,
    InputError,
    InvalidVectorError,
    ModelOutputError,
    UnusableDocumentError,
)
from knnstore.lm.reading.encoder import create_not_finite_error
from knnstore.lm.reading.reader import (
    TextReader,
    check_tokens,
    in_chunks,
    tokenized,
    unusable_document_error,
)
from knnstore.lm.reading.windows import BATCH_TOKENS
from knnstore.progress import Progress
from knnstore.store import Ingest, KNNStore, NewDocument, Selection, classify_change

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
    """A store with the tokenizer and the reader for its documents: `KNNLMForCausalLM` or `KeylessText`."""

    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def reader(self) -> TextReader:
        """The object that runs the model to compute keys.

        It is not used if the store has no keys and `tokenizer` is set.
        """

    def after_adding(self) -> None:
        """Do what must follow the adding of documents, such as saving default settings.

        `add` calls it if at least one document was processed, even an unchanged document.
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
            iterable, for example a `datasets` stream; it is read once.
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
    vocabulary = store.identity.vocab_size if reader is None else reader.encoder.vocabulary
    tokenizer = lm.tokenizer or lm.reader.tokenizer  # raises an error if the store has no tokenizer
    check_name(domain, "the domain's name")
    given = distinct_names(tags, "tag")
    pace = _GroupSize(reader, commit_tokens, commit_seconds)
    counts = {"added": 0, "replaced": 0, "described": 0, "unchanged": 0, "tokens": 0}
    started = time.perf_counter()
    tokens_read, bytes_read = 0, 0  # for the estimate of the remaining time
    shown.start(f"adding to {domain}")

    group: list[NewDocument] = []
    waiting = 0  # number of tokens in the group

    def store_group() -> None:
        """Compute the keys of the documents in `group`, commit these documents, and empty `group`."""
        nonlocal group, waiting
        documents, group, waiting = group, [], 0
        began, before = time.perf_counter(), counts["tokens"]
        with store.ingest(documents) as ingest:
            texts = [document.tokens for document in documents]
            for count in map(len, texts) if reader is None else _store_keys(reader, documents, ingest):
                counts["tokens"] += count
                shown.advance(count)
        pace.record_speed(counts["tokens"] - before, time.perf_counter() - began)

    new_ids: dict[str, str] = {}  # id of each new document, by content hash
    refused: InputError | None = None
    chunks = in_chunks(documents_of(documents, on_bad=on_bad))
    while refused is None:
        try:
            chunk = next(chunks, None)
        except InputError as error:
            refused = error
            break
        if chunk is None:
            break
        # 1) Compare a chunk of documents with the stored versions. If only metadata or tags changed, update
        #    these without the model.
        versions = store.versions(domain, [document.id for document in chunk])
        fresh: list[TextDocument] = []
        changes: dict[str, tuple[Mapping[str, Any], frozenset[str]]] = {}
        for document in chunk:
            version = versions.get(document.id)
            change = classify_change(document, version, given)
            if version is None or change == "replaced":
                fresh.append(document)
                continue
            counts[change] += 1
            if total_bytes is not None:
                total_bytes -= len(document.text.encode())
            if change == "described":
                changes[document.id] = document.metadata, version.tags | given
        if changes:
            store.describe(domain, changes)
        # 2) Tokenize the new and the changed documents; commit the group each time it is large enough.
        texts = tokenized(tokenizer, [document.text for document in fresh])
        for document, tokens in zip(fresh, texts, strict=True):
            version = versions.get(document.id)
            problem = _find_problem(document, tokens, vocabulary, tokenizer)
            if problem is not None:
                try:
                    if on_bad is None:
                        raise problem
                    on_bad(problem)
                except InputError as error:  # raised after the usable documents are committed
                    refused = refused or error
                continue
            counts["added" if version is None else "replaced"] += 1
            if version is None:
                new_ids[document.content_hash] = document.id
            kept = version.tags if version else frozenset[str]()
            new = NewDocument(
                document.id, domain, document.content_hash, tokens, document.metadata, given | kept
            )
            tokens_read += len(tokens)
            bytes_read += len(document.text.encode())
            if total_bytes is not None and bytes_read:
                shown.expect(round(total_bytes * tokens_read / bytes_read))
            group.append(new)
            waiting += len(tokens)
            if waiting >= pace.group_tokens:
                store_group()
    # 3) Commit the last group. Index the store, also if an interrupted run has left that undone.
    if group:
        store_group()
    if refused is not None:
        raise refused
    if any(counts.values()):
        try:
            store.optimize()
        except DiskFullError as error:
            _logger.warning(
                "the documents are there, indexing them is left to `knnstore optimize`: %s", error
            )
        lm.after_adding()
    _warn_of_other_ids(store, domain, new_ids)
    shown.finish()
    return Added(**counts, seconds=time.perf_counter() - started)


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

    A document that cannot be used keeps its stored version, which is found by its id. If the id of a document
    that cannot be used is not known, nothing is removed.

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
        for document in documents_of(documents, on_bad=report_unusable):
            has_documents = True
            seen.add(document.id)
            yield document
        if not has_documents:
            raise InputError(f"no document was given: {domain} stays as it is")

    added = add(lm, iterate_documents(), domain=domain, tags=tags, on_bad=report_unusable, progress=progress)
    stored = [] if nameless else lm.store.documents(domain=domain)
    removed = tuple(sorted(document.id for document in stored if document.id not in seen))
    if removed:
        lm.store.remove_selected(Selection((domain,), documents=removed))
    return Synced(added, removed)


def _find_problem(
    document: TextDocument,
    tokens: NDArray[np.uint32],
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase,
) -> UnusableDocumentError | None:
    """Return the error of a document that has no tokens, or a token that the model lacks; else None.

    Args:
        document: the document.
        tokens: token ids of the document.
        vocabulary: number of tokens that the model has.
        tokenizer: the tokenizer, for the message.
    """
    try:
        if not len(tokens):
            raise InputError("the tokenizer makes no token of the text")
        check_tokens(tokens, vocabulary, tokenizer)
    except InputError as error:
        return unusable_document_error(document, error)
    return None


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
    for batch in reader.batches([document.tokens for document in documents]):
        keys = reader.encoder.keys(batch.input_ids, batch.at).cpu().numpy()
        reader.encoder.check_once(batch.input_ids)
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
        reader: the object with the model, whose speed is estimated from its size until it is measured; None
            if the store needs no model.
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


def _warn_of_other_ids(store: KNNStore, domain: str, ids: Mapping[str, str]) -> None:
    """Log a warning if a new text is stored in the domain under another id too, e.g. of a renamed file.

    Args:
        store: the store.
        domain: the domain's name.
        ids: id of each new document, by content hash.
    """
    twice = store.other_ids(domain, ids) if ids else {}
    for id, other in list(twice.items())[:1]:
        _logger.warning(
            "%s of these texts are in %s under another id too, %r as %r: they count twice; `knnstore sync` "
            "removes what its folder does not have",
            f"{len(twice):,}",
            domain,
            id,
            other,
        )
