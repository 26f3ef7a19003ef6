"""The places of keys: opening the datastore at one, refusing one that is taken, and erasing one."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from knnstore.catalog import Engine, Identity
from knnstore.datastore import (
    Datastore,
    KeylessDatastore,
    Metric,
    Mode,
    SupportsErase,
    SupportsOwner,
    SupportsSize,
    registry,
)
from knnstore.errors import (
    ConfigError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    NotOwnerError,
)
from knnstore.failpoints import failpoint
from knnstore.space import check_space
from knnstore.store.home.following import check_folder
from knnstore.store.home.home import Home
from knnstore.store.home.owners import Owner, Whose


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine keeps the keys of a store, or is to keep them."""

    home: Home
    identity: Identity
    engine: Engine
    owner: Owner
    """The store."""

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

    @property
    def remembers(self) -> bool:
        """Whether the adapter remembers whose keys it keeps."""
        return issubclass(self._adapter, SupportsOwner)

    def whose(self) -> Whose:
        """Whose keys are there."""
        return self._us.whose(self._found())

    def check_ours(self, *, copied: bool = False) -> Whose:
        """Refuse keys of another store, and unless `copied` those of a home that this one is a copy of.

        Raises:
            NotOwnerError: they are; says what to do.
        """
        return self._check(self._found(), copied)

    def claim(self, *, copied: bool = False) -> None:
        """Make the keys there the store's, which has them open for writing.

        Raises:
            NotOwnerError: see `check_ours`; somebody may have claimed them before they were opened.
        """
        adapter, found = self._adapter, self._found()
        self._check(found, copied)
        if issubclass(adapter, SupportsOwner) and found != self._us:
            adapter.claim(self.location, str(self._us), **self.engine.params)

    def _check(self, found: Owner | None, copied: bool) -> Whose:
        whose = self._us.whose(found)
        if whose is Whose.ANOTHERS:
            raise NotOwnerError(
                f"the keys at {self.location} belong to another store: give this one its own back from a "
                "backup, or make a new one with `knnstore init`"
            )
        if whose is Whose.A_COPYS and found is not None and not copied:
            raise NotOwnerError(
                f"the keys at {self.location} are written by {found.shown!r}, and {self.owner.shown!r} is "
                "another copy of that store, or was moved: if the first is gone, take the keys over with "
                "`knnstore repair --take-over`, else give this one keys of its own with `knnstore move`"
            )
        return whose

    @property
    def _adapter(self) -> type[Datastore]:
        return KeylessDatastore if self.engine.is_keyless else registry.load(self.engine.adapter)

    @property
    def _us(self) -> Owner:
        folder = self.folder
        inside = folder is not None and folder.is_relative_to(self.home.path.resolve())
        return self.owner.inside() if inside else self.owner

    def _found(self) -> Owner | None:
        """Who claimed the keys there."""
        adapter = self._adapter
        if not issubclass(adapter, SupportsOwner):
            return None
        text = adapter.owner(self.location, **self.engine.params)
        return None if text is None else Owner.parse(text)

    def open(self, mode: Mode) -> Datastore:
        """Open the datastore.

        Raises:
            ConfigError: the adapter keeps nothing after the process ends, or the folder leads elsewhere.
        """
        self._check_folder()
        opened = self._adapter.open(
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

    def check_space(self, records: int, what: str) -> None:
        """Refuse records that will not fit.

        Args:
            records: how many more there will be.
            what: what is to be done, as the subject of a sentence.

        Raises:
            DiskFullError: there is too little space.
        """
        if self.folder is not None:
            adapter: type = self._adapter
            size = 4 * self.identity.dim + 64  # where an engine does not say
            if issubclass(adapter, SupportsSize):
                size = adapter.record_size(self.identity.dim, **self.engine.params)
            check_space(self.folder, records * size, what)

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
        """Remove the datastore, if it is ours; returns why that is left to the user, if it is.

        Where nobody claimed it, the caller knows that it is.
        """
        adapter = self._adapter
        whose = self.whose()
        if whose in (Whose.ANOTHERS, Whose.A_COPYS):
            return f"the keys there are not this home's; {self} stays as it is"
        if whose is Whose.NOBODYS and self.remembers and not self.is_empty():
            return f"no store has claimed the keys there; {self} is yours to delete"
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
