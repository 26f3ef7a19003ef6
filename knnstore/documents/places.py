"""Which files, and which names of something else, a path stands for."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

STDIN = "-"
HUB = "hf:"
"""What the name of a data set begins with."""

ROW_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst")
PARQUET = ".parquet"
ACCEPTED = f"{' '.join(ROW_SUFFIXES + TEXT_SUFFIXES)}, .gz of each, and {PARQUET}"

OnIgnored = Callable[[Path], None]
"""Called with each file of a folder that holds no document for its kind."""


class Place(NamedTuple):
    """Something to read documents from."""

    path: str
    """A file, standard input or a data set."""
    id: str
    """Of the document, where the file is one."""
    in_folder: bool = False
    """Whether it was found in a folder, not named."""
    problem: str | None = None
    """Why it cannot be read, where that is known."""

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
        """Whether it ends in ``.gz``."""
        return self.path.endswith(".gz")

    @property
    def is_text(self) -> bool:
        """Whether the file is one document."""
        return self.suffix in TEXT_SUFFIXES


def places_of(path: str | Path, on_ignored: OnIgnored | None = None) -> Iterator[Place]:
    """List what a path stands for: itself, or the files below it, hidden ones aside.

    The id of a text file is its path in the folder given, with ``/``; of a file that is given, its name.
    """
    named = Place(str(path), Path(path).name)
    if not named.is_file or not Path(path).is_dir():
        yield named
        return
    folder = Path(path)
    unreadable: list[Place] = []

    def hear(error: OSError) -> None:
        problem = f"cannot be read: {error.strerror or error}"
        unreadable.append(Place(str(error.filename), "", in_folder=True, problem=problem))

    below = [Path(root, name) for root, _, names in _walk(folder, hear) for name in names]
    found = [
        Place(str(file), file.relative_to(folder).as_posix(), in_folder=True)
        for file in sorted(below)
        if not file.name.startswith(".") and (file.is_file() or file.is_symlink())
    ]
    accepted = [place for place in found if is_accepted(place)]
    if on_ignored is not None:
        for place in found:
            if not is_accepted(place):
                on_ignored(Path(place.path))
    yield from unreadable
    yield from accepted
    if not accepted:  # is named in a message, not passed over
        yield named._replace(problem=f"no document in this folder; accepted are {ACCEPTED}")


def is_accepted(place: Place) -> bool:
    """Whether documents are read from files of this kind."""
    return (
        place.is_text or place.suffix in ROW_SUFFIXES or (place.suffix == PARQUET and not place.is_compressed)
    )


def _walk(folder: Path, on_error: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder, without what is hidden in it."""
    for root, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield root, folders, names
