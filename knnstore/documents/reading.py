"""Reading documents from files, folders, standard input and data sets."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from knnstore.documents.document import FIELDS, Entry, Fields, OnBad, TextDocument, unique
from knnstore.documents.formats import UNREADABLE, decoded, entries_of_file, json_entries, unreadable
from knnstore.documents.hub import rows_of_data_set
from knnstore.documents.places import ACCEPTED, HUB, PARQUET, STDIN, OnIgnored, Place, is_accepted, places_of
from knnstore.errors import InputError, UnusableDocumentError


def read_documents(
    paths: Iterable[str | Path],
    *,
    fields: Fields = FIELDS,
    on_bad: OnBad | None = None,
    on_ignored: OnIgnored | None = None,
) -> Iterator[TextDocument]:
    """Read documents from files, one at a time.

    ``.jsonl``, ``.csv``, ``.tsv`` and ``.parquet`` hold a document a row, ``.txt`` and ``.md`` are one
    document each, known by their name; any but parquet may be compressed (``.gz``). A folder stands for all
    such files below it, hidden ones aside, and a text file there is known by its path in that folder. ``-``
    is standard input: JSON Lines when it starts with ``{``, else one document. ``hf:NAME``,
    ``hf:NAME:CONFIGURATION`` and ``hf:NAME:CONFIGURATION:SPLIT`` are a data set of the Hugging Face hub.

    Args:
        paths: files, folders and data sets, in the order to read them.
        fields: which fields of a row are its text and its id.
        on_bad: called for each document that cannot be used, which is then left out; None raises. The
            error says whether it was found in a folder.
        on_ignored: called with each file of a folder that is of another kind.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; names file and row.
    """
    entries = (
        entry for path in paths for place in places_of(path, on_ignored) for entry in _entries(place, fields)
    )
    return unique(entries, on_bad)


def check_paths(paths: Iterable[str | Path], fields: Fields = FIELDS) -> None:
    """Refuse what cannot be read, before the work begins: what is not there, or of no kind that is read.

    The first row of each file that is named is read; nothing of folders, standard input and data sets.

    Raises:
        UnusableDocumentError: something cannot be read; says which and why.
    """
    for place in (place for path in paths for place in places_of(path)):
        if place.is_file and not place.in_folder:
            for entry in _entries(place, fields):
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
        None where it cannot be known beforehand: standard input, compressed files, data sets.
    """
    total = 0
    for place in (place for path in paths for place in places_of(path)):
        if not place.is_file or place.is_compressed or place.suffix == PARQUET:
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


def _entries(place: Place, fields: Fields) -> Iterator[Entry]:
    if place.problem is not None:
        yield _refused(place, place.problem)
    elif place.path == STDIN:
        yield from _standard_input(fields)
    elif place.path.startswith(HUB):
        try:
            for number, row in enumerate(rows_of_data_set(place.path.removeprefix(HUB)), start=1):
                yield Entry(f"{place.path} row {number}", partial(TextDocument.from_row, row, fields))
        except InputError as error:
            yield _refused(place, str(error))
    elif is_accepted(place):
        try:
            for entry in entries_of_file(place, fields):
                yield entry._replace(in_folder=place.in_folder)
        except UNREADABLE as error:
            yield _refused(place, str(unreadable(error)))
    elif Path(place.path).exists():
        yield _refused(place, f"unknown kind of file; accepted are {ACCEPTED}")
    else:
        yield _refused(place, f"no such file or folder (a data set of the hub is {HUB}NAME)")


def _standard_input(fields: Fields) -> Iterator[Entry]:
    first = sys.stdin.buffer.readline()
    if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        yield from json_entries("standard input", chain([first], sys.stdin.buffer), fields)
    else:
        yield Entry("standard input", lambda: TextDocument("stdin", decoded(first + sys.stdin.buffer.read())))


def _refused(place: Place, problem: str) -> Entry:
    id = place.id if place.is_text else None
    return Entry.refused(place.path, InputError(problem), in_folder=place.in_folder, id=id)
