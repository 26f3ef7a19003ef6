"""The home: the folder that a store is known by. It says where the catalogue is, and holds what is local.

::

    HOME/knnstore.json    format, and the catalogue's URL when it is not in the home
    HOME/catalog.db       the catalogue, when it is SQLite
    HOME/keys/            the datastore, when it is embedded
    HOME/writer.lock      held by the one process that writes
    HOME/move.json        a move of the keys to another engine that is unfinished
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import URL

from knnstore.catalog import parse_url
from knnstore.datastore.files import publish, sync_directory
from knnstore.errors import ConfigError, StoreExistsError, StoreNotFoundError

FORMAT = 1
CATALOG_VARIABLE = "KNNSTORE_CATALOG"
"""Environment variable with the catalogue's URL and its password, which is not written in the home."""

_DESCRIPTION = "knnstore.json"


class Home:
    """An existing home; use `create` and `open`.

    Args:
        path: the folder.
        catalog_url: where the catalogue is.
    """

    def __init__(self, path: Path, catalog_url: URL) -> None:
        self.path = path
        self.catalog_url = catalog_url

    def resolve(self, location: str) -> str:
        """Where an engine's keys are: a URL as it stands, a relative folder inside the home."""
        return location if "://" in location else str(self.path / location)

    @classmethod
    @contextmanager
    def create(cls, path: str | os.PathLike[str], catalog: str | None) -> Iterator["Home"]:
        """Make a home beside its place, and move it there when the block ends well.

        So a home is whole or not there. A password in the catalogue's URL is not written.

        Args:
            path: the folder; new or empty.
            catalog: the catalogue's URL; None is SQLite in the home.

        Raises:
            StoreExistsError: a store is there.
            ConfigError: the folder holds other files, or the URL cannot be used.
        """
        folder = Path(path).resolve()
        if (folder / _DESCRIPTION).exists():
            raise StoreExistsError(f"{folder} is a knnstore already; remove it or choose another --home")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and not an empty folder; choose another --home")
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            url = cls._catalog_url(unfinished, catalog)
            saved = None if catalog is None else url._replace(password=None).render_as_string()
            yield cls(unfinished, url)
            description = json.dumps({"format": FORMAT, "catalog": saved}, indent=2)
            publish(unfinished / _DESCRIPTION, description.encode() + b"\n", "home")
            os.rename(unfinished, folder)
            sync_directory(folder.parent)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str], catalog: str | None = None) -> "Home":
        """Read a home's description.

        Args:
            path: the folder.
            catalog: the catalogue's URL with its password; default is that of the environment, else
                the one written.

        Raises:
            StoreNotFoundError: the folder is no home.
            ConfigError: its description is damaged or of a newer format.
        """
        folder = Path(path)
        try:
            description = json.loads((folder / _DESCRIPTION).read_bytes())
            written, saved = description["format"], description["catalog"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"no knnstore at {folder}; make one with `knnstore init`") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / _DESCRIPTION} is damaged: {error}") from error
        if written != FORMAT:
            raise ConfigError(f"{folder} has format {written}, this package reads {FORMAT}: upgrade knnstore")
        url = cls._catalog_url(folder, saved)
        given = catalog or (saved and os.environ.get(CATALOG_VARIABLE))
        return cls(folder, cls._same_database(url, given) if given else url)

    @staticmethod
    def _same_database(url: URL, given: str) -> URL:
        """The URL given, which may bring a password but must name the database of the home."""
        parsed = parse_url(given)
        if parsed._replace(password=None) != url._replace(password=None):
            known, other = (u.render_as_string(hide_password=True) for u in (url, parsed))
            raise ConfigError(f"the store's catalogue is {known}, {CATALOG_VARIABLE} names another: {other}")
        return parsed

    @staticmethod
    def _catalog_url(folder: Path, catalog: str | None) -> URL:
        if catalog is None:
            return URL.create("sqlite", database=str(folder / "catalog.db"))
        return parse_url(catalog)
