"""Reading of sources in which each row is a document: JSON, JSON Lines, CSV, parquet and data sets.

The functions yield an `Entry` for each row: a document that is not read yet, or that raises an error when it
is read.
"""

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
from pathlib import Path
from typing import IO, Any, NoReturn

from knnstore.documents.document import (
    Entry,
    Fields,
    Reason,
    RefusedError,
    TextDocument,
    make_missing_text_error,
)
from knnstore.documents.python_values import to_json_or_same
from knnstore.documents.source_files import (
    MAX_DOCUMENT_BYTES,
    UTF8,
    Source,
    decode_text,
    make_too_large_error,
    open_regular,
    read_utf8_lines,
)
from knnstore.errors import InputError

_DELIMITERS = ",;\t|"
_LONGEST_CELL = 1 << 30
_ROWS_AT_ONCE = 256
"""Largest number of rows of a parquet file that are decoded together."""
_EXPANSION = 200
"""Largest accepted ratio of a large parquet column's size in memory to its size in the file."""
_LARGE_COLUMN = 1 << 30
"""Size in bytes in memory from which a parquet column counts as large."""
_MANY_VALUES = 1 << 25
"""Number of list items from which a parquet column of lists counts as large."""
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*')
"""Pattern of a first line of a CSV file in which Excel names the delimiter."""


def read_json_lines(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each row of a JSON Lines file, which has one JSON object on each line.

    An entry is a document that is not read yet. If a row cannot be used, reading its entry raises the error.

    Args:
        source: the file.
        fields: names of the fields that contain the text and the id.

    Raises:
        OSError: the file cannot be read.
        RefusedError: the file is not a regular file, leads out of its folder, or cannot be decoded.
    """
    with source.open() as stream:
        yield from read_json_line_entries(source.name, read_utf8_lines(stream, source.encoding), fields)


def read_json_line_entries(name: str, lines: Iterable[bytes], fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each line of JSON in UTF-8; empty lines are skipped.

    An entry is a document that is not read yet. If a line cannot be used, for example because it is too
    long, reading its entry raises the error. In two cases, only one entry is yielded, and reading it raises
    an error: if all lines are empty, and if the first line is only ``[`` or ``{``, so that the file is JSON
    but not JSON Lines.

    Args:
        name: name of the file, for messages.
        lines: the lines as bytes, each with or without its line break.
        fields: names of the fields that contain the text and the id.
    """
    is_empty = True
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_DOCUMENT_BYTES:
            is_empty = False
            yield Entry.from_error(f"{name} row {number}", make_too_large_error("the line"))
            continue
        stripped = line.removeprefix(codecs.BOM_UTF8).strip()
        if not stripped:
            continue
        if is_empty and stripped in (b"[", b"{"):
            value = "an array" if stripped == b"[" else "an object"
            message = (
                f"not JSON Lines: {value} begins here and continues on later lines; rename the file to .json"
            )
            yield Entry.from_error(f"{name} row {number}", InputError(message))
            return
        is_empty = False
        yield Entry(f"{name} row {number}", partial(_parse_line, line, fields))
    if is_empty:
        yield Entry.from_error(name, RefusedError("the file is empty", Reason.EMPTY))


def _parse_line(line: bytes, fields: Fields) -> TextDocument:
    """Convert a line of JSON to a document.

    Args:
        line: the line in UTF-8.
        fields: names of the fields that contain the text and the id.

    Raises:
        InputError: the line is not a JSON object with a text; the message has a hint for common mistakes.
    """
    text = decode_text(line, suffix=" of the line")
    try:
        row = _parse_json(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip() if error.msg == "Extra data" else ""
        hint = ""
        if rest.startswith(","):
            hint = "; remove the comma after the object: lines of a .jsonl file need none"
        elif rest:
            hint = "; the line has more than one object: write each on a separate line"
        raise InputError(f"not JSON: {error}{hint}") from error
    if isinstance(row, list):
        raise InputError(
            f"a document is an object with a {fields.text!r}, not list; write an array of rows into a "
            ".json file"
        )
    return TextDocument.from_row(row, fields)


def read_json(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each row of a JSON file.

    An entry is a document that is not read yet. The file contains an array of objects, a single object, or
    one object on each line. If a row cannot be used, reading its entry raises the error.

    Args:
        source: the file.
        fields: names of the fields that contain the text and the id.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is not JSON, is neither an array nor an object, or contains an empty array.
    """
    name, text = source.name, source.read_text()
    try:
        value = _parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and isinstance(_parse_first_line(text), dict):
            yield from read_json_line_entries(name, text.encode(UTF8).splitlines(keepends=True), fields)
            return
        hint = "; remove the comma before it" if text[: error.pos].rstrip().endswith(",") else ""
        raise InputError(f"not JSON: {error}{hint}") from error
    if isinstance(value, list):
        if not value:
            raise RefusedError("the array has no rows", Reason.EMPTY)
        for number, row in enumerate(value, start=1):
            yield Entry(f"{name} row {number}", partial(TextDocument.from_row, row, fields))
    elif isinstance(value, dict):
        yield Entry(name, partial(TextDocument.from_row, value, fields))
    else:
        raise InputError(f"the file must be an array of rows or one object, not {type(value).__name__}")


def _parse_first_line(text: str) -> Any:
    """Return the JSON value of a text's first line that is not empty; None if this line is not JSON."""
    try:
        return json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return None


def _parse_json(text: str) -> Any:
    """Parse JSON text, and return its value.

    NaN and infinite numbers raise an error, although Python's parser accepts them.

    Raises:
        json.JSONDecodeError: the text is not JSON.
        InputError: the value is nested too deep, or contains NaN, an infinity or an integer that is too long.
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
    """Raise `InputError` for a constant that JSON does not have: "NaN", "Infinity" or "-Infinity"."""
    raise InputError(f"the metadata cannot be stored as JSON: {name} is not JSON, write null")


# -- CSV


class _Lines:
    """Iterator over the decoded lines of a CSV file, with checks.

    A row of the table may have several lines. The object checks the size of each row, and remembers the first
    decoding problem of the current row. The caller calls `end_row` after each row.

    Args:
        lines: the lines as bytes in UTF-8.
    """

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
            error = make_too_large_error(f"the row that ends on line {self._number}, or later,")
            raise RefusedError(f"{error}; the rows after it are not read", Reason.TOO_LARGE)
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        text = line.decode(UTF8, "surrogateescape")
        try:
            if self._problem is None and (not text.isascii() or "\0" in text):
                decode_text(line, suffix=f" of line {self._number}")
        except RefusedError as error:
            self._problem = error
        return text

    def end_row(self) -> RefusedError | None:
        """End the current row, and return its first decoding problem.

        Returns None if all lines of the row could be decoded. The error is not raised.
        """
        problem, self._problem, self._row_bytes = self._problem, None, 0
        return problem


def read_table(source: Source, fields: Fields, *, delimiter: str) -> Iterator[Entry]:
    """Yield an entry for each row of a CSV file, whose first row (the header) has the names of the columns.

    An entry is a document that is not read yet. If a row cannot be used, reading its entry raises the error.
    If the first line is ``sep=X``, X is the delimiter. Otherwise `delimiter` is tried first. If the header
    then has no column for the text, the delimiters comma, semicolon, tab and ``|`` are tried.

    Args:
        source: the file.
        fields: names of the columns that contain the text and the id.
        delimiter: delimiter that is expected between cells.

    Raises:
        OSError: the file cannot be read.
        InputError: the file has no rows, no column for the text, or two columns with the same name; or a row
            is too large.
    """
    with source.open() as stream:
        lines = _Lines(read_utf8_lines(stream, source.encoding))
        yield from _read_table_entries(source.name, lines, fields, delimiter)


def _read_table_entries(name: str, lines: _Lines, fields: Fields, delimiter: str) -> Iterator[Entry]:
    """Yield an entry for each row of a CSV file; the first row has the names of the columns.

    An entry is a document that is not read yet. If a row cannot be used, reading its entry raises the error.

    Args:
        name: name of the file, for messages.
        lines: the lines of the file.
        fields: names of the columns that contain the text and the id.
        delimiter: delimiter that is expected between cells.

    Raises:
        InputError: the file has no rows, no column for the text, or two columns with the same name.
    """
    # 1) Read the header, and choose the delimiter.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))  # the default is 128 KiB per cell
    first: list[str] = []
    for line in lines:
        first.append(line)
        if line.strip():
            break
    else:
        raise RefusedError("the file is empty", Reason.EMPTY)
    begin = 1
    separator = _SEPARATOR.fullmatch(first[-1])
    if separator is not None:
        delimiter, begin, first = separator[1], len(first) + 1, []
    else:
        delimiter = _choose_delimiter(first[-1], delimiter, fields.text)
    # 2) Read the rows. A row's problem becomes an entry that raises it; after a CSV error the file ends.
    rows = csv.reader(chain(first, lines), delimiter=delimiter, strict=True)
    columns: list[str] | None = None
    has_rows = False
    number, line_number = begin - 1, begin
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield Entry.from_error(
                f"{name} line {line_number}", InputError(f"not a table: {_explain_csv_error(error)}")
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
            _check_header(columns, fields)
            continue
        has_rows = True
        if problem is not None:
            yield Entry.from_error(where, problem)
        else:
            yield Entry(where, partial(_parse_cells, columns, cells, fields))
    # 3) Refuse a file without rows.
    if columns is None:
        raise RefusedError("the file is empty", Reason.EMPTY)
    if not has_rows:
        raise RefusedError("the file has names of columns, but no rows", Reason.EMPTY)


def _choose_delimiter(header: str, delimiter: str, text: str) -> str:
    """Choose the delimiter of a CSV file from its header (the line with the names of the columns).

    Args:
        header: the header.
        delimiter: delimiter that is tried first; then ``, ; tab |`` are tried.
        text: name of the column with the text.

    Returns:
        The first delimiter with which the header has a column `text`. If there is none, the delimiter with
        which the header has most columns.
    """
    columns_by_delimiter: dict[str, list[str]] = {}
    for candidate in (delimiter, *_DELIMITERS):
        try:
            columns_by_delimiter[candidate] = next(csv.reader([header], delimiter=candidate, strict=True), [])
        except csv.Error:  # a quoted name that continues in the next line
            continue
    for candidate, columns in columns_by_delimiter.items():
        if text in columns:
            return candidate
    widths = {candidate: len(columns) for candidate, columns in columns_by_delimiter.items()}
    return max(widths, key=widths.__getitem__, default=delimiter)


def _check_header(columns: Sequence[str], fields: Fields) -> None:
    """Raise `InputError` if no column contains the text, or if two columns have the same name.

    Several columns may have an empty name.

    Args:
        columns: names of the columns.
        fields: names of the columns that contain the text and the id.
    """
    if fields.text not in columns:
        raise make_missing_text_error(fields, columns)
    for first, second in _find_repeated_names(columns):
        if columns[second]:
            raise InputError(
                f"columns {first + 1} and {second + 1} are both named {columns[second]!r}: rename one of them"
            )


def _find_repeated_names(columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Find columns that have the same name as an earlier column.

    Args:
        columns: names of the columns.

    Yields:
        For each column that repeats a name: the index of the first column with this name, and the index of
        the repeating column. Nothing if all names differ.
    """
    first_indices: dict[str, int] = {}
    for index, name in enumerate(columns):
        first = first_indices.setdefault(name, index)
        if first != index:
            yield first, index


def _parse_cells(columns: list[str], cells: list[str], fields: Fields) -> TextDocument:
    """Convert the cells of a row to a document.

    Args:
        columns: names of the columns.
        cells: the cells of the row.
        fields: names of the columns that contain the text and the id; an empty id counts as missing.

    Raises:
        InputError: the row has more or fewer cells than columns, several columns have no name and one of them
            has a value, or the document is not valid.
    """
    if len(cells) != len(columns):
        raise InputError(f"the row has {len(cells)} cells, but the header names {len(columns)} columns")
    row = dict(zip(columns, cells, strict=True))
    if columns.count("") > 1:
        for number, (name, cell) in enumerate(zip(columns, cells, strict=True), start=1):
            if cell and not name:
                raise InputError(f"column {number} has no name, but a value in this row")
        del row[""]
    if not row.get(fields.id):
        row.pop(fields.id, None)
    return TextDocument.from_row(row, fields)


def _explain_csv_error(error: csv.Error) -> str:
    """Return a message for an error of Python's CSV parser, which explains common mistakes."""
    message = str(error)
    if message == "unexpected end of data":
        return f"{message}: a quote that is opened in this row is never closed"
    if "new-line character" in message:
        return "a line ends in a lone carriage return: save it with line ends LF or CRLF"
    return f"{message}; the rows after it are not read"


# -- parquet


def read_parquet(source: Source, fields: Fields) -> Iterator[Entry]:
    """Yield an entry for each row of a parquet file.

    An entry is a document that is not read yet. If a row cannot be used, reading its entry raises the error.

    Args:
        source: the file.
        fields: names of the columns that contain the text and the id.

    Raises:
        InputError: pyarrow is not installed; the file is not parquet, is damaged or has no rows; it has no
            column for the text, or two columns with the same name; or a part of it would not fit in memory.
        OSError: the disk cannot be read.
    """
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
            for _, index in _find_repeated_names(columns):
                raise InputError(f"two columns are named {columns[index]!r}: rename one of them")
            if fields.text not in columns:
                raise make_missing_text_error(fields, columns)
            number = 0
            for group in range(table.num_row_groups):
                _check_expansion(table, group)
                at_once = _choose_batch_rows(table.metadata.row_group(group))
                for batch in table.iter_batches(at_once, row_groups=[group]):
                    for row in _iterate_batch_rows(batch):
                        number += 1
                        where = f"{name} row {number}"
                        if isinstance(row, InputError):
                            yield Entry.from_error(where, row)
                        else:
                            yield Entry(where, partial(TextDocument.from_row, row, fields))
            if not number:
                raise RefusedError("the table has no rows", Reason.EMPTY)
    except (ArrowException, UnicodeDecodeError) as error:
        raise _make_parquet_error(error) from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk; those of pyarrow have no number
            raise
        raise _make_parquet_error(error) from error
    except MemoryError as error:
        raise make_too_large_error("a row, unpacked,") from error


_LIST_COLUMNS = """
import os
from pyarrow.parquet import ParquetFile
try:
    metadata = ParquetFile(os.fdopen(0, "rb")).metadata
except Exception:
    raise SystemExit  # the parent process gets the same error and reports it
for group in range(metadata.num_row_groups):
    for column in range(metadata.num_columns):
        metadata.row_group(group).column(column)
"""


def _check_footer(file: IO[bytes]) -> None:
    """Check that reading the footer (description of the columns) of a parquet file does not crash Python.

    pyarrow does not convert every C++ exception of a damaged footer to a Python exception: some exceptions
    end the process. So a child process reads the footer first.

    Args:
        file: the open file.

    Raises:
        InputError: the file is empty, or the child process crashed.
    """
    if not os.fstat(file.fileno()).st_size:
        raise RefusedError("the file is empty", Reason.EMPTY)
    command = [sys.executable, "-I", "-c", _LIST_COLUMNS]
    done = subprocess.run(  # noqa: S603  # the command is a constant
        command, check=False, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode < 0:
        message = " ".join(done.stderr.decode(errors="replace").split("what():")[-1].split())
        raise InputError(f"not parquet: the description of its columns is damaged: {message}")


def _make_parquet_error(error: Exception) -> InputError:
    """Return, without raising it, the error for a file that is damaged or not parquet.

    Args:
        error: the exception that reading the file raised.
    """
    return InputError(f"not parquet, or damaged: {' '.join(str(error).split())}")


def _choose_batch_rows(group: Any) -> int:
    """Choose how many rows of a parquet row group are decoded together, 1 to `_ROWS_AT_ONCE`.

    A value is stored at least once in its column, so one row is at most as large as all columns together. But
    the file can repeat a value in many rows at the cost of a few bytes. So many rows together may take much
    more memory than all columns in the file.

    Args:
        group: metadata of the row group, from pyarrow.
    """
    longest: int = sum(group.column(i).total_uncompressed_size for i in range(group.num_columns))
    return max(1, min(_ROWS_AT_ONCE, MAX_DOCUMENT_BYTES // max(1, longest)))


def _check_expansion(table: Any, number: int) -> None:
    """Check that a row group of a parquet file does not take far more memory than space in the file.

    Args:
        table: open parquet file, from pyarrow.
        number: number of the row group, from 0.

    Raises:
        RefusedError: a column is large and has more than `_EXPANSION` bytes or list values for each byte
            in the file.
    """
    group = table.metadata.row_group(number)
    for i in range(group.num_columns):
        column, is_list = group.column(i), table.schema.column(i).max_repetition_level > 0
        stored, unpacked = max(1, column.total_compressed_size), column.total_uncompressed_size
        values = column.num_values if is_list else 0
        for count, unit, large in ((unpacked, "bytes", _LARGE_COLUMN), (values, "values", _MANY_VALUES)):
            if count > large and count > _EXPANSION * stored:
                raise RefusedError(
                    f"the column {column.path_in_schema!r} has {stored:,} bytes in the file and {count:,} "
                    f"{unit} when unpacked: it is not read",
                    Reason.TOO_LARGE,
                )


def _iterate_batch_rows(batch: Any) -> Iterator[Any]:
    """Yield each row of an Arrow batch (some rows of a parquet file) as a dict of JSON values by column.

    If a row cannot be converted or is too large, an `InputError` is yielded in its place, not raised.

    Args:
        batch: the batch, from pyarrow.
    """
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        if row.nbytes > MAX_DOCUMENT_BYTES:
            yield make_too_large_error("the row")
            continue
        try:
            yield to_json_or_same(row.to_pylist()[0])
        except UnicodeDecodeError as error:
            yield RefusedError(f"not UTF-8: byte {error.object[error.start]:#04x}", Reason.ENCODING)
        except (ValueError, OverflowError, ArithmeticError) as error:  # a date that Python cannot represent
            yield InputError(f"a value cannot be read: {' '.join(str(error).split())}")


# -- data sets

_SPLIT = "train"
"""Default split of a data set."""


def read_data_set_rows(name: str) -> Iterator[Any]:
    """Yield the rows of a data set of the Hugging Face hub or of a folder, as dicts of JSON values.

    Rows are read one after another, not all at once. Code in the data set's repository is not run.

    Args:
        name: ``NAME``, ``NAME:CONFIGURATION`` or ``NAME:CONFIGURATION:SPLIT``; the default split is "train".
            ``NAME`` may be a folder with files, or a folder in which `datasets` saved a data set.

    Raises:
        InputError: the name is not valid, the package `datasets` is not installed, the data set,
            configuration or split does not exist, or reading fails.
    """
    parts = name.split(":")
    if not parts[0] or len(parts) > 3:
        raise InputError("write a data set as hf:NAME, hf:NAME:CONFIGURATION or hf:NAME:CONFIGURATION:SPLIT")
    path, configuration, split = (*parts, "", "")[:3]
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "reading it needs datasets: install it with pip install 'knnstore[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    try:
        if Path(path, "dataset_dict.json").is_file() or Path(path, "state.json").is_file():
            saved = datasets.load_from_disk(path)
            if configuration or (split and not isinstance(saved, dict)):
                raise InputError(
                    f"the data set was saved without {'configurations' if configuration else 'splits'}"
                )
            rows = saved[split or _SPLIT] if isinstance(saved, dict) else saved
        else:
            rows = datasets.load_dataset(path, configuration or None, split=split or _SPLIT, streaming=True)
        for row in rows:
            yield to_json_or_same(row)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the data set cannot be read: {message}") from error
