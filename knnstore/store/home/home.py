"""The home: the folder of a store. It names the catalog, and holds all local files of the store.

::

    HOME/knnstore.json    description file: format, and the catalog's URL if it is not in the home
    HOME/catalog.db       the catalog, if it is SQLite
    HOME/keys/            the datastore (vector keys), if it is embedded
    HOME/weights/         files of fitted weights that saved settings name
    HOME/writer.lock      lock of the one process that writes
    HOME/reserve          reserved disk space, given back so that documents can be removed from a full disk
    HOME/move.json        state of an unfinished move of the keys to another engine
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from knnstore.catalog import URL, mask_password, parse_url, remove_password, sqlite_url
from knnstore.durable import NoFileError, WriterLock, read_file, write_atomically
from knnstore.errors import ConfigError, StoreNotFoundError
from knnstore.secret_files import read_secret
from knnstore.space import Reserve
from knnstore.store.home.path_safety import (
    CATALOG_VARIABLE,
    DESCRIPTION,
    check_catalog,
    check_catalog_has_no_hard_link,
    check_files,
)

FORMAT = 1


class Home:
    """The home of a store: its folder, and the URL of its catalog (the SQL database of the store).

    `open` reads the description file of an existing home; `new` describes the home of a new store.

    Args:
        path: the folder.
        catalog_url: URL of the catalog, with the password if there is one.
    """

    def __init__(self, path: Path, catalog_url: URL) -> None:
        self.path = path
        self.catalog_url = catalog_url

    def resolve_location(self, location: str) -> str:
        """Return the URL or the path of an engine's keys for the location that is saved in the catalog.

        Args:
            location: a URL, which is returned unchanged; an absolute path, which is returned unchanged too;
                or a path relative to the home (the folder of the store).
        """
        return location if "://" in location else str(self.path / location)

    @property
    def has_catalog(self) -> bool:
        """True if the catalog is the SQLite file ``catalog.db`` in the home (the folder of the store).

        Only the URL is compared: the file need not exist yet. False if the catalog is another database, for
        example on a PostgreSQL server.
        """
        return self.catalog_url == self._make_catalog_url(self.path, None)

    def find_exposed_file(self) -> Path | None:
        """Return a file in the home (the store's folder) that every user of this machine can read.

        Returns None if there is no such file.
        """
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
        """Object that manages the file ``reserve``.

        The file takes disk space that is given back when the disk is full, so that documents can be removed.
        """
        return Reserve(self.path)

    @property
    def weights(self) -> Path:
        """Path of the folder with files of fitted weights, which exists after the first weights are saved."""
        return self.path / "weights"

    @classmethod
    def new(cls, path: Path, catalog: str | None) -> Self:
        """Return an object for the home of a new store. Nothing is written to disk.

        Args:
            path: the folder, which need not exist.
            catalog: URL of the catalog; None means a SQLite file in the folder.

        Raises:
            ConfigError: if the URL cannot be used.
        """
        return cls(path, cls._make_catalog_url(path, catalog))

    def write(self) -> None:
        """Write the description file durably: the format, and the catalog's URL without its password."""
        saved = None if self.has_catalog else remove_password(self.catalog_url)
        description = json.dumps({"format": FORMAT, "catalog": saved}, indent=2)
        write_atomically(self.path / DESCRIPTION, description.encode() + b"\n", "home")

    @classmethod
    def open(cls, path: str | os.PathLike[str], catalog: str | None = None, *, writing: bool = False) -> Self:
        """Read the description file of an existing home, and return the home.

        The URL of the catalog is the first that is set:

        1. the argument `catalog`;
        2. if the description file has a URL: the environment variable KNNSTORE_CATALOG, or the content of the
           file that KNNSTORE_CATALOG_FILE names;
        3. the URL in the description file, or else the URL of the SQLite file in the home.

        The URLs 1 and 2 must name the same database as URL 3; they may only add or change its password.

        Args:
            path: the folder.
            catalog: URL of the catalog; None uses the environment or the description file.
            writing: True if the store will be opened for writing. Then the files of the catalog must not have
                a second name (hard link), and the file that reserves disk space is deleted if the disk is
                full.

        Raises:
            StoreNotFoundError: if the folder has no description file.
            ConfigError: if the description is damaged or has another format, or if links or the catalog's URL
                lead out of the home without the user's consent; see `knnstore.store.home.path_safety`.
        """
        folder = Path(path)
        if folder.is_file():
            raise StoreNotFoundError(f"no knnstore at {folder}: this is a file, a store is a folder")
        check_files(folder)
        try:
            description = json.loads(read_file(folder / DESCRIPTION))
            format_number, saved = description["format"], description["catalog"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"no knnstore at {folder}; make one with `knnstore init`") from error
        except (NoFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, NoFileError) else error
            raise ConfigError(f"{folder / DESCRIPTION} is damaged: {reason}") from error
        if not isinstance(format_number, int) or format_number < 1:
            raise ConfigError(f"{folder / DESCRIPTION} is damaged: it has no valid format number")
        if format_number != FORMAT:
            raise ConfigError(
                f"{folder} has format {format_number}, this package reads {FORMAT}: upgrade knnstore"
            )
        url = cls._make_catalog_url(folder, saved)
        user_url = catalog or (saved and read_secret(CATALOG_VARIABLE))
        if user_url:
            url = cls._check_same_database(url, user_url)
        else:
            check_catalog(folder, url, os.environ, writing=writing)
        home = cls(folder, url)
        if writing:
            check_catalog_has_no_hard_link(folder, url)
            home.reserve.give_back()
        return home

    @contextmanager
    def lock_for_writing(self) -> Iterator[None]:
        """Hold the lock of the store's only writer in the ``with`` block.

        At the end of the block, disk space for later removals is reserved, and the lock is released.

        Raises:
            LockedError: if another process writes. The message names the process.
            ReadOnlyError: if the folder cannot be written to.
        """
        lock = WriterLock(self.path)
        try:
            yield
        finally:
            self.reserve.ensure_reserved()
            lock.release()

    @staticmethod
    def _check_same_database(url: URL, user_url: str) -> URL:
        """Parse the URL that the user gave for the catalog, check its database, and return it.

        Args:
            url: URL of the catalog in the description file.
            user_url: URL from the user, which may only add or change the password of `url`.

        Raises:
            ConfigError: if the two URLs differ in more than the password, or `user_url` is not valid.
        """
        parsed = parse_url(user_url)
        if remove_password(parsed) != remove_password(url):
            raise ConfigError(
                f"the store's catalog is {mask_password(url)}, but {CATALOG_VARIABLE} names another, "
                f"{mask_password(parsed)}: unset it, or choose the store of that catalog with --home"
            )
        return parsed

    @staticmethod
    def _make_catalog_url(folder: Path, catalog: str | None) -> URL:
        """Parse the URL of a store's catalog, and return it.

        Args:
            folder: the home (the folder of the store).
            catalog: the URL as text; None stands for the SQLite file in the home.
        """
        return sqlite_url(folder / "catalog.db") if catalog is None else parse_url(catalog)
