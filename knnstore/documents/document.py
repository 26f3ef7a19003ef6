"""A document as its user has it, made from a row of anything."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, NoReturn

from knnstore.checks import check_json, check_name
from knnstore.documents.tables import mapping_of, rows_of
from knnstore.documents.values import as_json, is_missing, json_metadata, plain_text
from knnstore.errors import InputError, UnusableDocumentError

OnBad = Callable[[UnusableDocumentError], None]
"""Called with what is wrong with a document that is left out; raise it to go no further."""


class Fields(NamedTuple):
    """Where in a row its text and its id are; what else is there is metadata."""

    text: str = "text"
    id: str = "id"


FIELDS = Fields()


class Reason(StrEnum):
    """Why a document or a file was left out, in few words."""

    KIND = "another kind of file"
    EMPTY = "empty"
    BINARY = "binary"
    ENCODING = "not UTF-8"
    UNREADABLE = "unreadable"
    LINK = "links out of the folder, or to folders"
    SPECIAL = "no regular file"
    TOO_LARGE = "too large"
    OTHER = "unusable"


NOT_MEMBERS = frozenset((Reason.LINK, Reason.SPECIAL))
"""Reasons of what is no part of a folder at all, so that `sync` does not keep what is stored of it."""


class RefusedError(InputError):
    """A file or a text cannot be used, for a reason of a known kind."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class Entry(NamedTuple):
    """A document that is to be read."""

    where: str
    """Where it stands, for messages."""
    read: Callable[[], "TextDocument"]
    in_folder: bool = False
    """Whether it was found in a folder, not named."""
    id: str | None = None
    """Its id, where that is known before it is read."""

    @classmethod
    def refused(
        cls, where: str, error: InputError, *, in_folder: bool = False, id: str | None = None
    ) -> "Entry":
        """Something that cannot be read."""

        def refuse() -> NoReturn:
            raise error

        return cls(where, refuse, in_folder, id)


class Origin(NamedTuple):
    """The place that a document was read from."""

    where: str
    """The file and row, or the number in a list, for messages."""
    in_folder: bool = False
    """True if the file was found in a folder; False if the caller named it."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A document as its user has it.

    Raises:
        InputError: the id, the text or the metadata cannot be stored; says which and why.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = field(default=None, compare=False, repr=False)
    """Where it was read, for messages; None where it was made by the caller."""

    def __post_init__(self) -> None:
        check_name(self.id, "the id")
        if not self.text.strip():
            raise RefusedError("the text is empty", Reason.EMPTY)
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the text holds half a surrogate pair: it is not Unicode") from error
        check_json(self.metadata, "the metadata")

    @property
    def place(self) -> str:
        """Its id and where it was read, for messages."""
        return f"document {self.id!r}" + (f" ({self.origin.where})" if self.origin is not None else "")

    def read_at(self, origin: Origin) -> "TextDocument":
        """Return the same document with its origin; an origin that it has already stays."""
        if self.origin is not None:
            return self
        document = copy(self)
        object.__setattr__(document, "origin", origin)
        return document

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @classmethod
    def from_row(cls, row: object, fields: Fields = FIELDS) -> "TextDocument":
        """Read a row ``{"id", "text", ...metadata}``, or a bare text.

        A row without an id is known by a hash of its text, so that adding it again is no change.

        Raises:
            InputError: the row has no text, or something in it is of a wrong type.
        """
        if isinstance(row, TextDocument):
            return row
        row = plain_text(mapping_of(row))
        if isinstance(row, str):
            row = {fields.text: row}
        if not isinstance(row, Mapping):
            raise InputError(f"a document is an object with a {fields.text!r}, not {type(row).__name__}")
        text, id = row.get(fields.text), row.get(fields.id)
        if is_missing(text):
            raise without_text(fields, row)
        text = plain_text(text)
        if not isinstance(text, str):
            raise InputError(f"{fields.text!r} is {type(text).__name__}, not a string")
        if is_missing(id):
            id = "sha256:" + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        name = as_json(id)
        if isinstance(name, float) and name.is_integer():  # integers of a column in which some are missing
            name = int(name)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise InputError(f"{fields.id!r} is {type(id).__name__}, not a string or an integer")
        # As it will be read back (a tuple is a list then), so that adding it again is no change.
        metadata = json_metadata({key: value for key, value in row.items() if key not in fields})
        return cls(str(name), text, metadata)


def documents_of(
    rows: Iterable[object], *, source: str = "document", on_bad: OnBad | None = None
) -> Iterator[TextDocument]:
    """Turn rows, bare texts or `TextDocument`s into documents, refusing repeated ids.

    Args:
        rows: any iterable, also a `datasets` stream, read once, one row at a time; or a table of pandas,
            polars or pyarrow, whose columns ``text``, ``id`` and any others are.
        source: what the rows are, for messages; the row's number from 1 is added.
        on_bad: called for each row that cannot be used, which is then left out; None raises.

    Raises:
        InputError: `rows` is one document and not many; or a row cannot be used and `on_bad` is
            None, which names the source and the row.
    """
    if isinstance(rows, str | bytes | Mapping | TextDocument):
        hint = ": give one of its values" if isinstance(rows, Mapping) and type(rows) is not dict else ""
        raise InputError(f"documents are a list or another iterable, not one {type(rows).__name__}{hint}")
    entries = (
        Entry(f"{source} {number}", partial(TextDocument.from_row, row))
        for number, row in enumerate(rows_of(rows), start=1)
    )
    return unique(entries, on_bad)


def without_text(fields: Fields, names: Iterable[object]) -> InputError:
    """Return the error for a row or table without a text, with the names of the fields that it has."""
    if fields.text in (names := list(names)):
        return InputError(f"no {fields.text!r}: it is null")
    there = ", ".join(repr(name) for name in names if isinstance(name, str) and name != fields.id)
    found = f"; there is {there[:200]}: name the field that is the text (--text-field)" if there else ""
    return InputError(f"no {fields.text!r}{found}")


def unique(entries: Iterable[Entry], on_bad: OnBad | None) -> Iterator[TextDocument]:
    """Read the documents, and refuse ids that came before; see `documents_of`."""
    seen: dict[str, str] = {}
    for where, read, in_folder, id in entries:
        try:
            document = read()
            if document.id in seen:
                hint = "" if id is None else ": give the folder that both are in"
                raise InputError(f"the id {document.id!r} was already at {seen[document.id]}{hint}")
        except InputError as error:
            reason = error.reason if isinstance(error, RefusedError) else Reason.OTHER
            located = UnusableDocumentError(
                f"{where}: {error}", in_folder=in_folder, id=id, where=where, reason=reason
            )
            if on_bad is None:
                raise located from error
            on_bad(located)
            continue
        seen[document.id] = where
        yield document.read_at(Origin(where, in_folder))
