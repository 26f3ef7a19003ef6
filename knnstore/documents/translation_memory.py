"""Reading translation memories (TMX 1.4): each translation unit is a row with a field for each language.

The file is parsed in pieces, with the expat parser of the standard library. A file that declares an entity is
refused where the declaration begins, before the entity is used: entities can expand to any size, or name
other files. Expat reads no other file, so a document type without declarations is harmless.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from xml.parsers import expat

from knnstore.documents.document import SOURCE, Entry, Fields, Reason, RefusedError, TextDocument
from knnstore.documents.source_files import MAX_DOCUMENT_BYTES, Source, is_utf8, make_too_large_error
from knnstore.errors import InputError

_PIECE_BYTES = 1 << 16
_TEXTS = ("seg", "note", "prop")
"""Elements whose text is kept: segments, notes and properties."""
_CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})
"""Elements in a segment whose content is markup of the original file, and not text."""
_DATES = ("creationdate", "changedate")
"""Attributes of a translation unit that become metadata."""


def read_translation_memory(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each translation unit of a TMX file.

    An entry is a document that is not read yet. If a unit cannot be used, reading its entry raises the error.
    A unit has a field for each language (``xml:lang``), with the text without inline markup. `fields` name
    the languages of text and source: ``de`` also means the only language that begins with ``de-``, and upper
    and lower case do not matter. Other languages are left out. The id is the unit's ``tuid``; notes,
    properties and dates are metadata. A property with the name of one of the fields gets ``prop:`` before it.

    Args:
        source: the file.
        fields: names of the fields that contain the text, the id and, for pairs, the source.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not XML, not TMX, has no unit, or declares an entity. The units before are
            yielded.
    """
    parser = _UnitParser(None if is_utf8(source.encoding) else source.encoding)
    number = 0
    with source.open() as stream:
        is_open = True
        while is_open:
            piece = stream.read(_PIECE_BYTES)
            is_open = bool(piece)
            for unit in parser.parse(piece):
                number += 1
                yield Entry(f"{source.name} unit {number}", partial(_convert_unit, unit, fields))
    if not number:
        raise RefusedError("the file has no translation unit", Reason.EMPTY)


@dataclass
class _Unit:
    """A translation unit: a text in several languages."""

    metadata: dict[str, str]
    """Dates, notes and properties, by name."""
    languages: dict[str, str | None] = field(default_factory=dict)
    """The text in each language, by the language's code in lower case; None if there are several texts."""
    id: str | None = None
    """The unit's ``tuid``; None if it has none."""


def _convert_unit(unit: _Unit, fields: Fields) -> TextDocument:
    """Convert a translation unit to a document.

    Args:
        unit: the unit.
        fields: names of the fields that contain the text, the id and, for pairs, the source.

    Raises:
        InputError: the unit lacks a language, or the document is not valid.
    """
    taken = {fields.text, fields.id, fields.source, SOURCE}
    row: dict[str, Any] = {f"prop:{of}" if of in taken else of: value for of, value in unit.metadata.items()}
    row[fields.id] = unit.id
    for name in [fields.text] if fields.source is None else [fields.text, fields.source]:
        text = _find_language(unit.languages, name)
        if text is not None:
            row[name] = text
        else:
            names = ", ".join(map(repr, unit.languages)) or "no language"
            raise InputError(
                f"no language {name!r}, or several texts or variants of it; there is {names}: "
                "name the languages of text and source (--text-field, --source-field)"
            )
    return TextDocument.from_row(row, fields)


def _find_language(languages: dict[str, str | None], name: str) -> str | None:
    """Return the text in a language; None if there is none, or several texts or variants of the language.

    Args:
        languages: the text of each language, by its code in lower case.
        name: code of the language, with or without a region.
    """
    code = name.lower()
    if code in languages:
        return languages[code]
    variants = [text for language, text in languages.items() if language.startswith(f"{code}-")]
    return variants[0] if len(variants) == 1 else None


class _UnitParser:
    """Parses a TMX file in pieces, and returns the translation units that are complete.

    Args:
        encoding: encoding of the file; None for the encoding that the file names, or UTF-8.
    """

    def __init__(self, encoding: str | None) -> None:
        self._parser = expat.ParserCreate(encoding)
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._add_text
        self._parser.EntityDeclHandler = self._refuse_declaration
        self._parser.SkippedEntityHandler = self._refuse_reference
        self._complete: list[_Unit] = []
        self._depth = 0
        self._unit: _Unit | None = None
        self._language = ""
        self._property = ""  # name of the note or property that is read
        self._text: list[str] | None = None  # of the segment, note or property; None outside of them
        self._length = 0
        self._codes = 0  # number of open elements whose content is no text

    def parse(self, piece: bytes) -> Iterator[_Unit]:
        """Parse the next piece of the file, and yield the units that end in it.

        Args:
            piece: the bytes; empty at the end of the file.

        Raises:
            InputError: the file is not XML, is not TMX, or declares an entity. The units before are yielded.
        """
        problem = None
        try:
            self._parser.Parse(piece, not piece)
        except expat.ExpatError as error:
            problem = InputError(f"not XML, or damaged: {error}")
        except InputError as error:
            problem = error
        complete, self._complete = self._complete, []
        yield from complete
        if problem is not None:
            raise problem

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        """Handle the beginning of an element."""
        if not self._depth and name != "tmx":
            raise InputError(f"not TMX: its first element is {name[:80]!r}")
        self._depth += 1
        if name == "tu":
            dates = {date: attributes[date] for date in _DATES if date in attributes}
            self._unit = _Unit(dates, id=attributes.get("tuid"))
        elif name == "tuv":
            self._language = (attributes.get("xml:lang") or attributes.get("lang") or "").lower()
        elif name in _TEXTS:
            self._property = attributes.get("type", name)
            self._text, self._length, self._codes = [], 0, 0
        elif name in _CODES:
            self._codes += 1

    def _end(self, name: str) -> None:
        """Handle the end of an element."""
        self._depth -= 1
        if name in _CODES:
            self._codes -= 1
        elif name == "tu" and self._unit is not None:
            self._complete.append(self._unit)
            self._unit = None
        elif name in _TEXTS:
            text, self._text = "".join(self._text or ()), None
            if self._unit is None:  # a note or a property of the whole file
                return
            if name == "seg":
                is_second = self._language in self._unit.languages
                self._unit.languages[self._language] = None if is_second else text
            else:
                earlier = self._unit.metadata.get(self._property)
                self._unit.metadata[self._property] = text if earlier is None else f"{earlier}\n{text}"

    def _add_text(self, text: str) -> None:
        """Keep text of a segment, a note or a property, without inline markup."""
        if self._text is None or self._codes:
            return
        self._text.append(text)
        self._length += len(text)
        if self._length > MAX_DOCUMENT_BYTES:
            raise make_too_large_error("a segment")

    def _refuse_declaration(self, name: str, *_: Any) -> None:
        """Refuse the declaration of an entity."""
        raise InputError(f"it declares the entity {name[:80]!r}: entities are not read")

    def _refuse_reference(self, name: str, *_: Any) -> None:
        """Refuse a reference to an entity that is declared in another file."""
        raise InputError(f"the entity {name[:80]!r} is not declared here: entities are not read")
