"""Files that hold a document a row: JSON, JSON Lines, tables of text, parquet."""

import codecs
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import IO, Any, NoReturn

from knnstore.documents.document import Entry, Fields, Reason, RefusedError, TextDocument, without_text
from knnstore.documents.files import (
    MAX_DOCUMENT_BYTES,
    UTF8,
    Source,
    decoded,
    open_regular,
    too_large,
    utf8_lines,
)
from knnstore.documents.values import as_json
from knnstore.errors import InputError

_DELIMITERS = ",;\t|"
_LONGEST_CELL = 1 << 30
_ROWS_AT_ONCE = 256
_EXPANSION = 200
"""Times that a large column of parquet may be larger than in the file."""
_LARGE_COLUMN = 1 << 30  # bytes
_MANY_VALUES = 1 << 25
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*')
"""A first line in which Excel names the delimiter."""


def read_json_lines(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield the documents of JSON Lines: an object a line."""
    with source.open() as stream:
        yield from json_line_entries(source.name, utf8_lines(stream, source.encoding), fields)


def json_line_entries(name: str, lines: Iterable[bytes], fields: Fields) -> Iterator[Entry]:
    """Yield the documents of lines of JSON, in UTF-8."""
    empty = True
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_DOCUMENT_BYTES:
            empty = False
            yield Entry.refused(f"{name} row {number}", too_large("the line"))
            continue
        stripped = line.removeprefix(codecs.BOM_UTF8).strip()
        if not stripped:
            continue
        if empty and stripped in (b"[", b"{"):
            value = "an array" if stripped == b"[" else "an object"
            message = f"not JSON Lines: {value} begins here and goes on in other lines; name the file .json"
            yield Entry.refused(f"{name} row {number}", InputError(message))
            return
        empty = False
        yield Entry(f"{name} row {number}", partial(_from_line, line, fields))
    if empty:
        yield Entry.refused(name, RefusedError("the file is empty", Reason.EMPTY))


def _from_line(line: bytes, fields: Fields) -> TextDocument:
    text = decoded(line, of=" of the line")
    try:
        row = _loaded(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip() if error.msg == "Extra data" else ""
        hint = ""
        if rest.startswith(","):
            hint = "; there is a comma after the object: lines of .jsonl have none between them"
        elif rest:
            hint = "; there is more than one object: give each a line of its own"
        raise InputError(f"not JSON: {error}{hint}") from error
    if isinstance(row, list):
        raise InputError(
            f"a document is an object with a {fields.text!r}, not list; an array of rows belongs in a .json"
        )
    return TextDocument.from_row(row, fields)


def read_json(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield the documents of a JSON file: an array of rows, one row, or a row a line."""
    name, text = source.name, source.text()
    try:
        value = _loaded(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and isinstance(_first_value(text), dict):
            yield from json_line_entries(name, text.encode(UTF8).splitlines(keepends=True), fields)
            return
        hint = "; a comma stands before it" if text[: error.pos].rstrip().endswith(",") else ""
        raise InputError(f"not JSON: {error}{hint}") from error
    if isinstance(value, list):
        if not value:
            raise RefusedError("the array has no rows", Reason.EMPTY)
        for number, row in enumerate(value, start=1):
            yield Entry(f"{name} row {number}", partial(TextDocument.from_row, row, fields))
    elif isinstance(value, dict):
        yield Entry(name, partial(TextDocument.from_row, value, fields))
    else:
        raise InputError(f"the file is an array of rows or one object, not {type(value).__name__}")


def _first_value(text: str) -> Any:
    try:
        return json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return None


def _loaded(text: str) -> Any:
    """Read JSON as the standard has it.

    Raises:
        json.JSONDecodeError: it is no JSON.
        InputError: it is nested too deep, or holds NaN or an infinity, which Python's reader takes.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # an integer of too many digits is a ValueError
        if isinstance(error, InputError):
            raise
        raise InputError(f"not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise InputError(f"the metadata cannot be stored as JSON: {name} is no JSON, write null")


# -- tables of text


class _Lines:
    """Lines of a table as text. It counts them, and remembers what is not UTF-8 in the current row."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._number = 0
        self._row_bytes = 0
        self._problem: RefusedError | None = None

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._number += 1
        self._row_bytes += len(line)
        if self._row_bytes > MAX_DOCUMENT_BYTES:
            error = too_large(f"the row that ends on line {self._number}, or later,")
            raise RefusedError(f"{error}; the rows after it are not read", Reason.TOO_LARGE)
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        text = line.decode(UTF8, "surrogateescape")
        try:
            if self._problem is None and (not text.isascii() or "\0" in text):
                decoded(line, of=f" of line {self._number}")
        except RefusedError as error:
            self._problem = error
        return text

    def end_row(self) -> RefusedError | None:
        """Begin a new row. Returns why the last one is no text, if it is none."""
        problem, self._problem, self._row_bytes = self._problem, None, 0
        return problem


def read_table(source: Source, fields: Fields, *, delimiter: str) -> Iterator[Entry]:
    """Yield the documents of a table whose first row names the columns; its cells are text.

    Where the text's column is not found with `delimiter`, the others of ``, ; | tab`` are tried.
    """
    with source.open() as stream:
        lines = _Lines(utf8_lines(stream, source.encoding))
        yield from _table_entries(source.name, lines, fields, delimiter)


def _table_entries(name: str, lines: _Lines, fields: Fields, delimiter: str) -> Iterator[Entry]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))  # a document is longer than a cell
    first: list[str] = []
    for line in lines:
        first.append(line)
        if line.strip():
            break
    else:
        raise RefusedError("the file is empty", Reason.EMPTY)
    begin = 1
    named = _SEPARATOR.fullmatch(first[-1])
    if named is not None:
        delimiter, begin, first = named[1], len(first) + 1, []
    else:
        delimiter = _sniffed(first[-1], delimiter, fields.text)
    rows = csv.reader(chain(first, lines), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    has_rows = False
    number, line_number = begin - 1, begin
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield Entry.refused(
                f"{name} line {line_number}", InputError(f"not a table: {_csv_problem(error)}")
            )
            return
        number += 1
        problem, where = lines.end_row(), f"{name} row {number}"
        if number != line_number:
            where += f" (line {line_number})"
        line_number = begin + rows.line_num
        if cells is None:
            break
        if not cells:
            continue
        if columns is None:
            if problem is not None:
                raise problem
            columns = cells
            _check_columns(columns, fields)
            continue
        has_rows = True
        if problem is not None:
            yield Entry.refused(where, problem)
        else:
            yield Entry(where, partial(_from_cells, columns, cells, fields))
    if columns is None:
        raise RefusedError("the file is empty", Reason.EMPTY)
    if not has_rows:
        raise RefusedError("there are names of columns, but no row under them", Reason.EMPTY)


def _sniffed(header: str, delimiter: str, text: str) -> str:
    """Return the delimiter with which a header has the text's column, else that which gives most columns."""
    found: dict[str, list[str]] = {}
    for one in (delimiter, *_DELIMITERS):
        try:
            found[one] = next(csv.reader([header], delimiter=one, strict=True), [])
        except csv.Error:  # a name that goes on in the next line
            continue
    for one, columns in found.items():
        if text in columns:
            return one
    widths = {one: len(columns) for one, columns in found.items()}
    return max(widths, key=widths.__getitem__, default=delimiter)


def _check_columns(columns: Sequence[str], fields: Fields) -> None:
    if fields.text not in columns:
        raise without_text(fields, columns)
    for first, at in _repeated_names(columns):
        if columns[at]:
            raise InputError(
                f"columns {first + 1} and {at + 1} are both named {columns[at]!r}: rename one of them"
            )


def _repeated_names(columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places of each name that was there before: the first one's, and its own."""
    places: dict[str, int] = {}
    for at, name in enumerate(columns):
        first = places.setdefault(name, at)
        if first != at:
            yield first, at


def _from_cells(columns: list[str], cells: list[str], fields: Fields) -> TextDocument:
    if len(cells) != len(columns):
        raise InputError(f"{len(cells)} cells under {len(columns)} names of columns")
    row = dict(zip(columns, cells, strict=True))
    if columns.count("") > 1:
        for at, (name, cell) in enumerate(zip(columns, cells, strict=True), start=1):
            if cell and not name:
                raise InputError(f"column {at} has no name, and here it is not empty")
        del row[""]
    if not row.get(fields.id):
        row.pop(fields.id, None)
    return TextDocument.from_row(row, fields)


def _csv_problem(error: csv.Error) -> str:
    said = str(error)
    if said == "unexpected end of data":
        return f"{said}: a quote that is opened in this row is never closed"
    if "new-line character" in said:
        return "a line ends in a lone carriage return: save it with line ends LF or CRLF"
    return f"{said}; the rows after it are not read"


# -- parquet


def read_parquet(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield the documents of a parquet file."""
    name = source.name
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            "reading it needs pyarrow: install it with pip install 'knnstore[parquet]'"
        ) from error
    try:
        with open_regular(name, source.root) as file:
            _check_footer(file)
        with open_regular(name, source.root) as file, ParquetFile(file) as table:
            columns = table.schema_arrow.names
            for _, at in _repeated_names(columns):
                raise InputError(f"two columns are named {columns[at]!r}: rename one of them")
            if fields.text not in columns:
                raise without_text(fields, columns)
            number = 0
            for group in range(table.num_row_groups):
                _check_expansion(table, group)
                at_once = _rows_at_once(table.metadata.row_group(group))
                for batch in table.iter_batches(at_once, row_groups=[group]):
                    for row in _rows_of_batch(batch):
                        number += 1
                        where = f"{name} row {number}"
                        if isinstance(row, InputError):
                            yield Entry.refused(where, row)
                        else:
                            yield Entry(where, partial(TextDocument.from_row, row, fields))
            if not number:
                raise RefusedError("the table has no rows", Reason.EMPTY)
    except (ArrowException, UnicodeDecodeError) as error:
        raise _not_parquet(error) from error
    except OSError as error:
        if error.errno is not None:  # the disk's; pyarrow's own have none
            raise
        raise _not_parquet(error) from error
    except MemoryError as error:
        raise too_large("a row, unpacked,") from error


_LIST_COLUMNS = """
import os
from pyarrow.parquet import ParquetFile
try:
    metadata = ParquetFile(os.fdopen(0, "rb")).metadata
except Exception:
    raise SystemExit  # the caller will get the same error, and name it
for group in range(metadata.num_row_groups):
    for column in range(metadata.num_columns):
        metadata.row_group(group).column(column)
"""


def _check_footer(file: IO[bytes]) -> None:
    """Refuse a file whose description of its columns ends the process that reads it.

    pyarrow does not turn each C++ exception of a damaged footer into one of Python: some end the process. So
    another process lists the columns first.

    Raises:
        RefusedError: the file is empty, or the other process was ended.
    """
    if not os.fstat(file.fileno()).st_size:
        raise RefusedError("the file is empty", Reason.EMPTY)
    command = [sys.executable, "-I", "-c", _LIST_COLUMNS]
    done = subprocess.run(  # noqa: S603  # our own program
        command, check=False, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode < 0:
        said = done.stderr.decode(errors="replace").split("what():")[-1]
        raise InputError(f"not parquet: the description of its columns is damaged: {' '.join(said.split())}")


def _not_parquet(error: Exception) -> InputError:
    return InputError(f"not parquet, or damaged: {' '.join(str(error).split())}")


def _rows_at_once(group: Any) -> int:
    """Return how many rows of a row group to decode together.

    A value is stored whole at least once in its column, so that none is longer than its column; but a few
    bytes may repeat it in any number of rows.
    """
    longest: int = sum(group.column(at).total_uncompressed_size for at in range(group.num_columns))
    return max(1, min(_ROWS_AT_ONCE, MAX_DOCUMENT_BYTES // max(1, longest)))


def _check_expansion(table: Any, number: int) -> None:
    """Refuse a row group that would not fit in memory although it is small in the file.

    Raises:
        RefusedError: a column has far more bytes, or values in lists, than it has in the file.
    """
    group = table.metadata.row_group(number)
    for at in range(group.num_columns):
        column, is_list = group.column(at), table.schema.column(at).max_repetition_level > 0
        stored, unpacked = max(1, column.total_compressed_size), column.total_uncompressed_size
        values = column.num_values if is_list else 0
        for count, of, large in ((unpacked, "bytes", _LARGE_COLUMN), (values, "values", _MANY_VALUES)):
            if count > large and count > _EXPANSION * stored:
                raise RefusedError(
                    f"the column {column.path_in_schema!r} has {stored:,} bytes in the file and {count:,} "
                    f"{of} when unpacked: it is not read",
                    Reason.TOO_LARGE,
                )


def _rows_of_batch(batch: Any) -> Iterator[Any]:
    """Yield the rows as JSON values, or for one that cannot be used the error."""
    for at in range(batch.num_rows):
        row = batch.slice(at, 1)
        if row.nbytes > MAX_DOCUMENT_BYTES:
            yield too_large("the row")
            continue
        try:
            yield as_json(row.to_pylist()[0])
        except UnicodeDecodeError as error:
            yield RefusedError(f"not UTF-8: byte {error.object[error.start]:#04x}", Reason.ENCODING)
        except (ValueError, OverflowError, ArithmeticError) as error:  # a date that Python does not have
            yield InputError(f"a value cannot be read: {' '.join(str(error).split())}")
