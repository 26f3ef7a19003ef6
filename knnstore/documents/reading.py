"""Reading documents from files, folders, standard input and data sets."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from knnstore.documents.document import FIELDS, Entry, Fields, OnBad, TextDocument, unique
from knnstore.documents.files import (
    MAX_DOCUMENT_BYTES,
    UNREADABLE,
    UTF8,
    check_encoding,
    decoded,
    is_utf8,
    too_large,
    unreadable,
    utf8_lines,
)
from knnstore.documents.formats import ACCEPTED
from knnstore.documents.hub import rows_of_data_set
from knnstore.documents.places import HUB, STDIN, OnIgnored, Place, places_of
from knnstore.documents.rows import json_line_entries
from knnstore.errors import InputError, UnusableDocumentError


def read_documents(
    paths: Iterable[str | Path],
    *,
    fields: Fields = FIELDS,
    encoding: str = UTF8,
    on_bad: OnBad | None = None,
    on_ignored: OnIgnored | None = None,
) -> Iterator[TextDocument]:
    """Read documents from files, one at a time.

    ``.jsonl``, ``.csv``, ``.tsv`` and ``.parquet`` hold a document a row, ``.json`` an array of rows or one
    row, ``.mbox`` messages. ``.txt``, ``.md``, ``.rst``, ``.html`` and ``.ipynb`` are one document each,
    known by their name. Any but parquet may be compressed (``.gz``). A folder stands for all such files below
    it, hidden ones aside, and a file there that is one document is known by its path in that folder. ``-`` is
    standard input: JSON Lines when it starts with ``{``, else one document. ``hf:NAME``,
    ``hf:NAME:CONFIGURATION`` and ``hf:NAME:CONFIGURATION:SPLIT`` are a data set of the Hugging Face hub.

    Only regular files are read. In a folder, links to files are followed as far as they stay in it. A
    document, a row, and a file that is read as a whole have at most 256 MiB after decompression.

    Args:
        paths: files, folders and data sets, in the order to read them.
        fields: which fields of a row are its text and its id.
        encoding: of all files but parquet, by Python's name for it.
        on_bad: called for each document that cannot be used, which is then left out; None raises. The
            error says whether it was found in a folder, and why it cannot be used.
        on_ignored: called with each file of a folder that is of another kind.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; names file and row.
        InputError: there is no such encoding.
    """
    encoding = check_encoding(encoding)
    entries = (
        entry
        for path in paths
        for place in places_of(path, on_ignored)
        for entry in _entries(place, fields, encoding)
    )
    return unique(entries, on_bad)


def check_paths(paths: Iterable[str | Path], fields: Fields = FIELDS, encoding: str = UTF8) -> None:
    """Refuse what cannot be read, before the work begins: what is not there, or of no kind that is read.

    The first row of each file that is named is read; nothing of folders, standard input and data sets.

    Raises:
        UnusableDocumentError: something cannot be read; says which and why.
        InputError: there is no such encoding.
    """
    encoding = check_encoding(encoding)
    for place in (place for path in paths for place in places_of(path)):
        if place.is_file and not place.in_folder:
            for entry in _entries(place, fields, encoding):
                try:
                    entry.read()
                except UnusableDocumentError:
                    raise
                except InputError as error:
                    raise UnusableDocumentError(f"{entry.where}: {error}", id=entry.id) from error
                break


def size_of(paths: Iterable[str | Path]) -> int | None:
    """Add up the bytes that `read_documents` would read.

    Returns:
        None where it cannot be known beforehand: standard input, compressed files, data sets, kinds of files
        that hold much beside their text.
    """
    total = 0
    for place in (place for path in paths for place in places_of(path)):
        if place.problem is not None:
            continue
        if not place.is_file or place.is_compressed or (place.kind and not place.kind.is_mostly_text):
            return None
        try:
            total += Path(place.path).stat().st_size
        except OSError:
            continue  # reading it will say why
    return total


def is_among(file: Path, paths: Iterable[str | Path]) -> bool:
    """Whether this is a file that `read_documents` would read, under whichever name."""
    places = (place for path in paths for place in places_of(path))
    return file.exists() and any(
        place.is_file and Path(place.path).exists() and file.samefile(place.path) for place in places
    )


def _entries(place: Place, fields: Fields, encoding: str) -> Iterator[Entry]:
    """Yield the documents of a place; what is wrong with the whole of it is an entry too."""
    try:
        if place.problem is not None:
            raise place.problem
        if place.path == STDIN:
            yield from _standard_input(fields, encoding)
        elif place.path.startswith(HUB):
            for number, row in enumerate(rows_of_data_set(place.path.removeprefix(HUB)), start=1):
                yield Entry(f"{place.path} row {number}", partial(TextDocument.from_row, row, fields))
        elif place.kind is not None:
            for entry in place.kind.read(place.source(encoding), fields):
                yield entry._replace(read=partial(_read, entry), in_folder=place.in_folder)
        elif Path(place.path).exists():
            raise InputError(f"unknown kind of file; accepted are {ACCEPTED}")
        else:
            raise InputError(f"no such file or folder (a data set of the hub is {HUB}NAME)")
    except (InputError, *UNREADABLE) as error:
        problem = error if isinstance(error, InputError) else unreadable(error)
        yield Entry.refused(place.path, problem, in_folder=place.in_folder, id=place.known_id)


def _read(entry: Entry) -> TextDocument:
    """Read a document; what its file may raise becomes an `InputError`."""
    try:
        return entry.read()
    except UNREADABLE as error:
        raise unreadable(error) from error
    except RecursionError as error:
        raise InputError("nested too deep to be read") from error


def _standard_input(fields: Fields, encoding: str) -> Iterator[Entry]:
    stream, name = sys.stdin.buffer, "standard input"
    if not is_utf8(encoding):
        text = "".join(line.decode(UTF8, "surrogatepass") for line in utf8_lines(stream, encoding))
        data = text.encode(UTF8, "surrogatepass")
        if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            yield from json_line_entries(name, data.splitlines(keepends=True), fields)
        else:
            yield Entry(name, lambda: TextDocument("stdin", decoded(data)))
        return
    first = stream.readline(MAX_DOCUMENT_BYTES + 1)
    if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        yield from json_line_entries(name, chain([first], utf8_lines(stream)), fields)
        return
    data = first + stream.read(max(0, MAX_DOCUMENT_BYTES + 1 - len(first)))
    if len(data) > MAX_DOCUMENT_BYTES:
        raise too_large(name)
    yield Entry(name, lambda: TextDocument("stdin", decoded(data)))
