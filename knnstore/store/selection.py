"""Which part of a store to retrieve from."""

from dataclasses import dataclass, fields, replace
from typing import Any

from knnstore.errors import ConfigError


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """A choice of documents: those that meet every condition given. The default is all.

    Names may be given as a list or another iterable; they are kept as a tuple.

    Raises:
        ConfigError: something is given as another type, or `where` cannot be read.

    Example:
        >>> Selection(domains=["law"], tags=("2025", "2026"))  # law, and tagged with either year
        Selection(domains=('law',), tags=('2025', '2026'))
        >>> Selection(where="year >= 2020 and author = 'Ida'")
        Selection(where="year >= 2020 and author = 'Ida'")
    """

    domains: tuple[str, ...] | None = None
    """Documents of any of these domains."""

    tags: tuple[str, ...] | None = None
    """Documents that carry any of these tags."""

    documents: tuple[str, ...] | None = None
    """Documents with any of these ids."""

    exclude: tuple[str, ...] = ()
    """Not the documents with these content hashes (see `TextDocument.content_hash`)."""

    where: str | None = None
    """Documents whose metadata meet this condition; docs/python.md says what it may be."""

    def __post_init__(self) -> None:
        for name in ("domains", "tags", "documents", "exclude"):
            object.__setattr__(self, name, _names(getattr(self, name), name))
        if self.where is not None:
            from knnstore.catalog import check_condition  # its parser is loaded only if a condition is given

            check_condition(self.where)

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [
            f"{field.name}={given[field.name]!r}"
            for field in fields(self)
            if given[field.name] != field.default
        ]
        return f"Selection({', '.join(changed)})"

    def without(self, *content_hashes: str) -> "Selection":
        """Return the selection without the documents with these content hashes."""
        return replace(self, exclude=(*self.exclude, *content_hashes))


def _names(given: object, what: str) -> tuple[str, ...] | None:
    """Convert names to a tuple. Raises ConfigError for None where a selection needs names."""
    if given is None and what != "exclude":
        return None
    if isinstance(given, str | bytes):
        raise ConfigError(
            f"{what} of a selection are several: write {what}=({given!r},), not {what}={given!r}"
        )
    try:
        names: tuple[Any, ...] = tuple(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"{what} of a selection are a tuple of strings, not {type(given).__name__}"
        ) from None
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"{what} of a selection are strings, not {type(name).__name__}: {name!r}")
    return names


EVERYTHING = Selection()
"""Every live document."""
