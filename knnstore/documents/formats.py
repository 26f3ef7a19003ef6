"""The kinds of files, by their suffixes: `KINDS` maps each to the function that reads it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from knnstore.documents.document import Entry, Fields, TextDocument
from knnstore.documents.files import Source
from knnstore.documents.mail import read_mailbox
from knnstore.documents.markup import html_document
from knnstore.documents.notebooks import notebook_document
from knnstore.documents.rows import read_json, read_json_lines, read_parquet, read_table

PARQUET = ".parquet"


class Kind(NamedTuple):
    """A kind of file."""

    read: Callable[[Source, Fields], Iterator[Entry]]
    """Yields its documents; may raise what `UNREADABLE` names, and `InputError`, between them."""
    is_document: bool = False
    """Whether the file is one document, whose id is its path."""
    is_mostly_text: bool = True
    """Whether its size is about that of its texts."""


def _whole(make: Callable[[Source], TextDocument]) -> Callable[[Source, Fields], Iterator[Entry]]:
    """Return the reader of a kind of which each file is one document."""

    def read(source: Source, _: Fields) -> Iterator[Entry]:
        yield Entry(source.name, partial(make, source), id=source.id)

    return read


def _plain_document(source: Source) -> TextDocument:
    return TextDocument(source.id, source.text())


_TEXT = Kind(_whole(_plain_document), is_document=True)
_HTML = Kind(_whole(html_document), is_document=True, is_mostly_text=False)

KINDS = {
    ".jsonl": Kind(read_json_lines),
    ".ndjson": Kind(read_json_lines),
    ".json": Kind(read_json),
    ".csv": Kind(partial(read_table, delimiter=",")),
    ".tsv": Kind(partial(read_table, delimiter="\t")),
    ".mbox": Kind(read_mailbox, is_mostly_text=False),
    ".txt": _TEXT,
    ".md": _TEXT,
    ".markdown": _TEXT,
    ".rst": _TEXT,
    ".html": _HTML,
    ".htm": _HTML,
    ".ipynb": Kind(_whole(notebook_document), is_document=True, is_mostly_text=False),
    PARQUET: Kind(read_parquet, is_mostly_text=False),
}
"""By suffix, in small letters."""

ACCEPTED = f"{' '.join(suffix for suffix in KINDS if suffix != PARQUET)}, .gz of each, and {PARQUET}"
