"""Building a domain: documents become tokens, one forward pass gives their keys, the store keeps both."""

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
from knnstore.lm.reading.encoder import not_finite
from knnstore.lm.reading.reader import (
    TextReader,
    check_tokens,
    in_chunks,
    tokenized,
    unusable_document_error,
)
from knnstore.lm.reading.windows import BATCH_TOKENS
from knnstore.progress import Progress
from knnstore.store import Ingest, KNNStore, NewDocument, Selection, change_of

_logger = logging.getLogger(__name__)

COMMIT_TOKENS = 65_536
"""Documents become live in groups of about so many tokens at most: what an interrupted run can lose."""
COMMIT_SECONDS = 30.0
"""Groups are so large that the model reads one in about this time; half of a minute, for speeds change."""
_SLOWEST = 2e10
"""Operations a second that are expected of any machine before its speed is known; a token takes two for each
weight."""


@dataclass(frozen=True, slots=True)
class Added:
    """What adding documents did."""

    added: int
    """Documents that were not there before."""
    replaced: int
    """Documents whose text had changed."""
    described: int
    """Documents with the same text but new metadata or tags."""
    unchanged: int
    tokens: int
    """Tokens that were stored: went through the model, where the store keeps keys."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens stored in a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Synced:
    """What making a domain the same as some documents did."""

    added: Added
    removed: tuple[str, ...]
    """Ids of the documents that are no more; sorted."""


class Adds(Protocol):
    """A store that documents can be added to, with what reads them: `KNNLMForCausalLM`, `KeylessText`."""

    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def reader(self) -> TextReader:
        """Makes their keys, where the store keeps any."""

    def after_adding(self) -> None:
        """Hear that documents are live, new ones or not."""


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
    """Store documents under a domain.

    A document with the same id and text is left alone, one with another text replaces the old
    version at once. Documents become live in groups; an interrupted run has lost at most the last
    group, and running it again goes on from there.

    Args:
        lm: the model, its store opened for writing.
        documents: rows ``{"id", "text", ...metadata}``, bare texts or `TextDocument`s; any
            iterable, also a `datasets` stream; read once; ids distinct.
        domain: the domain's name; made when it is new.
        tags: set on every document, beside the tags it has.
        on_bad: called for each document that cannot be used, which is then left out; None
            raises at the first. A document whose tokens the model does not have is one, and one
            without tokens.
        commit_tokens: documents become live in groups of about so many tokens at most.
        commit_seconds: and in groups that the model reads in about this time; one document is never divided.
        batch_tokens: tokens in one forward pass, padding included.
        total_bytes: UTF-8 bytes of all texts, if known, for the time left.
        progress: is told of each batch.

    Raises:
        InputError: the domain or a tag is no name; or a document cannot be used and `on_bad` is None. What
            was committed stays. Where the model lacks a token, the documents read with that one are stored.
        ModelOutputError: the model's states of a document are NaN or infinite; names the document. What was
            committed before stays.
        ReadOnlyError: the store was opened for reading.
    """
    shown, store = progress or Progress(), lm.store
    reader = None if store.is_keyless else replace(lm.reader, batch_tokens=batch_tokens)
    vocabulary = store.identity.vocab_size if reader is None else reader.encoder.vocabulary
    tokenizer = lm.tokenizer or lm.reader.tokenizer  # or the error that there is none
    check_name(domain, "the domain's name")
    given = distinct_names(tags, "tag")
    pace = _Pace(reader, commit_tokens, commit_seconds)
    counts = {"added": 0, "replaced": 0, "described": 0, "unchanged": 0, "tokens": 0}
    started = time.perf_counter()
    tokens_read, bytes_read = 0, 0  # for the time left
    shown.start(f"adding to {domain}")

    group: list[NewDocument] = []
    waiting = 0  # tokens in it

    def put() -> None:
        """Store the group, and begin a new one."""
        nonlocal group, waiting
        documents, group, waiting = group, [], 0
        began, before = time.perf_counter(), counts["tokens"]
        with store.ingest(documents) as ingest:
            texts = [document.tokens for document in documents]
            for count in map(len, texts) if reader is None else _encode(reader, documents, ingest):
                counts["tokens"] += count
                shown.advance(count)
        pace.took(counts["tokens"] - before, time.perf_counter() - began)

    new_ids: dict[str, str] = {}  # of the documents that are added, by content hash
    refused: InputError | None = None
    chunks = in_chunks(documents_of(documents, on_bad=on_bad))
    while refused is None:
        try:
            ahead = next(chunks, None)
        except InputError as error:
            refused = error
            break
        if ahead is None:
            break
        there = store.versions(domain, [document.id for document in ahead])
        fresh: list[TextDocument] = []
        changes: dict[str, tuple[Mapping[str, Any], frozenset[str]]] = {}
        for document in ahead:
            version = there.get(document.id)
            change = change_of(document, version, given)
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
        texts = tokenized(tokenizer, [document.text for document in fresh])
        for document, tokens in zip(fresh, texts, strict=True):
            version = there.get(document.id)
            problem = _problem_of(document, tokens, vocabulary, tokenizer)
            if problem is not None:
                try:
                    if on_bad is None:
                        raise problem
                    on_bad(problem)
                except InputError as error:  # the others are stored before it is raised
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
                put()
    if group:
        put()
    if refused is not None:
        raise refused
    if any(counts.values()):  # also what an interrupted run left undone after its last commit
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
    """Make a domain hold some documents and no others: add what is new or changed, then remove the rest.

    What cannot be used stays as it is stored, by its id; while there is something whose id is not known,
    nothing is removed.

    Args:
        lm: the model, its store opened for writing.
        documents: as of `add`.
        domain: the domain's name.
        tags: set on every document, beside the tags it has.
        on_bad: as of `add`.
        progress: as of `add`.

    Raises:
        InputError: there is no document at all, and the domain stays as it is; or as `add`.
    """
    seen: set[str] = set()
    nameless = 0

    def left_out(error: UnusableDocumentError) -> None:
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

    def given() -> Iterator[TextDocument]:
        found = False
        for document in documents_of(documents, on_bad=left_out):
            found = True
            seen.add(document.id)
            yield document
        if not found:
            raise InputError(f"no document was given: {domain} stays as it is")

    added = add(lm, given(), domain=domain, tags=tags, on_bad=left_out, progress=progress)
    there = [] if nameless else lm.store.documents(domain=domain)
    gone = tuple(sorted(document.id for document in there if document.id not in seen))
    if gone:
        lm.store.remove_selected(Selection((domain,), documents=gone))
    return Synced(added, gone)


def _problem_of(
    document: TextDocument,
    tokens: NDArray[np.uint32],
    vocabulary: int,
    tokenizer: PreTrainedTokenizerBase,
) -> UnusableDocumentError | None:
    """Return the error of a document whose tokens cannot be stored; None where they can."""
    try:
        if not len(tokens):
            raise InputError("the tokenizer makes no token of the text")
        check_tokens(tokens, vocabulary, tokenizer)
    except InputError as error:
        return unusable_document_error(document, error)
    return None


def _encode(reader: TextReader, documents: Sequence[NewDocument], ingest: Ingest) -> Iterator[int]:
    """Make and store the keys of some documents. Yields the number of keys of each batch.

    Raises:
        ModelOutputError: a key is NaN or infinite; names the document.
    """
    for batch in reader.batches([document.tokens for document in documents]):
        keys = reader.encoder.keys(batch.input_ids, batch.at).cpu().numpy()
        reader.encoder.check_once(batch.input_ids)
        try:
            ingest.add(batch.documents, batch.positions, batch.gold, keys)
        except InvalidVectorError as error:
            finite = np.isfinite(keys).all(1)
            if finite.all():  # numbers beyond what the engine keeps
                raise
            document = documents[int(batch.documents[int(np.argmin(finite))])]
            found = not_finite(reader.encoder.model, "states")
            raise ModelOutputError(f"document {document.id!r}: {found}") from error
        yield len(batch.at)


class _Pace:
    """How many tokens a group of documents has, so that one is committed in time.

    Args:
        reader: with the model whose speed is guessed by its size, until it is known; None has none.
        tokens: of a group at most.
        seconds: that a group is to take.
    """

    def __init__(self, reader: TextReader | None, tokens: int, seconds: float) -> None:
        self._most = self.group_tokens = tokens
        self._seconds = seconds
        if reader is not None:
            operations = 2 * sum(weights.numel() for weights in reader.encoder.model.parameters())
            self.took(1, operations / _SLOWEST)

    def took(self, tokens: int, seconds: float) -> None:
        """Learn how long a group took."""
        if tokens and seconds:
            self.group_tokens = max(1, min(self._most, round(tokens * self._seconds / seconds)))


def _warn_of_other_ids(store: KNNStore, domain: str, ids: Mapping[str, str]) -> None:
    """Tell of texts that the domain now holds twice, as of files that were renamed."""
    twice = store.other_ids(domain, ids) if ids else {}
    for id, other in list(twice.items())[:1]:
        _logger.warning(
            "%s of these texts are in %s under another id too, %r as %r: they count twice; `knnstore sync` "
            "removes what its folder does not have",
            f"{len(twice):,}", domain, id, other,
        )  # fmt: skip
