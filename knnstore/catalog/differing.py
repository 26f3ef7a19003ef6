"""What tells documents from those that a domain holds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from knnstore.catalog.catalog import Catalog
from knnstore.catalog.queries import in_chunks
from knnstore.catalog.types import StoredVersion
from knnstore.documents import TextDocument

_TOGETHER = 512  # documents looked up by one statement

Change = Literal["added", "replaced", "described", "unchanged"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What would make a domain what some documents are: ids, in the order of these documents."""

    added: tuple[str, ...]
    """Not there."""
    replaced: tuple[str, ...]
    """There with another text."""
    described: tuple[str, ...]
    """There with the same text, but other metadata or fewer tags."""
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    """There, but not among the documents; sorted."""
    renamed: Mapping[str, str]
    """Of those to be removed, the ones whose text is to be added under another id: that, by theirs."""

    @classmethod
    def of(
        cls, catalog: Catalog, domain: str, documents: Iterable[TextDocument], tags: frozenset[str]
    ) -> "Difference":
        """Compare documents with a domain; see `StoreReader.difference`."""
        found: dict[Change, list[str]] = {"added": [], "replaced": [], "described": [], "unchanged": []}
        left = {id for id, _ in catalog.labels(catalog.rows(domain=domain)).values()}
        new_ids: dict[str, str] = {}
        for some in _groups(documents):
            stored = catalog.versions(domain, [document.id for document in some])
            for document in some:
                change = change_of(document, stored.get(document.id), tags)
                found[change].append(document.id)
                left.discard(document.id)
                if change == "added":
                    new_ids.setdefault(document.content_hash, document.id)
        removed = tuple(sorted(left))
        renamed = {
            id: new_ids.pop(version.content_hash)
            for some in in_chunks(removed if new_ids else ())
            for id, version in sorted(catalog.versions(domain, some).items())
            if version.content_hash in new_ids
        }
        return cls(**{name: tuple(ids) for name, ids in found.items()}, removed=removed, renamed=renamed)


def change_of(document: TextDocument, stored: StoredVersion | None, tags: frozenset[str]) -> Change:
    """What storing a document with some tags would be, where this is its live version."""
    if stored is None:
        return "added"
    if stored.content_hash != document.content_hash:
        return "replaced"
    is_same = stored.metadata == document.metadata and stored.tags >= tags
    return "unchanged" if is_same else "described"


def other_ids(catalog: Catalog, domain: str, ids: Mapping[str, str]) -> dict[str, str]:
    """Find texts that a domain holds under another id than is given; see `StoreReader.other_ids`."""
    rows = catalog.rows_by_content(ids)
    labels = catalog.labels(chain(*rows.values()))
    return {
        ids[content]: labels[row][0]
        for content, found in rows.items()
        for row in found
        if row in labels and labels[row][1] == domain and labels[row][0] != ids[content]
    }


def _groups(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    remaining = iter(documents)
    while some := list(islice(remaining, _TOGETHER)):
        yield some
