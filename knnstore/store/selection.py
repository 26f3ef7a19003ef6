"""Selection of the documents from which a query retrieves records."""

from dataclasses import dataclass, fields, replace
from typing import Any

from knnstore.errors import ConfigError


@dataclass(frozen=True, slots=True, repr=False)
class Selection:
    """A choice of documents: the documents that meet the conditions of all fields that are set.

    The default sets no field and selects all documents. Names may be given as a list or another iterable of
    strings; they are converted to a tuple. An empty tuple of domains, tags or documents selects nothing.

    Raises:
        ConfigError: if names are not an iterable of strings, or the condition `where` cannot be parsed.

    Example:
        >>> Selection(domains=["law"], tags=("2025", "2026"))  # law, and tagged with either year
        Selection(domains=('law',), tags=('2025', '2026'))
        >>> Selection(where="year >= 2020 and author = 'Ida'")
        Selection(where="year >= 2020 and author = 'Ida'")
    """

    domains: tuple[str, ...] | None = None
    """Select documents in one of these domains; None allows all domains."""

    tags: tuple[str, ...] | None = None
    """Select documents with at least one of these tags; None allows documents with any tags or none."""

    documents: tuple[str, ...] | None = None
    """Select documents with one of these ids; None allows all ids."""

    exclude: tuple[str, ...] = ()
    """Leave out documents whose text has one of these SHA-256 (see `TextDocument.content_hash`)."""

    where: str | None = None
    """Select documents whose metadata meet this condition, as "year >= 2020"; docs/python.md describes the
    syntax. None allows documents with any metadata."""

    def __post_init__(self) -> None:
        for name in ("domains", "tags", "documents", "exclude"):
            object.__setattr__(self, name, _convert_names(getattr(self, name), name))
        if self.where is not None:
            from knnstore.catalog import check_condition  # its parser is loaded only if a condition is given

            check_condition(self.where)

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [
            f"{field.name}={values[field.name]!r}"
            for field in fields(self)
            if values[field.name] != field.default
        ]
        return f"Selection({', '.join(changed)})"

    def without_content(self, *content_hashes: str) -> "Selection":
        """Return a selection that also leaves out documents whose text has one of these SHA-256."""
        return replace(self, exclude=(*self.exclude, *content_hashes))


def _convert_names(value: object, field_name: str) -> tuple[str, ...] | None:
    """Convert the value of a field of `Selection` to a tuple of strings. None stays None.

    Args:
        value: names, as an iterable of strings.
        field_name: name of the field, for messages. For ``exclude``, None is refused too.

    Raises:
        ConfigError: if `value` is a single string, is no iterable, or contains something else than strings.
    """
    if value is None and field_name != "exclude":
        return None
    if isinstance(value, str | bytes):
        raise ConfigError(
            f"{field_name} of a selection must be a tuple: "
            f"write {field_name}=({value!r},), not {field_name}={value!r}"
        )
    try:
        names: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"{field_name} of a selection must be a tuple of strings, not {type(value).__name__}"
        ) from None
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"{field_name} of a selection must be strings, not {type(name).__name__}: {name!r}"
            )
    return names


EVERYTHING = Selection()
"""The selection of all documents of a store."""
