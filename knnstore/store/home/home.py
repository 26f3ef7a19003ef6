"""The home: the folder that a store is known by. It says where the catalog is, and holds what is local.

::

    HOME/knnstore.json    format, and the catalog's URL when it is not in the home
    HOME/catalog.db       the catalog, when it is SQLite
    HOME/keys/            the datastore, when it is embedded
    HOME/weights/         what was fitted and is too large for SQL, as settings name it
    HOME/writer.lock      held by the one process that writes
    HOME/reserve          space to remove documents with once the disk is full
    HOME/move.json        a move of the keys to another engine that is unfinished
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from knnstore.catalog import URL, mask_password, parse_url, sqlite_url, without_password
from knnstore.durable import NoFileError, WriterLock, publish, read_file
from knnstore.errors import ConfigError, StoreNotFoundError
from knnstore.secret_files import read_secret
from knnstore.space import Reserve
from knnstore.store.home.path_safety import (
    CATALOG_VARIABLE,
    DESCRIPTION,
    check_catalog,
    check_catalog_is_single,
    check_files,
)

FORMAT = 1


class Home:
    """A folder and where its catalog is; use `open` for one that is there."""

    def __init__(self, path: Path, catalog_url: URL) -> None:
        self.path = path
        self.catalog_url = catalog_url

    def resolve(self, location: str) -> str:
        """Return the place of an engine's keys: URLs are unchanged, relative folders are inside the home."""
        return location if "://" in location else str(self.path / location)

    @property
    def has_catalog(self) -> bool:
        """True if the catalog is a file in the home."""
        return self.catalog_url == self._catalog_url(self.path, None)

    def exposed(self) -> Path | None:
        """Return a file of the home that every user of the machine can read; None if there is none."""
        if not self.path.stat().st_mode & stat.S_IXOTH:
            return None
        for folder, inner, names in os.walk(self.path):
            inner[:] = [name for name in inner if (Path(folder) / name).stat().st_mode & stat.S_IXOTH]
            for path in (Path(folder) / name for name in names):
                if path.stat().st_mode & stat.S_IROTH:
                    return path
        return None

    @property
    def reserve(self) -> Reserve:
        """Space to remove documents with once the disk is full."""
        return Reserve(self.path)

    @property
    def weights(self) -> Path:
        """The folder of fitted weights; it is made when the first weights are saved."""
        return self.path / "weights"

    @classmethod
    def new(cls, path: Path, catalog: str | None) -> Self:
        """Return a home that does not exist yet, with its catalog at a URL; None means SQLite in the home.

        Raises:
            ConfigError: the URL cannot be used.
        """
        return cls(path, cls._catalog_url(path, catalog))

    def write(self) -> None:
        """Write the place of the catalog durably, without a password of its URL."""
        saved = None if self.has_catalog else without_password(self.catalog_url)
        description = json.dumps({"format": FORMAT, "catalog": saved}, indent=2)
        publish(self.path / DESCRIPTION, description.encode() + b"\n", "home")

    @classmethod
    def open(cls, path: str | os.PathLike[str], catalog: str | None = None, *, writing: bool = False) -> Self:
        """Read a home's description.

        The URL of the catalog is the first of these:

        1. `catalog`;
        2. the value of KNNSTORE_CATALOG, or the content of the file that KNNSTORE_CATALOG_FILE names, if the
           description has a URL;
        3. the URL of the description, or SQLite in the home.

        The first two may only add a password: they must name the same database as the third. With `writing`
        the reserve file is deleted if the disk is full.

        Raises:
            StoreNotFoundError: the folder is no home.
            ConfigError: its description is damaged or of a newer format, or the home leads where only the
                user may send us; see `knnstore.store.home.path_safety`.
        """
        folder = Path(path)
        if folder.is_file():
            raise StoreNotFoundError(f"no knnstore at {folder}: this is a file, a store is a folder")
        check_files(folder)
        try:
            description = json.loads(read_file(folder / DESCRIPTION))
            written, saved = description["format"], description["catalog"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"no knnstore at {folder}; make one with `knnstore init`") from error
        except (NoFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, NoFileError) else error
            raise ConfigError(f"{folder / DESCRIPTION} is damaged: {reason}") from error
        if not isinstance(written, int) or written < 1:
            raise ConfigError(f"{folder / DESCRIPTION} is damaged: it names no format")
        if written != FORMAT:
            raise ConfigError(f"{folder} has format {written}, this package reads {FORMAT}: upgrade knnstore")
        url = cls._catalog_url(folder, saved)
        given = catalog or (saved and read_secret(CATALOG_VARIABLE))
        if given:
            url = cls._same_database(url, given)
        else:
            check_catalog(folder, url, os.environ, writing=writing)
        found = cls(folder, url)
        if writing:
            check_catalog_is_single(folder, url)
            found.reserve.give_back()
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out, and leave the reserve behind.

        Raises:
            LockedError: another process writes; names it.
            ReadOnlyError: nothing can be written there.
        """
        lock = WriterLock(self.path)
        try:
            yield
        finally:
            self.reserve.keep()
            lock.release()

    @staticmethod
    def _same_database(url: URL, given: str) -> URL:
        """Check that a URL names the database of the home, and return it; it may add a password."""
        parsed = parse_url(given)
        if without_password(parsed) != without_password(url):
            raise ConfigError(
                f"the store's catalog is {mask_password(url)}, {CATALOG_VARIABLE} names another: "
                f"{mask_password(parsed)}"
            )
        return parsed

    @staticmethod
    def _catalog_url(folder: Path, catalog: str | None) -> URL:
        return sqlite_url(folder / "catalog.db") if catalog is None else parse_url(catalog)
