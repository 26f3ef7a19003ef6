"""Reading documents: JSON Lines, text and Markdown files, standard input, any Python iterable."""

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from knnstore.errors import InputError

ROW_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst")
STDIN = "-"

OnBad = Callable[[InputError], None]
"""Called with what is wrong with a document that is left out."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A document as its user has it.

    Raises:
        InputError: the id or the text is empty, or either cannot be stored.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or "\0" in self.id:
            raise InputError("an id must not be empty or hold a NUL character")
        if not self.text.strip():
            raise InputError(f"document {self.id!r} is empty")
        try:
            self.id.encode()
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"document {self.id!r:.80} holds half a surrogate pair, not Unicode text"
            ) from error

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
            raise InputError(f"a document must be an object with a 'text', not {type(row).__name__}")
        text, id = row.get("text"), row.get("id")
        if not isinstance(text, str):
            raise InputError(
                "no 'text'" if text is None else f"'text' is {type(text).__name__}, not a string"
            )
        if id is None:
            id = "sha256:" + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise InputError(f"'id' is {type(id).__name__}, not a string or an integer")
        metadata = {key: value for key, value in row.items() if key not in ("id", "text")}
        try:
            json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise InputError(f"document {str(id)!r}: its metadata cannot be written as JSON") from error
        return cls(str(id), text, metadata)


def documents_of(
    rows: Iterable[object], *, source: str = "document", on_bad: OnBad | None = None
) -> Iterator[TextDocument]:
    """Turn rows, bare texts or `TextDocument`s into documents, refusing repeated ids.

    Args:
        rows: any iterable, also a `datasets` stream; read once, one row at a time.
        source: what the rows are, for messages; the row's number from 1 is added.
        on_bad: called for each row that cannot be used, which is then left out; None raises.

    Raises:
        InputError: a row cannot be used and `on_bad` is None; names the source and the row.
    """
    located = (
        (f"{source} {number}", partial(TextDocument.from_row, row))
        for number, row in enumerate(rows, start=1)
    )
    yield from _unique(located, on_bad)


def read_documents(paths: Iterable[str | Path], *, on_bad: OnBad | None = None) -> Iterator[TextDocument]:
    """Read documents from files, one at a time.

    ``.jsonl`` holds a document a row, ``.txt`` and ``.md`` are one document each, known by their
    path; any of them may be compressed (``.gz``). A folder stands for all such files below it.
    ``-`` is standard input: JSON Lines when it starts with ``{``, else one document.

    Args:
        paths: files and folders, in the order to read them.
        on_bad: called for each document that cannot be used, which is then left out; None raises.

    Raises:
        InputError: a document cannot be used and `on_bad` is None; names file and row.
    """
    located = (entry for path in paths for file in _files(path) for entry in _entries(file))
    yield from _unique(located, on_bad)


_Entry = tuple[str, Callable[[], TextDocument]]
"""Where a document stands, and how to get it."""


def _unique(entries: Iterable[_Entry], on_bad: OnBad | None) -> Iterator[TextDocument]:
    seen: dict[str, str] = {}
    for where, read in entries:
        try:
            document = read()
            if document.id in seen:
                raise InputError(f"id {document.id!r} was already at {seen[document.id]}")
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
    known = ROW_SUFFIXES + TEXT_SUFFIXES
    yield from sorted(file for file in Path(path).rglob("*") if _suffix(file) in known and file.is_file())


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def _entries(path: str | Path) -> Iterator[_Entry]:
    if path == STDIN:
        first = sys.stdin.buffer.readline()
        if first.lstrip().startswith(b"{"):
            yield from _rows("standard input", chain([first], sys.stdin.buffer))
        else:
            yield "standard input", lambda: TextDocument("stdin", _decoded(first + sys.stdin.buffer.read()))
        return
    file = Path(path)
    if _suffix(file) in ROW_SUFFIXES:
        try:
            with _opened(file) as stream:
                yield from _rows(str(file), stream)
        except (OSError, EOFError) as error:
            yield str(file), partial(_raise, _unreadable(error))
    elif _suffix(file) in TEXT_SUFFIXES:
        yield str(file), lambda: TextDocument(file.as_posix(), _whole(file))
    else:
        accepted = " ".join(ROW_SUFFIXES + TEXT_SUFFIXES)
        yield (
            str(file),
            partial(_raise, InputError(f"unknown kind of file; accepted: {accepted} (and .gz of each)")),
        )


def _rows(name: str, lines: Iterable[bytes]) -> Iterator[_Entry]:
    empty = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            empty = False
            yield f"{name} row {number}", partial(_parsed, line)
    if empty:
        yield name, partial(_raise, InputError("the file is empty"))


def _parsed(line: bytes) -> TextDocument:
    try:
        row = json.loads(_decoded(line))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not JSON: {error}") from error
    return TextDocument.from_row(row)


def _whole(file: Path) -> str:
    try:
        with _opened(file) as stream:
            return _decoded(stream.read())
    except (OSError, EOFError) as error:
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


def _unreadable(error: OSError | EOFError) -> InputError:
    return InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _raise(error: InputError) -> TextDocument:
    raise error
