"""Comparison of documents with the stored documents of a domain."""

from collections.abc import Iterable, Iterator, Mapping
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
    """Changes that would make a domain equal to a list of documents: ids, in the order of the list."""

    added: tuple[str, ...]
    """Ids that the domain does not hold."""
    replaced: tuple[str, ...]
    """Ids that the domain holds with a different text."""
    described: tuple[str, ...]
    """Ids that the domain holds with the same text, but with different metadata or fewer tags."""
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    """Ids that the domain holds and the list does not; sorted."""
    renamed: Mapping[str, str]
    """New id by old id, for each removed document whose text is added under another id."""

    @classmethod
    def of(
        cls, catalog: Catalog, domain: str, documents: Iterable[TextDocument], tags: frozenset[str]
    ) -> "Difference":
        """Compare documents with the live documents of a domain; see `StoreReader.difference`.

        Args:
            catalog: catalog to read.
            domain: name of the domain, which need not exist.
            documents: documents that the domain should hold.
            tags: tags that each document should carry.
        """
        ids_by_change: dict[Change, list[str]] = {
            "added": [],
            "replaced": [],
            "described": [],
            "unchanged": [],
        }
        missing_ids = {id for id, _ in catalog.labels(catalog.rows(domain=domain)).values()}
        new_ids: dict[str, str] = {}
        for group in _split_documents(documents):
            stored = catalog.versions(domain, [document.id for document in group])
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
            for id, version in sorted(catalog.versions(domain, group).items())
            if version.content_hash in new_ids
        }
        return cls(
            **{name: tuple(ids) for name, ids in ids_by_change.items()}, removed=removed, renamed=renamed
        )


def classify_change(document: TextDocument, stored: StoredVersion | None, tags: frozenset[str]) -> Change:
    """Return the change that storing a document would make.

    Args:
        document: document to store.
        stored: live version with the document's id; None if the domain has no document with this id.
        tags: tags to store. Further tags of the stored version do not count as a change.

    Returns:
        "added" without a stored version, "replaced" if the text differs, "described" if only the metadata
        differ or a tag is missing, else "unchanged".
    """
    if stored is None:
        return "added"
    if stored.content_hash != document.content_hash:
        return "replaced"
    is_same = stored.metadata == document.metadata and stored.tags >= tags
    return "unchanged" if is_same else "described"


def find_other_ids(catalog: Catalog, domain: str, ids: Mapping[str, str]) -> dict[str, str]:
    """Find texts that a domain already holds under another id; see `StoreReader.other_ids`.

    Args:
        catalog: catalog to read.
        domain: name of the domain.
        ids: new ids by content hash.

    Returns:
        The stored id by new id. New ids whose text the domain does not hold under another id are left out.
    """
    rows = catalog.rows_by_content(ids)
    labels = catalog.labels(chain(*rows.values()))
    return {
        ids[content]: labels[row][0]
        for content, keys in rows.items()
        for row in keys
        if row in labels and labels[row][1] == domain and labels[row][0] != ids[content]
    }


def _split_documents(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    """Yield the documents in lists of at most `_TOGETHER`."""
    remaining = iter(documents)
    while group := list(islice(remaining, _TOGETHER)):
        yield group
