"""Which files, and which names of something else, a path stands for."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from knnstore.documents.document import Reason, RefusedError
from knnstore.documents.files import UTF8, Source, leads_out, link_out
from knnstore.documents.formats import ACCEPTED, KINDS, PARQUET, Kind
from knnstore.errors import InputError

STDIN = "-"
HUB = "hf:"
"""What the name of a data set begins with."""

OnIgnored = Callable[[Path], None]
"""Called with each file of a folder that holds no document for its kind."""


class Place(NamedTuple):
    """Something to read documents from."""

    path: str
    """A file, standard input or a data set."""
    id: str
    """Of the document, where the file is one."""
    root: Path | None = None
    """The folder that it was found in; None where it was named."""
    problem: InputError | None = None
    """Why it cannot be read, where that is known."""

    @property
    def in_folder(self) -> bool:
        """Whether it was found in a folder, not named."""
        return self.root is not None

    @property
    def is_file(self) -> bool:
        """Whether it is a file, or should be one."""
        return self.path != STDIN and not self.path.startswith(HUB)

    @property
    def suffix(self) -> str:
        """The kind of file, in small letters, without ``.gz``."""
        path = Path(self.path)
        return Path(path.stem).suffix.lower() if self.is_compressed else path.suffix.lower()

    @property
    def is_compressed(self) -> bool:
        """Whether it ends in ``.gz``, in letters of any case."""
        return self.path.lower().endswith(".gz")

    @property
    def kind(self) -> Kind | None:
        """How documents are read from the file; None where they are not."""
        return None if self.is_compressed and self.suffix == PARQUET else KINDS.get(self.suffix)

    @property
    def is_document(self) -> bool:
        """Whether the file is one document."""
        return self.kind is not None and self.kind.is_document

    @property
    def known_id(self) -> str | None:
        """The id of its document, where that is known before the file is read."""
        return self.id if self.is_document else None

    def source(self, encoding: str = UTF8) -> Source:
        """Return the file to read."""
        return Source(self.path, self.id, self.is_compressed, self.root, encoding)


def places_of(path: str | Path, on_ignored: OnIgnored | None = None) -> Iterator[Place]:
    """List what a path stands for: itself, or the files below it, hidden ones aside.

    The id of a file that is one document is its path in the folder given, with ``/``. That of a file that is
    named is its name. Links to files are followed within the folder only, links to folders not at all.
    """
    named = Place(str(path), Path(path).name)
    if not named.is_file or not Path(path).is_dir():
        yield named
        return
    folder = Path(path)
    refused: list[Place] = []

    def keep_error(error: OSError) -> None:
        problem = RefusedError(f"cannot be read: {error.strerror or error}", Reason.UNREADABLE)
        refused.append(Place(str(error.filename), "", folder, problem))

    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=keep_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
        for name in folders:
            if (link := Path(root, name)).is_symlink():
                problem = RefusedError("a link to a folder, which is not followed", Reason.LINK)
                refused.append(Place(str(link), "", folder, problem))
    accepted = []
    for file in sorted(files):
        place = Place(str(file), file.relative_to(folder).as_posix(), folder)
        if place.kind is not None:
            accepted.append(place._replace(problem=_problem_of(file, folder)))
        elif on_ignored is not None:
            on_ignored(file)
    yield from refused
    yield from accepted
    if not accepted:  # is named in a message, not passed over
        yield named._replace(problem=InputError(f"no document in this folder; accepted are {ACCEPTED}"))


def _problem_of(file: Path, folder: Path) -> RefusedError | None:
    """Return why a file of a folder is not opened: it leads out of the folder or is no regular file."""
    try:
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            if leads_out(file, folder):
                return link_out(file)
            mode = file.stat().st_mode
    except OSError:
        return None  # opening it will say why
    if stat.S_ISREG(mode):
        return None
    return RefusedError("no regular file: a pipe, a device, a socket or a folder", Reason.SPECIAL)
