"""The places of keys: opening the datastore at one, refusing one that is taken, and erasing one."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from knnstore.catalog import Engine, Identity
from knnstore.datastore import Datastore, Metric, Mode, SupportsErase, registry
from knnstore.errors import (
    ConfigError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
)
from knnstore.failpoints import failpoint
from knnstore.store.home.following import check_folder
from knnstore.store.home.home import Home


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine keeps the keys of a store, or is to keep them."""

    home: Home
    identity: Identity
    engine: Engine

    def __str__(self) -> str:
        return f"{self.engine.adapter} at {self.engine.location}"

    @property
    def location(self) -> str:
        """A URL, or a folder."""
        return self.home.resolve(self.engine.location)

    @property
    def folder(self) -> Path | None:
        """The folder, links resolved; None where it is a URL."""
        return None if "://" in self.location else Path(self.location).resolve()

    def open(self, mode: Mode) -> Datastore:
        """Open the datastore.

        Raises:
            ConfigError: the adapter keeps nothing after the process ends, or the folder leads elsewhere.
        """
        self._check_folder()
        opened = registry.load(self.engine.adapter).open(
            self.location,
            dim=self.identity.dim,
            metric=Metric(self.identity.metric),
            mode=mode,
            **self.engine.params,
        )
        if not opened.capabilities.persistent:
            opened.close()
            raise ConfigError(
                f"{self.engine.adapter} keeps nothing after the process ends, so a store cannot stand on it: "
                "choose another store, or use the adapter directly"
            )
        return opened

    def check_free(self) -> None:
        """Refuse a place where a datastore is.

        Raises:
            DatastoreExistsError: there is one.
        """
        with suppress(DatastoreNotFoundError):
            self.open("r").close()
            raise self.taken()

    def taken(self) -> DatastoreExistsError:
        """The error that a datastore is there."""
        return DatastoreExistsError(
            f"a datastore is already at {self.engine.adapter} {self.engine.location}; "
            "choose another --location"
        )

    def is_empty(self) -> bool:
        """Whether no datastore is there, or one of this store without records."""
        try:
            with self.open("r") as found:
                return found.count() == 0
        except DatastoreNotFoundError:
            return True
        except DatastoreMismatchError:
            return False

    def erase(self) -> str | None:
        """Remove the datastore; returns why that is left to the user, if it is."""
        adapter = registry.load(self.engine.adapter)
        if not issubclass(adapter, SupportsErase):
            return f"the adapter {self.engine.adapter} removes nothing; {self} is yours to delete"
        self._check_folder()
        adapter.erase(self.location, **self.engine.params)
        failpoint("move.erased")
        return None

    def _check_folder(self) -> None:
        if self.folder is None:
            return
        try:
            self.folder.lstat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # who needs it says so
        except (OSError, ValueError) as error:
            raise ConfigError(f"the keys cannot be at {str(self.folder)[:100]}: {error.args[-1]}") from error
        check_folder(self.folder)


def holds_something(path: Path) -> bool:
    """Whether a path is anything but free or an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
