"""Which part of a store to retrieve from."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of documents: those that meet every condition given. The default is all.

    Example:
        >>> Selection(domains=("law",), tags=("2025", "2026"))  # law, and tagged with either year
        Selection(domains=('law',), tags=('2025', '2026'), documents=None, exclude=())
    """

    domains: tuple[str, ...] | None = None
    """Documents of any of these domains."""

    tags: tuple[str, ...] | None = None
    """Documents that carry any of these tags."""

    documents: tuple[str, ...] | None = None
    """Documents with any of these ids."""

    exclude: tuple[str, ...] = ()
    """Not the documents with these content hashes (see `TextDocument.content_hash`)."""

    def without(self, *content_hashes: str) -> "Selection":
        """The same selection, but not the documents with these contents."""
        return replace(self, exclude=(*self.exclude, *content_hashes))


EVERYTHING = Selection()
"""Every live document."""
