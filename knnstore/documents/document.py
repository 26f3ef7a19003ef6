"""`TextDocument`, its conversion from rows of any kind, and reading documents with error handling.

A row is an object with a text, an id and metadata, such as a line of a JSON Lines file or of a table.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, NoReturn

from knnstore.checks import check_json, check_name
from knnstore.documents.python_values import (
    as_mapping,
    is_missing,
    iterate_rows,
    to_json_metadata,
    to_json_or_same,
    unwrap_string,
)
from knnstore.errors import InputError, UnusableDocumentError

OnBad = Callable[[UnusableDocumentError], None]
"""Function that is called with the error of each document that is skipped.

It may raise the error, to stop reading.
"""


SOURCE = "source"
"""Metadata field that keeps the source of a pair."""


class Fields(NamedTuple):
    """Names of a row's fields that contain the text, the id and the source; other fields are metadata."""

    text: str = "text"
    """Name of the field with the text."""
    id: str = "id"
    """Name of the field with the id."""
    source: str | None = None
    """Name of the field with the source, for pairs of a source and a text; see `TextDocument.source`. None if
    the texts have no sources; then a field with the name "source" is metadata."""


FIELDS = Fields()
"""Default names of the fields."""
PAIR_FIELDS = Fields(source=SOURCE)
"""Default names of the fields for pairs of a source and a text."""


class Reason(StrEnum):
    """Reason why a document or a file is skipped. The values are shown to users."""

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
"""Reasons for which a path in a folder is treated as if it did not exist.

If the path was stored as a document before, `sync` removes the document, as for a missing file.
"""


class RefusedError(InputError):
    """Error for a file or a text that cannot be used; the attribute `reason` has the kind of problem.

    Args:
        message: message for the user.
        reason: kind of problem.
    """

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


class Entry(NamedTuple):
    """A document that is not read yet, with a function that reads it."""

    where: str
    """Place of the document, such as file and row, for messages."""
    read: Callable[[], "TextDocument"]
    """Function that reads and returns the document; it raises `InputError` if the document cannot be used."""
    in_folder: bool = False
    """True if the file was found in a folder; False if the caller named it."""
    id: str | None = None
    """Id of the document; None if it is known only after reading."""

    @classmethod
    def from_error(
        cls, where: str, error: InputError, *, in_folder: bool = False, id: str | None = None
    ) -> "Entry":
        """Return an entry for a document that is known to be unusable. Reading the entry raises an error.

        Args:
            where: place of the document, for messages.
            error: the error that the entry's function `read` raises.
            in_folder: True if the file was found in a folder; False if the caller named it.
            id: id of the document; None if it is not known.
        """

        def refuse() -> NoReturn:
            """Raise the error of the document."""
            raise error

        return cls(where, refuse, in_folder, id)


class Origin(NamedTuple):
    """Place from which a document was read."""

    where: str
    """File and row, or number in a list, as text for messages."""
    in_folder: bool = False
    """True if the file was found in a folder; False if the caller named it."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text with an id and metadata, before it is tokenized.

    Raises:
        InputError: the id, the text or the metadata cannot be stored; the message says which and why.
    """

    id: str
    """Id of the document, unique in its domain."""
    text: str
    """Text of the document; it contains more than white space."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata, JSON values by name."""
    origin: Origin | None = field(default=None, compare=False, repr=False)
    """Place from which the document was read, for messages; None if a program made the document itself."""
    source: str | None = None
    """Input text of an encoder-decoder model, for example the sentence of which `text` is the translation.
    None for a text alone. The field "source" of `metadata` has the same value, so the catalog stores it."""

    def __post_init__(self) -> None:
        check_name(self.id, "the id")
        _check_text(self.text, "text")
        if self.source is not None:
            _check_text(self.source, "source")
            if self.metadata.get(SOURCE, self.source) != self.source:
                raise InputError(
                    f"the metadata field {SOURCE!r} is not the source of the pair: rename the field"
                )
            object.__setattr__(self, "metadata", {**self.metadata, SOURCE: self.source})
        check_json(self.metadata, "the metadata")

    @property
    def place(self) -> str:
        """Id and origin of the document as text for messages, for example "document 'a' (a.txt)"."""
        return f"document {self.id!r}" + (f" ({self.origin.where})" if self.origin is not None else "")

    def with_origin(self, origin: Origin) -> "TextDocument":
        """Return a copy of the document that has an origin (place from which it was read).

        If the document already has an origin, the document itself is returned.

        Args:
            origin: origin of the copy.
        """
        if self.origin is not None:
            return self
        document = copy(self)
        object.__setattr__(document, "origin", origin)
        return document

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text, or of source and text together, in UTF-8, 64 hexadecimal digits."""
        return _hash_content(self.text, self.source)

    @classmethod
    def from_row(cls, row: object, fields: Fields = FIELDS) -> "TextDocument":
        """Convert a row to a document. A row has a text, an id and metadata; it may also be a text alone.

        If the row has no id, the document's id is a hash of the content. So a text that is added twice is
        stored once. A `TextDocument` is returned unchanged, with one exception: if `fields` name a source and
        the document has no source, a copy is returned whose source is taken from the metadata.

        Args:
            row: a mapping, an object that behaves like a mapping (such as a pandas Series), or a string.
            fields: names of the fields with the text, the id and the source; all other fields become
                metadata.

        Raises:
            InputError: the text is missing or empty; the source is missing, and `fields` name one; the id is
                not valid; or a value has a wrong type.
        """
        if isinstance(row, TextDocument):
            if fields.source is None or row.source is not None:
                return row
            others = {name: value for name, value in row.metadata.items() if name != fields.source}
            return cls(row.id, row.text, others, row.origin, _get_source(row.metadata, fields.source))
        row = unwrap_string(as_mapping(row))
        if isinstance(row, str):
            row = {fields.text: row}
        if not isinstance(row, Mapping):
            raise InputError(f"a document is an object with a {fields.text!r}, not {type(row).__name__}")
        text, id = row.get(fields.text), row.get(fields.id)
        if is_missing(text):
            raise make_missing_text_error(fields, row)
        text = unwrap_string(text)
        if not isinstance(text, str):
            raise InputError(f"{fields.text!r} is {type(text).__name__}, not a string")
        source = None if fields.source is None else _get_source(row, fields.source)
        if is_missing(id):
            id = "sha256:" + _hash_content(text, source)[:16]
        name = to_json_or_same(id)
        if isinstance(name, float) and name.is_integer():  # pandas: integers in a column with missing values
            name = int(name)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise InputError(f"{fields.id!r} is {type(id).__name__}, not a string or an integer")
        # JSON values, as they will be read back (a tuple becomes a list), so adding it again changes nothing.
        metadata = to_json_metadata(
            {key: value for key, value in row.items() if key is None or key not in fields}
        )
        return cls(str(name), text, metadata, source=source)


def _check_text(text: str, name: str) -> None:
    """Check that a text, or the source of a text, can be stored.

    Args:
        text: the text.
        name: ``text`` or ``source``, for messages.

    Raises:
        RefusedError: the text is empty or has only white space.
        InputError: the text is not valid Unicode.
    """
    if not text.strip():
        raise RefusedError(f"the {name} is empty", Reason.EMPTY)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the {name} holds half a surrogate pair: it is not Unicode") from error


def _get_source(row: Mapping[Any, Any], name: str) -> str:
    """Return the source of a text from a row or from metadata.

    Args:
        row: values of the row by field name.
        name: name of the field with the source.

    Raises:
        InputError: the field is missing, or is not a string.
    """
    source = unwrap_string(row.get(name))
    if is_missing(source):
        raise InputError(
            f"no {name!r}: for this model a document is a pair of a source and a text; name the field of "
            "the source with --source-field"
        )
    if not isinstance(source, str):
        raise InputError(f"{name!r} is {type(source).__name__}, not a string")
    return source


def _hash_content(text: str, source: str | None) -> str:
    """Return the SHA-256 of a text, or of a source and a text together, as 64 hexadecimal digits.

    The length of the source is hashed too, so the pairs ("ab", "c") and ("a", "bc") have different hashes.
    """
    content = text if source is None else f"{len(source)}:{source}{text}"
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()


def convert_rows_to_documents(
    rows: Iterable[object],
    *,
    source: str = "document",
    fields: Fields = FIELDS,
    on_bad: OnBad | None = None,
) -> Iterator[TextDocument]:
    """Convert each row, text or `TextDocument` of an iterable or a table to a document, and yield it.

    An empty iterable yields nothing.

    Args:
        rows: an iterable, such as a list or a stream of the package `datasets`, which is read once, one row
            at a time; or a table of pandas, polars or pyarrow. A row, or the table, has the field ``text``;
            it may have the field ``id``; all other fields are metadata.
        source: name of a row in messages; the number of the row, from 1, is appended.
        fields: names of the fields, if they are not ``text`` and ``id``; for pairs also the name of the field
            with the source.
        on_bad: function that is called with the error of each row that cannot be used; then the row is
            skipped. None raises the error.

    Raises:
        InputError: `rows` is a single document or not iterable.
        UnusableDocumentError: a row cannot be used, or its id was read before, and `on_bad` is None. The
            message names the source and the row.
    """
    if isinstance(rows, str | bytes | Mapping | TextDocument):
        hint = ": give one of its values" if isinstance(rows, Mapping) and type(rows) is not dict else ""
        raise InputError(f"documents are a list or another iterable, not one {type(rows).__name__}{hint}")

    def make_entry(number: int, row: object) -> Entry:
        """Return the entry of a row; a document that was read from a file keeps its origin."""
        origin = row.origin if isinstance(row, TextDocument) else None
        place = origin or Origin(f"{source} {number}")
        return Entry(place.where, partial(TextDocument.from_row, row, fields), place.in_folder)

    entries = (make_entry(number, row) for number, row in enumerate(iterate_rows(rows), start=1))
    return read_entries(entries, on_bad)


def make_missing_text_error(fields: Fields, names: Iterable[object]) -> InputError:
    """Return, without raising it, the error for a row or a table without a text.

    Args:
        fields: the expected names of the fields with the text and the id.
        names: names of the fields or columns that exist; the message lists them. If the name of the text is
            among them, the message says that the text is null.
    """
    if fields.text in (names := list(names)):
        return InputError(f"no {fields.text!r}: it is null")
    other_names = ", ".join(repr(name) for name in names if isinstance(name, str) and name != fields.id)
    hint = (
        f", the fields are {other_names[:200]}: name the field of the text with --text-field"
        if other_names
        else ""
    )
    return InputError(f"no {fields.text!r}{hint}")


def read_entries(entries: Iterable[Entry], on_bad: OnBad | None) -> Iterator[TextDocument]:
    """Read the documents of entries, and yield the documents. A second document with the same id is an error.

    Args:
        entries: documents that are not read yet. Each is read when the caller requests the next document.
        on_bad: function that is called with the error of each document that cannot be used; then the document
            is skipped. None raises the error.

    Raises:
        UnusableDocumentError: a document cannot be used, or an earlier document has the same id, and `on_bad`
            is None.
    """
    places_by_id: dict[str, str] = {}
    for where, read, in_folder, id in entries:
        try:
            document = read()
            if document.id in places_by_id:
                hint = "" if id is None else ": give the folder that contains both"
                raise InputError(
                    f"the id {document.id!r} was already used at {places_by_id[document.id]}{hint}"
                )
        except InputError as error:
            reason = error.reason if isinstance(error, RefusedError) else Reason.OTHER
            located = UnusableDocumentError(
                f"{where}: {error}", in_folder=in_folder, id=id, where=where, reason=reason
            )
            if on_bad is None:
                raise located from error
            on_bad(located)
            continue
        places_by_id[document.id] = where
        yield document.with_origin(Origin(where, in_folder))
