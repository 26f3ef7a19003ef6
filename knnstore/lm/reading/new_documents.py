"""Comparing documents with their stored versions, and tokenizing the new and the changed ones."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.documents import OnBad, TextDocument
from knnstore.errors import InputError, UnusableDocumentError
from knnstore.lm.reading.reader import DocumentTokenizer, chunk_documents, unusable_document_error
from knnstore.store import KNNStore, NewDocument, StoredVersion, classify_change

_logger = logging.getLogger(__name__)


class TokenizedDocument(NamedTuple):
    """A document that must be stored, because it is new or its text has changed."""

    document: NewDocument
    """The document with its tokens, at least one."""
    version: StoredVersion | None
    """The stored version that the document replaces; None for a new document."""


class NewDocuments:
    """Iterates over the documents that must be stored in a domain, with their tokens.

    A document that is already stored with the same text is left out; if its metadata or tags differ, the
    iteration updates them in the store. Iterate only once.

    Args:
        store: the store, opened for writing.
        tokenizer: the object that reads and tokenizes documents for the store's model.
        documents: rows ``{"id", "text", ...metadata}``, bare texts or `TextDocument`s, with distinct ids.
        domain: the domain's name.
        tags: tags that are added to every document; tags that a stored document has are kept.
        on_bad: called with the error of each document that cannot be used; the document is skipped. If None,
            the first such error is kept in `refused`, and the iteration ends after the usable documents of
            the same chunk.
    """

    def __init__(
        self,
        store: KNNStore,
        tokenizer: DocumentTokenizer,
        documents: Iterable[object],
        *,
        domain: str,
        tags: frozenset[str],
        on_bad: OnBad | None,
    ) -> None:
        self.counts = {"added": 0, "replaced": 0, "described": 0, "unchanged": 0}
        """Number of documents of each kind so far; see `Added`."""
        self.tokens = 0
        """Number of tokens of the documents that were tokenized so far."""
        self.bytes_tokenized = 0
        """Size of the texts that were tokenized so far, in UTF-8."""
        self.bytes_unchanged = 0
        """Size of the texts that were stored already, in UTF-8."""
        self.refused: InputError | None = None
        """The error of the document that ended the iteration; None if all documents were read."""
        self._store = store
        self._tokenizer = tokenizer
        self._documents = documents
        self._domain = domain
        self._tags = tags
        self._on_bad = on_bad
        self._new_ids: dict[str, str] = {}  # id of each new document, by content hash

    def __iter__(self) -> Iterator[TokenizedDocument]:
        chunks = chunk_documents(self._tokenizer.read(self._documents, self._on_bad))
        while self.refused is None:
            try:
                chunk = next(chunks, None)
            except InputError as error:
                self.refused = error
                return
            if chunk is None:
                return
            versions = self._store.stored_versions(self._domain, [document.id for document in chunk])
            yield from self._tokenize(self._select_changed(chunk, versions), versions)

    def warn_of_other_ids(self) -> None:
        """Log a warning if the text of a new document is also stored under another id in the domain.

        This happens if a file was renamed.
        """
        twice = self._store.find_ids_by_content(self._domain, self._new_ids) if self._new_ids else {}
        for id, other in list(twice.items())[:1]:
            _logger.warning(
                "%s of these texts are also stored in %s under another id, such as %r as %r, and count "
                "twice: `knnstore sync` removes documents that its folder no longer has",
                f"{len(twice):,}",
                self._domain,
                id,
                other,
            )

    def _select_changed(
        self, chunk: list[TextDocument], versions: Mapping[str, StoredVersion]
    ) -> list[TextDocument]:
        """Return the documents that are new or whose text has changed.

        Also counts the other documents, and stores their metadata and tags if these have changed.

        Args:
            chunk: documents to compare.
            versions: the stored versions, by id.
        """
        fresh: list[TextDocument] = []
        changes: dict[str, tuple[Mapping[str, Any], frozenset[str]]] = {}
        for document in chunk:
            version = versions.get(document.id)
            change = classify_change(document, version, self._tags)
            if version is None or change == "replaced":
                fresh.append(document)
                continue
            self.counts[change] += 1
            self.bytes_unchanged += len(document.text.encode())
            if change == "described":
                changes[document.id] = document.metadata, version.tags | self._tags
        if changes:
            self._store.replace_metadata(self._domain, changes)
        return fresh

    def _tokenize(
        self, documents: list[TextDocument], versions: Mapping[str, StoredVersion]
    ) -> Iterator[TokenizedDocument]:
        """Yield the usable documents with their tokens, and skip the others.

        The error of each skipped document is passed to `on_bad`. If `on_bad` is None or raises an error,
        `refused` is set to the first error.

        Args:
            documents: the new and the changed documents of a chunk.
            versions: the stored versions, by id.
        """
        texts = self._tokenizer.tokenize([document.text for document in documents])
        for document, tokens in zip(documents, texts, strict=True):
            problem = self._find_problem(document, tokens)
            if problem is not None:
                try:
                    if self._on_bad is None:
                        raise problem
                    self._on_bad(problem)
                except InputError as error:
                    self.refused = self.refused or error
                continue
            version = versions.get(document.id)
            self.counts["added" if version is None else "replaced"] += 1
            if version is None:
                self._new_ids[document.content_hash] = document.id
            self.tokens += len(tokens)
            self.bytes_tokenized += len(document.text.encode())
            tags = self._tags | (version.tags if version else frozenset[str]())
            new = NewDocument(
                document.id, self._domain, document.content_hash, tokens, document.metadata, tags
            )
            yield TokenizedDocument(new, version)

    def _find_problem(
        self, document: TextDocument, tokens: NDArray[np.uint32]
    ) -> UnusableDocumentError | None:
        """Return the error of a document that has no tokens, or that the model cannot read; else None.

        Args:
            document: the document.
            tokens: token ids of the document.
        """
        reason = self._tokenizer.find_problem(document, tokens)
        if len(tokens) <= len(self._tokenizer.end):
            reason = InputError("the tokenizer gives no tokens for the text")
        return None if reason is None else unusable_document_error(document, reason)
