"""Reading XLIFF 1.2 and 2.x: each pair of a source and a target is a row with a field for each language."""

from collections.abc import Iterator
from dataclasses import replace

from knnstore.documents.document import Entry, Fields
from knnstore.documents.source_files import Source
from knnstore.documents.translation_memory import TranslationUnit, UnitParser, read_units
from knnstore.errors import InputError

_SEPARATOR = " "
_NAMESPACE = "urn:oasis:names:tc:xliff:document:"
_LANGUAGE = f"http://www.w3.org/XML/1998/namespace{_SEPARATOR}lang"
_UNITS = ("trans-unit", "unit")
"""Names of the elements that are units. A unit is one pair in XLIFF 1.2, and has segments in XLIFF 2.x."""
_PAIRS = ("trans-unit", "segment")
"""Names of the elements that are pairs: their children ``source`` and ``target`` are read."""


def read_xliff(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each pair of an XLIFF file: a unit of XLIFF 1.2, or a segment of XLIFF 2.x.

    An entry is a document that is not read yet. `fields` choose the languages of the text and the source, as
    for `read_translation_memory`. The languages of a source and a target are those that they name
    (``xml:lang``), or else those of the file. Reading the entry of a pair without a target raises an error.
    Inline markup is left out. The id of a document is ``FILE/UNIT``, or ``FILE/UNIT/SEGMENT`` if the unit has
    several segments. FILE is the ``id`` or ``original`` of the element ``file``, and SEGMENT is the id or
    number of the segment. If the unit has no id, the id is a hash of the content. Notes of the unit,
    ``state`` and ``approved`` are metadata.

    Args:
        source: the file.
        fields: names of the fields that contain the text, the id and, for pairs, the source.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not XML, not XLIFF, has no unit, or declares an entity. The units before the
            error are yielded first.
    """
    return read_units(source, fields, _XliffParser)


class _XliffParser(UnitParser):
    """Parses an XLIFF file."""

    format = "XLIFF"
    root = "xliff"
    codes = frozenset({"bpt", "ept", "it", "ph"})
    namespace_separator = _SEPARATOR

    def __init__(self, encoding: str | None) -> None:
        super().__init__(encoding)
        self._languages = {"source": "", "target": ""}  # of the whole XLIFF file
        self._file_languages = self._languages  # of the file whose units are read
        self._file = ""  # name of the file whose units are read
        self._language = ""
        self._unit = TranslationUnit({})  # id and metadata of the unit that is read, without texts
        self._segments: list[TranslationUnit] = []  # of the unit that is read

    def clean_name(self, name: str) -> str:
        namespace, _, local = name.rpartition(_SEPARATOR)
        return local if namespace.startswith(_NAMESPACE) else name

    def start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self.path[-2] if len(self.path) > 1 else ""
        if name == "xliff":
            self._languages = self._read_languages(attributes)
        if name == "file":
            self._file_languages = self._read_languages(attributes)
            self._file = attributes.get("id") or attributes.get("original") or ""
        if name in _UNITS:
            if not {*_UNITS, *_PAIRS}.isdisjoint(self.path[:-1]):
                raise InputError("damaged: a unit is inside another unit or a segment")
            approved = {"approved": attributes["approved"]} if "approved" in attributes else {}
            self._unit, self._segments = TranslationUnit(approved, id=attributes.get("id")), []
        if name in _PAIRS:
            self._segments.append(TranslationUnit({}, id=attributes.get("id")))
        if "state" in attributes and (name == "segment" or (name == "target" and parent == "trans-unit")):
            self._segments[-1].add_metadata("state", attributes["state"])
        if name in ("source", "target") and parent in _PAIRS:
            self._language = attributes.get(_LANGUAGE) or self._file_languages[name]
            self.begin_text()
        if name == "note" and self._is_in_unit():
            self.begin_text()

    def end(self, name: str) -> None:
        parent = self.path[-1] if self.path else ""
        if name in ("source", "target") and parent in _PAIRS:
            self._segments[-1].add_text(self._language, self.take_text())
        elif name == "note" and self._is_in_unit():
            self._unit.add_metadata("note", self.take_text())
        elif name in _UNITS:
            self.complete += self._make_units()

    def _read_languages(self, attributes: dict[str, str]) -> dict[str, str]:
        """Return the codes of the source and target language that an element names.

        A language that the element does not name is that of the whole XLIFF file, empty if it names none.
        XLIFF 1.2 names the languages in each element ``file``, XLIFF 2.x in the outermost element.

        Args:
            attributes: attributes of the element by name.

        Returns:
            The codes by "source" and "target".
        """
        source = attributes.get("srcLang") or attributes.get("source-language")
        target = attributes.get("trgLang") or attributes.get("target-language")
        return {
            "source": source or self._languages["source"],
            "target": target or self._languages["target"],
        }

    def _is_in_unit(self) -> bool:
        """Check whether a note at the present place belongs to a unit, not to an element inside the unit."""
        path = [name for name in self.path if name not in ("note", "notes")]
        return bool(path) and path[-1] in _UNITS

    def _make_units(self) -> Iterator[TranslationUnit]:
        """Yield a pair of texts (`TranslationUnit`) for each segment of the element that was just read.

        Each pair has the metadata of the unit too. A segment without a target gets an empty text in the
        target's language, so that reading it as a document raises an error.
        """
        for number, segment in enumerate(self._segments, 1):
            if self._file_languages["target"] and len(segment.languages) < 2:
                segment.languages.setdefault(self._file_languages["target"].lower(), "")
            names = [self._file, self._unit.id]
            if len(self._segments) > 1:
                names.append(segment.id or str(number))
            id = "/".join(name for name in names if name) if self._unit.id else None
            yield replace(segment, id=id, metadata={**self._unit.metadata, **segment.metadata})
