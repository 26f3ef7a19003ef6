"""Reading documents from paths: files, folders, standard input and data sets of the Hugging Face hub."""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from knnstore.documents.document import (
    FIELDS,
    Entry,
    Fields,
    OnBad,
    Reason,
    RefusedError,
    TextDocument,
    read_entries,
)
from knnstore.documents.row_files import (
    read_data_set_rows,
    read_json,
    read_json_line_entries,
    read_json_lines,
    read_parquet,
    read_table,
)
from knnstore.documents.source_files import (
    MAX_DOCUMENT_BYTES,
    UNREADABLE,
    UTF8,
    Source,
    check_encoding,
    decode_text,
    is_outside,
    is_utf8,
    make_link_error,
    make_too_large_error,
    make_unreadable_error,
    read_utf8_lines,
)
from knnstore.documents.text_extraction import read_html_document, read_mailbox, read_notebook_document
from knnstore.documents.translation_memory import read_translation_memory
from knnstore.documents.xliff import read_xliff
from knnstore.errors import InputError, UnusableDocumentError

PARQUET = ".parquet"


class Kind(NamedTuple):
    """A kind of file that can be read, such as JSON Lines; the suffix of a file decides its kind."""

    read: Callable[[Source, Fields], Iterator[Entry]]
    """Function that yields an `Entry` (a document that is not read yet) for each document of a file. The
    function may raise `InputError` or an error in `UNREADABLE` before or after any entry."""
    is_document: bool = False
    """True if each file is one document, whose id is its path; False if a file may contain several."""
    is_mostly_text: bool = True
    """True if the size of a file is about the size of its texts, so that `estimate_size` can use it."""


def _make_whole_file_reader(
    make: Callable[[Source], TextDocument],
) -> Callable[[Source, Fields], Iterator[Entry]]:
    """Return a function for `Kind.read`, for a kind of file that contains one document.

    The function yields one `Entry` (a document that is not read yet). The file is read when the entry is
    read.

    Args:
        make: function that reads a file and returns its document.
    """

    def read(source: Source, _: Fields) -> Iterator[Entry]:
        """Yield an entry for the only document of a file."""
        yield Entry(source.name, partial(make, source), id=source.id)

    return read


def _read_plain_document(source: Source) -> TextDocument:
    """Read a text file, and return a document whose text is the whole file."""
    return TextDocument(source.id, source.read_text())


_TEXT = Kind(_make_whole_file_reader(_read_plain_document), is_document=True)
_HTML = Kind(_make_whole_file_reader(read_html_document), is_document=True, is_mostly_text=False)

KINDS = {
    ".jsonl": Kind(read_json_lines),
    ".ndjson": Kind(read_json_lines),
    ".json": Kind(read_json),
    ".csv": Kind(partial(read_table, delimiter=",")),
    ".tsv": Kind(partial(read_table, delimiter="\t")),
    ".mbox": Kind(read_mailbox, is_mostly_text=False),
    ".tmx": Kind(read_translation_memory, is_mostly_text=False),
    ".xlf": Kind(read_xliff, is_mostly_text=False),
    ".xliff": Kind(read_xliff, is_mostly_text=False),
    ".txt": _TEXT,
    ".md": _TEXT,
    ".markdown": _TEXT,
    ".rst": _TEXT,
    ".html": _HTML,
    ".htm": _HTML,
    ".ipynb": Kind(_make_whole_file_reader(read_notebook_document), is_document=True, is_mostly_text=False),
    PARQUET: Kind(read_parquet, is_mostly_text=False),
}
"""Kinds of files that can be read, by suffix in lower case."""

ACCEPTED = f"{' '.join(suffix for suffix in KINDS if suffix != PARQUET)}, .gz of each, and {PARQUET}"


STDIN = "-"
"""Path that stands for standard input."""
HUB = "hf:"
"""Prefix of the name of a data set of the Hugging Face hub."""

OnIgnored = Callable[[Path], None]
"""Function that is called with the path of each file in a folder that is skipped because of its suffix."""


class Place(NamedTuple):
    """A file, standard input, or a data set, from which documents will be read. It may not exist."""

    path: str
    """Path of the file, `STDIN`, or name of the data set with the prefix `HUB`."""
    id: str
    """Id of the document, if the file is one document."""
    root: Path | None = None
    """Folder in which the file was found; None if the caller named the file."""
    problem: InputError | None = None
    """Error that reading the place will raise; None if no problem is known."""

    @property
    def in_folder(self) -> bool:
        """True if the file was found in a folder; False if the caller named it."""
        return self.root is not None

    @property
    def is_file(self) -> bool:
        """True if the path names a file, which may not exist; False for standard input and data sets."""
        return self.path != STDIN and not self.path.startswith(HUB)

    @property
    def suffix(self) -> str:
        """Suffix of the file in lower case, with the dot, for example ".txt"; empty if it has none.

        A suffix ``.gz`` is removed first.
        """
        path = Path(self.path)
        return Path(path.stem).suffix.lower() if self.is_compressed else path.suffix.lower()

    @property
    def is_compressed(self) -> bool:
        """True if the path ends in ``.gz``, in upper or lower case."""
        return self.path.lower().endswith(".gz")

    @property
    def kind(self) -> Kind | None:
        """Kind of the file by its suffix; None if files with this suffix cannot be read."""
        return None if self.is_compressed and self.suffix == PARQUET else KINDS.get(self.suffix)

    @property
    def is_document(self) -> bool:
        """True if the file contains one document, such as a text file; False for files with rows."""
        return self.kind is not None and self.kind.is_document

    @property
    def known_id(self) -> str | None:
        """Id of the document if it is known before the file is read, else None."""
        return self.id if self.is_document else None

    def create_source(self, encoding: str = UTF8) -> Source:
        """Return an object that opens and decodes the file. The file is not opened yet.

        Args:
            encoding: encoding of the file.
        """
        return Source(self.path, self.id, self.is_compressed, self.root, encoding)


def find_places(path: str | Path, on_ignored: OnIgnored | None = None) -> Iterator[Place]:
    """Yield the places from which the documents of a path are read.

    For a file, standard input or a data set, the only place is the path itself. For a folder, all files in
    the folder and its subfolders are yielded:

    - Hidden files, files with an unknown suffix, and hidden folders are skipped.
    - Links to files are followed if they stay in the folder; links to folders are not followed.
    - A file or folder that cannot be used is yielded with a problem.
    - If no file has a known suffix, the folder itself is yielded too, with a problem.

    If a file is one document, its id is its path relative to the folder (with ``/``), or its file name if
    `path` is the file.

    Args:
        path: a file or folder, which need not exist, `STDIN`, or a data set with the prefix `HUB`.
        on_ignored: function that is called with the path of each file in the folder whose suffix is not
            known; None calls nothing.
    """
    named_place = Place(str(path), Path(path).name)
    if not named_place.is_file or not Path(path).is_dir():
        yield named_place
        return
    folder = Path(path)
    refused_places: list[Place] = []

    def keep_error(error: OSError) -> None:
        """Add a place with a problem for a subfolder whose files cannot be listed."""
        problem = RefusedError(f"cannot be read: {error.strerror or error}", Reason.UNREADABLE)
        refused_places.append(Place(str(error.filename), "", folder, problem))

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=keep_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
        for name in folders:
            if (link := Path(root, name)).is_symlink():
                problem = RefusedError("a link to a folder, which is not followed", Reason.LINK)
                refused_places.append(Place(str(link), "", folder, problem))
    accepted_places = []
    for file in sorted(files):
        place = Place(str(file), file.relative_to(folder).as_posix(), folder)
        if place.kind is not None:
            accepted_places.append(place._replace(problem=_find_problem(file, folder)))
        elif on_ignored is not None:
            on_ignored(file)
    yield from refused_places
    yield from accepted_places
    if not accepted_places:  # reading it raises the error
        yield named_place._replace(
            problem=InputError(f"no document in this folder; accepted kinds are {ACCEPTED}")
        )


def _find_problem(file: Path, folder: Path) -> RefusedError | None:
    """Check whether a path in a folder may be read.

    Args:
        file: path of a file that was found in the folder.
        folder: the folder.

    Returns:
        The error, not raised, if the path is a link that leads out of the folder, or is not a regular file.
        None for a regular file, and for a path that does not exist or cannot be accessed.
    """
    try:
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            if is_outside(file, folder):
                return make_link_error(file)
            mode = file.stat().st_mode
    except OSError:
        return None  # opening the file raises the same error
    if stat.S_ISREG(mode):
        return None
    return RefusedError("not a regular file, but a pipe, a device, a socket or a folder", Reason.SPECIAL)


def read_documents(
    paths: Iterable[str | Path],
    *,
    fields: Fields = FIELDS,
    encoding: str = UTF8,
    on_bad: OnBad | None = None,
    on_ignored: OnIgnored | None = None,
) -> Iterator[TextDocument]:
    """Yield the documents of files, folders, standard input and data sets, one at a time.

    The suffix of a file says how it is read:

    - ``.jsonl``, ``.ndjson``, ``.csv``, ``.tsv`` and ``.parquet``: each row is a document.
    - ``.json``: an array of rows, or one row.
    - ``.mbox``: each message is a document.
    - ``.tmx``, ``.xlf`` and ``.xliff``: each translation unit is a document, and in XLIFF 2.x each segment;
      `fields` name the languages of its text and its source.
    - ``.txt``, ``.md``, ``.markdown``, ``.rst``, ``.html``, ``.htm`` and ``.ipynb``: the file is one
      document, and its name is the id.

    All files except parquet may be compressed (``.gz``). A folder stands for all files with these suffixes
    below it, except hidden ones; there the id of a one-document file is its path relative to the folder.
    ``-`` is standard input: JSON Lines if it starts with ``{``, else one document. ``hf:NAME``,
    ``hf:NAME:CONFIGURATION`` and ``hf:NAME:CONFIGURATION:SPLIT`` are a data set of the Hugging Face hub.

    Only regular files are read. In a folder, links to files are followed if they stay in the folder. A
    document, a row, and a file that is read as a whole may have at most 256 MiB after decompression.

    Args:
        paths: files, folders and data sets, in the order to read them.
        fields: names of the fields of a row that contain its text and its id.
        encoding: Python's name for the encoding of all files; parquet files ignore it.
        on_bad: function that is called with the error of each document that cannot be used; then the document
            is skipped. None raises the error. The error has the reason, and says whether the document was
            found in a folder.
        on_ignored: function that is called with the path of each file in a folder that has another suffix;
            None calls nothing.

    Raises:
        UnusableDocumentError: a document cannot be used and `on_bad` is None; the message names file and row.
        InputError: the encoding is unknown.
    """
    encoding = check_encoding(encoding)
    entries = (
        entry
        for path in paths
        for place in find_places(path, on_ignored)
        for entry in _read_place(place, fields, encoding)
    )
    return read_entries(entries, on_bad)


def check_paths(paths: Iterable[str | Path], fields: Fields = FIELDS, encoding: str = UTF8) -> None:
    """Check that each file in a list of paths exists, has a known suffix, and has a usable first document.

    The check makes it unlikely that a long run fails later. Only the first document of each file is read.
    Files in folders, standard input and data sets are not checked.

    Args:
        paths: files, folders and data sets, as for `read_documents`.
        fields: names of the fields of a row that contain its text and its id.
        encoding: Python's name for the encoding of the files.

    Raises:
        UnusableDocumentError: a file cannot be read; the message names the file and the problem.
        InputError: the encoding is unknown.
    """
    encoding = check_encoding(encoding)
    for place in (place for path in paths for place in find_places(path)):
        if place.is_file and not place.in_folder:
            for entry in _read_place(place, fields, encoding):
                try:
                    entry.read()
                except UnusableDocumentError:
                    raise
                except InputError as error:
                    raise UnusableDocumentError(f"{entry.where}: {error}", id=entry.id) from error
                break


def estimate_size(paths: Iterable[str | Path]) -> int | None:
    """Return the approximate number of bytes of text that `read_documents` would read.

    Args:
        paths: files, folders and data sets, as for `read_documents`.

    Returns:
        The sum of the sizes of all files; files that cannot be read are not counted. None if the size of the
        text cannot be known before reading, because a path is standard input, a data set, a compressed file,
        or a kind of file that contains much more than its text, such as HTML.
    """
    total = 0
    for place in (place for path in paths for place in find_places(path)):
        if place.problem is not None:
            continue
        if not place.is_file or place.is_compressed or (place.kind and not place.kind.is_mostly_text):
            return None
        try:
            total += Path(place.path).stat().st_size
        except OSError:
            continue  # reading the file raises the same error
    return total


def is_file_in_paths(file: Path, paths: Iterable[str | Path]) -> bool:
    """Check whether a file is among the files that `read_documents` reads for a list of paths.

    Returns True also if the file would be read by another path that leads to the same file, such as a link.
    Returns False if the file does not exist.

    Args:
        file: path of the file.
        paths: files, folders and data sets, as for `read_documents`.
    """
    places = (place for path in paths for place in find_places(path))
    return file.exists() and any(
        place.is_file and Path(place.path).exists() and file.samefile(place.path) for place in places
    )


def _read_place(place: Place, fields: Fields, encoding: str) -> Iterator[Entry]:
    """Yield an `Entry` for each document of a file, of standard input or of a data set.

    An entry is a document that is not read yet. The function raises no error for a place that cannot be read.
    Instead, the last entry that it yields raises the error when this entry is read.

    Args:
        place: the file, standard input or data set.
        fields: names of the fields of a row that contain its text and its id.
        encoding: encoding of the file.
    """
    try:
        if place.problem is not None:
            raise place.problem
        if place.path == STDIN:
            yield from _read_standard_input(fields, encoding)
        elif place.path.startswith(HUB):
            for number, row in enumerate(read_data_set_rows(place.path.removeprefix(HUB)), start=1):
                yield Entry(f"{place.path} row {number}", partial(TextDocument.from_row, row, fields))
        elif place.kind is not None:
            for entry in place.kind.read(place.create_source(encoding), fields):
                yield entry._replace(read=partial(_read_entry, entry), in_folder=place.in_folder)
        elif Path(place.path).exists():
            raise InputError(f"unknown kind of file; accepted kinds are {ACCEPTED}")
        else:
            raise InputError(f"no such file or folder (a data set of the hub is {HUB}NAME)")
    except (InputError, *UNREADABLE) as error:
        problem = error if isinstance(error, InputError) else make_unreadable_error(error)
        yield Entry.from_error(place.path, problem, in_folder=place.in_folder, id=place.known_id)


def _read_entry(entry: Entry) -> TextDocument:
    """Read the document of an entry, and return it.

    Args:
        entry: the document that is not read yet.

    Raises:
        InputError: the document cannot be used, or its file cannot be read.
    """
    try:
        return entry.read()
    except UNREADABLE as error:
        raise make_unreadable_error(error) from error
    except RecursionError as error:
        raise InputError("nested too deep to be read") from error


def _read_standard_input(fields: Fields, encoding: str) -> Iterator[Entry]:
    """Yield an `Entry` (a document that is not read yet) for each document of standard input.

    If standard input starts with ``{``, it is read as JSON Lines. Otherwise it is one document with the id
    "stdin".

    Args:
        fields: names of the fields of a row that contain its text and its id.
        encoding: encoding of standard input.

    Raises:
        RefusedError: standard input is too large for one document, or is not text in this encoding.
    """
    stream, name = sys.stdin.buffer, "standard input"
    if not is_utf8(encoding):
        text = "".join(line.decode(UTF8, "surrogatepass") for line in read_utf8_lines(stream, encoding))
        data = text.encode(UTF8, "surrogatepass")
        if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            yield from read_json_line_entries(name, data.splitlines(keepends=True), fields)
        else:
            yield Entry(name, lambda: TextDocument("stdin", decode_text(data)))
        return
    first = stream.readline(MAX_DOCUMENT_BYTES + 1)
    if first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        yield from read_json_line_entries(name, chain([first], read_utf8_lines(stream)), fields)
        return
    data = first + stream.read(max(0, MAX_DOCUMENT_BYTES + 1 - len(first)))
    if len(data) > MAX_DOCUMENT_BYTES:
        raise make_too_large_error(name)
    yield Entry(name, lambda: TextDocument("stdin", decode_text(data)))
