"""Reading documents: JSON Lines, text and Markdown files, standard input, any Python iterable."""

import codecs
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from knnstore.checks import check_json, check_name
from knnstore.errors import InputError

ROW_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst")
STDIN = "-"

_TABLE_ROWS = 1024  # converted together

OnBad = Callable[[InputError], None]
"""Called with what is wrong with a document that is left out."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A document as its user has it.

    Raises:
        InputError: the id, the text or the metadata cannot be stored; says which and why.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.id, "the id")
        if not self.text.strip():
            raise InputError("the text is empty")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the text holds half a surrogate pair: it is not Unicode") from error
        check_json(self.metadata, "the metadata")

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @classmethod
    def from_row(cls, row: object) -> "TextDocument":
        """Read a row ``{"id", "text", ...metadata}``, or a bare text.

        A row without an id is known by a hash of its text, so that adding it again is no change.

        Raises:
            InputError: the row has no text, or something in it is of a wrong type.
        """
        if isinstance(row, TextDocument):
            return row
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, Mapping):
            raise InputError(f"a document is an object with a 'text', not {type(row).__name__}")
        text, id = row.get("text"), row.get("id")
        if not isinstance(text, str):
            problem = "no 'text'" if text is None else f"'text' is {type(text).__name__}, not a string"
            raise InputError(problem)
        if id is None:
            id = "sha256:" + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise InputError(f"'id' is {type(id).__name__}, not a string or an integer")
        metadata = {key: value for key, value in row.items() if key not in ("id", "text")}
        check_json(metadata, "the metadata")
        # As it will be read back (a tuple is a list then), so that adding it again is no change.
        return cls(str(id), text, json.loads(json.dumps(metadata)))


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
    located = (
        (f"{source} {number}", partial(TextDocument.from_row, row))
        for number, row in enumerate(_of_table(rows), start=1)
    )
    return _unique(located, on_bad)


def _of_table(rows: Any) -> Iterable[object]:
    """The rows of a table, which would be iterated over by its columns; whatever else it is stays."""
    if hasattr(rows, "iter_rows"):  # polars
        return (_plain(row) for row in rows.iter_rows(named=True))
    if hasattr(rows, "to_batches"):  # pyarrow
        return (_plain(row) for batch in rows.to_batches() for row in batch.to_pylist())
    if hasattr(rows, "itertuples"):  # pandas
        return _of_pandas(rows)
    found: Iterable[object] = rows
    return found


def _of_pandas(table: Any) -> Iterator[object]:
    columns = [str(name) for name in table.columns]
    for start in range(0, len(table), _TABLE_ROWS):
        part = table.iloc[start : start + _TABLE_ROWS]
        filled = part.astype(object).where(part.notna(), None)  # it has nan and others where nothing is
        for values in filled.itertuples(index=False, name=None):
            yield _plain(dict(zip(columns, values, strict=True)))


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table with times as text, which JSON has none of."""
    return {
        name: value.isoformat() if hasattr(value, "isoformat") else value
        for name, value in row.items()
        if value is not None
    }


def read_documents(paths: Iterable[str | Path], *, on_bad: OnBad | None = None) -> Iterator[TextDocument]:
    """Read documents from files, one at a time.

    ``.jsonl`` holds a document a row, ``.txt`` and ``.md`` are one document each, known by their
    path; any of them may be compressed (``.gz``). A folder stands for all such files below it,
    hidden ones aside. ``-`` is standard input: JSON Lines when it starts with ``{``, else one
    document.

    Args:
        paths: files and folders, in the order to read them.
        on_bad: called for each document that cannot be used, which is then left out; None raises.

    Raises:
        InputError: a document cannot be used and `on_bad` is None; names file and row.
    """
    located = (entry for path in paths for file in _files(path) for entry in _entries(file))
    return _unique(located, on_bad)


def size_of(paths: Iterable[str | Path]) -> int | None:
    """Add up the bytes that `read_documents` would read.

    Returns:
        None where it cannot be known beforehand: standard input, compressed files.
    """
    total = 0
    for file in (file for path in paths for file in _files(path)):
        if file == STDIN or Path(file).suffix == ".gz":
            return None
        try:
            total += Path(file).stat().st_size
        except OSError:
            continue  # reading it will say why
    return total


def is_among(file: Path, paths: Iterable[str | Path]) -> bool:
    """Whether this is a file that `read_documents` would read, under whichever name."""
    return file.exists() and any(
        one != STDIN and Path(one).exists() and file.samefile(one) for path in paths for one in _files(path)
    )


_Entry = tuple[str, Callable[[], TextDocument]]
"""Where a document stands, and how to get it."""


def _unique(entries: Iterable[_Entry], on_bad: OnBad | None) -> Iterator[TextDocument]:
    seen: dict[str, str] = {}
    for where, read in entries:
        try:
            document = read()
            if document.id in seen:
                raise InputError(f"the id {document.id!r} was already at {seen[document.id]}")
        except InputError as error:
            located = InputError(f"{where}: {error}")
            if on_bad is None:
                raise located from error
            on_bad(located)
            continue
        seen[document.id] = where
        yield document


def _files(path: str | Path) -> Iterator[str | Path]:
    if path == STDIN or not Path(path).is_dir():
        yield path
        return
    found = [file for file in sorted(Path(path).rglob("*")) if _is_document(file, below=path)]
    yield from found or [Path(path)]  # an empty folder is named in a message, not passed over


def _is_document(file: Path, *, below: str | Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(below).parts)
    return not hidden and _suffix(file) in ROW_SUFFIXES + TEXT_SUFFIXES and file.is_file()


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _entries(path: str | Path) -> Iterator[_Entry]:
    if path == STDIN:
        first = sys.stdin.buffer.readline()
        if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _rows("standard input", chain([first], sys.stdin.buffer))
        else:
            yield "standard input", lambda: TextDocument("stdin", _decoded(first + sys.stdin.buffer.read()))
        return
    file = Path(path)
    if _suffix(file) in ROW_SUFFIXES:
        try:
            with _opened(file) as stream:
                yield from _rows(str(file), stream)
        except _UNREADABLE as error:
            yield str(file), partial(_raise, _unreadable(error))
    elif _suffix(file) in TEXT_SUFFIXES:
        yield str(file), lambda: TextDocument(file.as_posix(), _whole(file))
    else:
        accepted = f"{' '.join(ROW_SUFFIXES + TEXT_SUFFIXES)}, and .gz of each"
        problem = "no document in this folder" if file.is_dir() else "unknown kind of file"
        yield str(file), partial(_raise, InputError(f"{problem}; accepted are {accepted}"))


def _rows(name: str, lines: Iterable[bytes]) -> Iterator[_Entry]:
    empty = True
    for number, line in enumerate(lines, start=1):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            empty = False
            yield f"{name} row {number}", partial(_parsed, line)
    if empty:
        yield name, partial(_raise, InputError("the file is empty"))


def _parsed(line: bytes) -> TextDocument:
    text = _decoded(line)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    return TextDocument.from_row(row)


def _whole(file: Path) -> str:
    try:
        with _opened(file) as stream:
            return _decoded(stream.read())
    except _UNREADABLE as error:
        raise _unreadable(error) from error


def _opened(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def _decoded(data: bytes) -> str:
    if not data:
        raise InputError("the file is empty")
    if b"\0" in data:
        raise InputError(f"binary data (a NUL byte at {data.index(0)}), not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from error


_UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file may raise, a damaged .gz included."""


def _unreadable(error: Exception) -> InputError:
    return InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _raise(error: InputError) -> TextDocument:
    raise error
