"""The kinds of files: lines of JSON, tables of text, parquet, and texts that are one document."""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from knnstore.documents.document import Entry, Fields, TextDocument, without_text
from knnstore.documents.places import PARQUET, Place
from knnstore.documents.values import as_json
from knnstore.errors import InputError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LONGEST_CELL = 1 << 30
_ROWS_AT_ONCE = 256

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise, a damaged .gz included."""


def entries_of_file(place: Place, fields: Fields) -> Iterator[Entry]:
    """The documents of a file; what `UNREADABLE` names may be raised between them."""
    file = Path(place.path)
    if place.is_text:
        yield Entry(place.path, lambda: TextDocument(place.id, _whole(place)), id=place.id)
    elif place.suffix == PARQUET:
        yield from _parquet_entries(place.path, fields)
    else:
        with _opened(place) as stream:
            if place.suffix in _DELIMITERS:
                yield from _table_entries(str(file), stream, _DELIMITERS[place.suffix], fields)
            else:
                yield from json_entries(str(file), stream, fields)


def json_entries(name: str, lines: Iterable[bytes], fields: Fields) -> Iterator[Entry]:
    """The documents of JSON Lines."""
    empty = True
    for number, line in enumerate(lines, start=1):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            empty = False
            yield Entry(f"{name} row {number}", partial(_parsed, line, fields))
    if empty:
        yield Entry.refused(name, InputError("the file is empty"))


def _parsed(line: bytes, fields: Fields) -> TextDocument:
    text = decoded(line)
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    return TextDocument.from_row(row, fields)


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's reader would take."""
    raise InputError(f"the metadata cannot be stored as JSON: {name} is no JSON, write null")


def _table_entries(name: str, stream: IO[bytes], delimiter: str, fields: Fields) -> Iterator[Entry]:
    """The documents of a table whose first line names the columns; its cells are text."""
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))  # a document is longer than a cell
    lines = codecs.iterdecode(stream, "utf-8-sig")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        columns = next(rows, None)
        if columns is None:
            yield Entry.refused(name, InputError("the file is empty"))
        elif fields.text not in columns:
            yield Entry.refused(name, without_text(fields, columns))
        else:
            for number, cells in enumerate((row for row in rows if row), start=2):
                yield Entry(f"{name} row {number}", partial(_from_cells, columns, cells, fields))
    except csv.Error as error:
        yield Entry.refused(f"{name} line {rows.line_num}", InputError(f"not a table: {error}"))
    except UnicodeDecodeError as error:
        yield Entry.refused(f"{name} line {rows.line_num + 1}", InputError(f"not UTF-8: {error.reason}"))


def _from_cells(columns: list[str], cells: list[str], fields: Fields) -> TextDocument:
    if len(cells) != len(columns):
        raise InputError(f"{len(cells)} cells under {len(columns)} names of columns")
    row = dict(zip(columns, cells, strict=True))
    if not row.get(fields.id):
        row.pop(fields.id, None)
    return TextDocument.from_row(row, fields)


def _parquet_entries(name: str, fields: Fields) -> Iterator[Entry]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        lacking = InputError("reading it needs pyarrow: install it with pip install 'knnstore[parquet]'")
        yield Entry.refused(name, lacking)
        return
    try:
        with ParquetFile(name) as table:
            if fields.text not in table.schema_arrow.names:
                yield Entry.refused(name, without_text(fields, table.schema_arrow.names))
                return
            number = 0
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield Entry(f"{name} row {number}", partial(TextDocument.from_row, as_json(row), fields))
    except ArrowException as error:
        yield Entry.refused(name, InputError(f"not parquet: {' '.join(str(error).split())}"))


def _whole(place: Place) -> str:
    try:
        with _opened(place) as stream:
            return decoded(stream.read())
    except UNREADABLE as error:
        raise unreadable(error) from error


def _opened(place: Place) -> IO[bytes]:
    return gzip.open(place.path) if place.is_compressed else Path(place.path).open("rb")  # type: ignore[return-value]


def decoded(data: bytes) -> str:
    """The text of some bytes.

    Raises:
        InputError: they are none.
    """
    if not data:
        raise InputError("the file is empty")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError("UTF-16 by its first bytes: save it as UTF-8")
    if b"\0" in data:
        raise InputError(f"binary data (a NUL byte at {data.index(0)}), not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from error


def unreadable(error: Exception) -> InputError:
    """Say why a file cannot be read."""
    return InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}")
