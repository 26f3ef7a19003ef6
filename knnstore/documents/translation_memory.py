"""Reading translation memories (TMX 1.4): each translation unit is a row with a field for each language.

A translation unit is a text in several languages, such as a sentence and its translation. `UnitParser` is the
base class of the parsers of this and other formats. It parses the file in pieces, with the expat parser of
the standard library. Entities can expand to any size, or name other files, so a file that declares an entity
is refused at the declaration. A document type without declarations is accepted, because expat reads no other
file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from xml.parsers import expat

from knnstore.documents.document import SOURCE, Entry, Fields, Reason, RefusedError, TextDocument
from knnstore.documents.source_files import MAX_DOCUMENT_BYTES, Source, is_utf8, make_too_large_error
from knnstore.errors import InputError

_PIECE_BYTES = 1 << 16
_MAX_DEPTH = 256
_TEXTS = ("seg", "note", "prop")
"""Elements whose text is kept: segments, notes and properties."""
_DATES = ("creationdate", "changedate")
"""Attributes of a translation unit that become metadata."""


def read_translation_memory(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each translation unit of a TMX file.

    An entry is a document that is not read yet. If a unit cannot be used, reading its entry raises the error.
    A unit is a row with a field for each language, whose name is the value of ``xml:lang``; its value is the
    text without inline markup. `fields` choose the languages of the text and the source; other languages are
    left out. Upper and lower case do not matter. The name ``de`` also finds ``de-AT``, if no other language
    begins with ``de-``. The id of the document is the unit's ``tuid``. Notes, properties and dates are
    metadata; a property with the name of one of the fields is renamed, for example to ``prop:source``.

    Args:
        source: the file.
        fields: names of the fields that contain the text, the id and, for pairs, the source.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not XML, not TMX, has no unit, or declares an entity. The units before the
            error are yielded first.
    """
    return read_units(source, fields, _TmxParser)


def read_units(source: Source, fields: Fields, parser_class: "type[UnitParser]") -> Iterator[Entry]:
    """Yield an entry for each translation unit of a file, as `read_translation_memory` does.

    Args:
        source: the file.
        fields: names of the fields that contain the text, the id and, for pairs, the source.
        parser_class: class that parses the format of the file.

    Raises:
        OSError: the file cannot be read.
        InputError: the file has another format, has no unit, or declares an entity.
    """
    parser = parser_class(None if is_utf8(source.encoding) else source.encoding)
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
class TranslationUnit:
    """A translation unit: a text in several languages."""

    metadata: dict[str, str]
    """Dates, notes and properties, by name."""
    languages: dict[str, str | None] = field(default_factory=dict)
    """The text in each language, by the language's code in lower case. None if the unit has several texts in
    this language, because it is not known which one to use."""
    id: str | None = None
    """Id of the unit; None if the file gives no id."""

    def add_text(self, language: str, text: str) -> None:
        """Add the text in a language. If the language already has a text, its value becomes None."""
        is_second = language.lower() in self.languages
        self.languages[language.lower()] = None if is_second else text

    def add_metadata(self, name: str, value: str) -> None:
        """Add a value to the metadata. Several values of the same name are joined, one value a line."""
        earlier = self.metadata.get(name)
        self.metadata[name] = value if earlier is None else f"{earlier}\n{value}"


def _convert_unit(unit: TranslationUnit, fields: Fields) -> TextDocument:
    """Convert a translation unit to a document.

    Args:
        unit: the unit.
        fields: the language of the text and, for pairs, of the source, and the name of the field for the id.

    Raises:
        InputError: the unit has no text, or several texts, in one of the languages; or the document is not
            valid.
    """
    taken = {fields.text, fields.id, fields.source, SOURCE}
    row: dict[str, Any] = {
        f"prop:{name}" if name in taken else name: value for name, value in unit.metadata.items()
    }
    row[fields.id] = unit.id
    for name in [fields.text] if fields.source is None else [fields.text, fields.source]:
        text = _find_language(unit.languages, name)
        if text is not None:
            row[name] = text
        else:
            names = ", ".join(map(repr, unit.languages)) or "no language"
            raise InputError(
                f"no language {name!r}, or several texts or variants of it; the languages are {names}: "
                "name the languages of text and source (--text-field, --source-field)"
            )
    return TextDocument.from_row(row, fields)


def _find_language(languages: dict[str, str | None], name: str) -> str | None:
    """Return the text in a language, or in its only regional variant.

    Args:
        languages: text by code of the language in lower case, see `TranslationUnit.languages`.
        name: code of the language. ``de`` also finds ``de-at`` if no other code begins with ``de-``.

    Returns:
        The text; None if no language matches, several variants match, or the language has several texts.
    """
    code = name.lower()
    if code in languages:
        return languages[code]
    variants = [text for language, text in languages.items() if language.startswith(f"{code}-")]
    return variants[0] if len(variants) == 1 else None


class UnitParser(ABC):
    """Parses an XML file of translation units, given in pieces, and yields each unit when it is complete.

    A subclass handles the elements of one format: its methods `start` and `end` are called for each element,
    and append complete units to `complete`.

    Args:
        encoding: encoding of the file; None uses the encoding that the file names, or UTF-8.
    """

    format: ClassVar[str]
    """Name of the format, for messages."""
    root: ClassVar[str]
    """Name of the outermost element of a file."""
    codes: ClassVar[frozenset[str]]
    """Names of elements inside a text whose content is formatting codes of the original file, not text."""
    namespace_separator: ClassVar[str | None] = None
    """Character that expat puts between the namespace and the name of an element; None ignores namespaces."""

    def __init__(self, encoding: str | None) -> None:
        self._parser = expat.ParserCreate(encoding, self.namespace_separator)
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._add_characters
        self._parser.EntityDeclHandler = self._refuse_declaration
        self._parser.SkippedEntityHandler = self._refuse_reference
        self.complete: list[TranslationUnit] = []
        """Units that have ended; `parse` yields them and empties the list."""
        self.path: list[str] = []
        """Names of the open elements, from the outermost to the innermost."""
        self._text: list[str] | None = None  # of the segment, note or property; None outside of them
        self._length = 0
        self._open_codes = 0  # number of open elements whose content is no text

    @abstractmethod
    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Handle the start tag of an element. `path` already ends with the element's name.

        Args:
            name: name of the element, a result of `clean_name`.
            attributes: attributes of the element by name.
        """

    @abstractmethod
    def end(self, name: str) -> None:
        """Handle the end tag of an element. `path` ends with the name of the element's parent.

        Args:
            name: name of the element, a result of `clean_name`.
        """

    def clean_name(self, name: str) -> str:
        """Return the name that `start`, `end` and `path` use for an element, from the name that expat gives.

        The name is not changed, unless a subclass overrides the method.
        """
        return name

    def begin_text(self) -> None:
        """Start collecting the text of the open element; `take_text` ends the collection."""
        self._text, self._length, self._open_codes = [], 0, 0

    def take_text(self) -> str:
        """Stop collecting, and return the text since `begin_text` without inline markup."""
        text, self._text = "".join(self._text or ()), None
        return text

    def parse(self, piece: bytes) -> Iterator[TranslationUnit]:
        """Parse the next piece of the file, and yield the units that end in it.

        Args:
            piece: bytes of the file; empty bytes mark the end of the file.

        Raises:
            InputError: the file is not XML, has another format, or declares an entity. The units before the
                error are yielded first.
        """
        problem = None
        try:
            self._parser.Parse(piece, not piece)
        except expat.ExpatError as error:
            problem = InputError(f"not XML, or damaged: {error}")
        except InputError as error:
            problem = error
        complete, self.complete = self.complete, []
        yield from complete
        if problem is not None:
            raise problem

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        """Handle a start tag: check format and nesting, then call `start`. Expat calls this method.

        Raises InputError if the outermost element is not `root`, or the elements are nested too deeply.
        """
        name = self.clean_name(name)
        if not self.path and name != self.root:
            raise InputError(f"not {self.format}: its first element is {name[:80]!r}")
        self.path.append(name)
        if len(self.path) > _MAX_DEPTH:
            raise InputError(f"its elements are nested more than {_MAX_DEPTH} deep")
        if name in self.codes:
            self._open_codes += 1
        self.start(name, attributes)

    def _end(self, name: str) -> None:
        """Handle an end tag: remove the element from `path`, then call `end`. Expat calls this method."""
        name = self.path.pop()
        if name in self.codes:
            self._open_codes -= 1
        self.end(name)

    def _add_characters(self, text: str) -> None:
        """Append text to the text of the current segment. Expat calls this method.

        Text outside of segments, and inside of elements whose names are in `codes`, is dropped.

        Raises:
            InputError: if the segment has more than `MAX_DOCUMENT_BYTES` characters.
        """
        if self._text is None or self._open_codes:
            return
        self._text.append(text)
        self._length += len(text)
        if self._length > MAX_DOCUMENT_BYTES:
            raise make_too_large_error("a segment")

    def _refuse_declaration(self, name: str, *_: Any) -> None:
        """Raise InputError for the declaration of an entity."""
        raise InputError(f"it declares the entity {name[:80]!r}: entities are not read")

    def _refuse_reference(self, name: str, *_: Any) -> None:
        """Raise InputError for a reference to an entity that the file does not declare."""
        raise InputError(f"the entity {name[:80]!r} is not declared here: entities are not read")


class _TmxParser(UnitParser):
    """Parses a TMX file."""

    format = "TMX"
    root = "tmx"
    codes = frozenset({"bpt", "ept", "it", "ph", "ut"})

    def __init__(self, encoding: str | None) -> None:
        super().__init__(encoding)
        self._unit: TranslationUnit | None = None
        self._language = ""
        self._property = ""  # name of the note or property that is read

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            dates = {date: attributes[date] for date in _DATES if date in attributes}
            self._unit = TranslationUnit(dates, id=attributes.get("tuid"))
        elif name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang") or ""
        elif name in _TEXTS:
            self._property = attributes.get("type", name)
            self.begin_text()

    def end(self, name: str) -> None:
        if name == "tu" and self._unit is not None:
            self.complete.append(self._unit)
            self._unit = None
        elif name in _TEXTS:
            text = self.take_text()
            if self._unit is None:  # a note or a property of the whole file
                return
            if name == "seg":
                self._unit.add_text(self._language, text)
            else:
                self._unit.add_metadata(self._property, text)
