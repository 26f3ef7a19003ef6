"""Comparison of new documents with the documents that a domain has stored."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.queries import split_into_chunks
from knnstore.catalog.types import StoredVersion
from knnstore.documents import TextDocument

_TOGETHER = 512  # documents per lookup statement

Change = Literal["added", "replaced", "described", "unchanged"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Ids of the documents that must change so that a domain has exactly the documents of a list.

    A domain is a named set of documents. The ids in `added`, `replaced`, `described` and `unchanged` are in
    the order of the list.
    """

    added: tuple[str, ...]
    """Ids in the list that the domain does not have."""
    replaced: tuple[str, ...]
    """Ids that the domain has with a different text."""
    described: tuple[str, ...]
    """Ids that the domain has with the same text, but with different metadata, or without a required tag."""
    unchanged: tuple[str, ...]
    """Ids that the domain has with the same text and metadata, and with all required tags."""
    removed: tuple[str, ...]
    """Ids that the domain has and the list does not have; sorted."""
    renamed: Mapping[str, str]
    """Dict from old id to new id, for documents in `removed` whose text a document in `added` has too."""

    @classmethod
    def compute(
        cls,
        catalog: Catalog,
        domain: str,
        documents: Iterable[TextDocument],
        tags: frozenset[str],
        kept: Collection[str] = (),
    ) -> "Difference":
        """Compare a list of documents with the documents that a domain has stored. Changes nothing.

        Args:
            catalog: catalog to read.
            domain: name of the domain; an unknown domain counts as a domain without documents.
            documents: documents that the domain should have; they are read once.
            tags: tags that each document should have.
            kept: ids of further documents that the domain should have as they are stored. They are in no
                field of the result.
        """
        ids_by_change: dict[Change, list[str]] = {
            "added": [],
            "replaced": [],
            "described": [],
            "unchanged": [],
        }
        missing_ids = {id for id, _ in catalog.ids_and_domains(catalog.rows(domain=domain)).values()}
        missing_ids.difference_update(kept)
        new_ids: dict[str, str] = {}
        for group in _group_documents(documents):
            stored = catalog.stored_versions(domain, [document.id for document in group])
            for document in group:
                change = classify_change(document, stored.get(document.id), tags)
                ids_by_change[change].append(document.id)
                missing_ids.discard(document.id)
                if change == "added":
                    new_ids.setdefault(document.content_hash, document.id)
        removed = tuple(sorted(missing_ids))
        renamed = {
            id: new_ids.pop(version.content_hash)
            for group in split_into_chunks(removed if new_ids else ())
            for id, version in sorted(catalog.stored_versions(domain, group).items())
            if version.content_hash in new_ids
        }
        return cls(
            **{name: tuple(ids) for name, ids in ids_by_change.items()}, removed=removed, renamed=renamed
        )


def classify_change(document: TextDocument, stored: StoredVersion | None, tags: frozenset[str]) -> Change:
    """Return the kind of change that storing a document would make. Changes nothing.

    Args:
        document: document to store.
        stored: the stored document with the same id; None if the domain has no document with this id.
        tags: tags to store. Additional tags of the stored document do not count as a change.

    Returns:
        "added" if `stored` is None, "replaced" if the text differs, "described" if the text is the same and
        the metadata differ or a tag is missing, else "unchanged".
    """
    if stored is None:
        return "added"
    if stored.content_hash != document.content_hash:
        return "replaced"
    is_same = stored.metadata == document.metadata and stored.tags >= tags
    return "unchanged" if is_same else "described"


def find_other_ids(catalog: Catalog, domain: str, ids: Mapping[str, str]) -> dict[str, str]:
    """Find the ids under which a domain (a named set of documents) already has the texts of new documents.

    Args:
        catalog: catalog to read.
        domain: name of the domain.
        ids: id of each new document, by the SHA-256 of its text.

    Returns:
        For each new id the id under which the domain has the text. New ids whose text the domain does not
        have, or has only under the same id, are left out.
    """
    rows = catalog.rows_by_content(ids)
    labels = catalog.ids_and_domains(chain(*rows.values()))
    return {
        ids[content]: labels[row][0]
        for content, keys in rows.items()
        for row in keys
        if row in labels and labels[row][1] == domain and labels[row][0] != ids[content]
    }


def _group_documents(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    """Divide documents into lists of at most 512 documents, in the same order, and yield the lists."""
    remaining = iter(documents)
    while group := list(islice(remaining, _TOGETHER)):
        yield group
