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
    DatastoreError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    NotOwnerError,
)
from knnstore.failpoints import failpoint
from knnstore.space import check_space
from knnstore.store.home.home import Home
from knnstore.store.home.key_owners import KeyOwner, Owner
from knnstore.store.home.path_safety import (
    check_folder,
    find_hard_link,
    find_home_around,
    find_home_with,
    find_mount,
    is_physically_inside,
)


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
        """The URL or the folder of the keys."""
        return self.home.resolve(self.engine.location)

    @property
    def folder(self) -> Path | None:
        """The folder, with links resolved; None for a URL."""
        return None if "://" in self.location else Path(self.location).resolve()

    @property
    def remembers(self) -> bool:
        """True if the adapter keeps a claim with the keys."""
        return issubclass(self._adapter, SupportsOwner)

    def find_owner(self) -> KeyOwner:
        """Find out who owns the keys there; see "The owner of the keys" in docs/architecture.md."""
        return self._compare(self._read_claim())

    def check_owner(self, *, copied: bool = False) -> KeyOwner:
        """Refuse keys of another store, and unless `copied` those that a copy of this store may own.

        Raises:
            NotOwnerError: the keys are refused; says what to do.
        """
        claim = self._read_claim()
        return self._check(claim, self._compare(claim), copied)

    def claim(self, *, copied: bool = False) -> None:
        """Write this store's claim beside the keys, which the caller has open for writing.

        Raises:
            NotOwnerError: see `check_owner`; somebody may have claimed them before they were opened.
        """
        adapter, claim = self._adapter, self._read_claim()
        if claim is not None:
            self._check(claim, self._compare(claim), copied)
        if issubclass(adapter, SupportsOwner) and claim != self.owner:
            adapter.claim(self.location, str(self.owner), **self.engine.params)

    def check_may_take_over(self) -> None:
        """Refuse to take over keys that are inside another home, for that home would still use them.

        Raises:
            NotOwnerError: they are; names the home. Or a part of them is mounted from elsewhere.
        """
        folder, claim = self.folder, self._read_claim()
        if folder is None or self._compare(claim) is not KeyOwner.OTHER_COPY:
            return
        mount = find_mount(folder)
        if mount is not None:
            raise NotOwnerError(
                f"{mount} is mounted inside the keys at {self.location}, so its files may be another "
                "store's: unmount it, and put the files themselves there"
            )
        home = find_home_around(folder, self.home.path)
        if home is None and claim is not None and "://" not in claim.shown:  # a bind mount has no such parent
            home = find_home_with(folder, Path(claim.shown).parent, self.home.path)
        if home is not None:
            raise NotOwnerError(
                f"the keys at {self.location} are inside the store {home}, which uses them: give this one "
                "keys of its own with `knnstore move`"
            )

    def _compare(self, claim: Owner | None) -> KeyOwner:
        """Find out whose the keys are by what their claim says and where they are."""
        if claim is not None and claim.store_id != self.owner.store_id:
            return KeyOwner.OTHER_STORE
        if claim is not None and self.owner.wrote(claim):
            return KeyOwner.THIS_STORE
        folder = self.folder
        if folder is not None and is_physically_inside(
            folder, self.home.path
        ):  # copied with the home, if copied at all
            return KeyOwner.NOBODY if claim is None else KeyOwner.THIS_STORE
        if claim is not None:
            return KeyOwner.OTHER_COPY
        if folder is None or not self.remembers:
            return KeyOwner.NOBODY
        try:
            return KeyOwner.NOBODY if self.is_empty() else KeyOwner.OTHER_COPY
        except DatastoreError:  # damaged, so not empty
            return KeyOwner.OTHER_COPY

    def _check(self, claim: Owner | None, key_owner: KeyOwner, copied: bool) -> KeyOwner:
        if key_owner is KeyOwner.OTHER_STORE:
            raise NotOwnerError(
                f"the keys at {self.location} belong to another store: give this one its own back from a "
                "backup, or make a new one with `knnstore init`"
            )
        if key_owner is KeyOwner.OTHER_COPY and not copied:
            advice = (
                "take the keys over with `knnstore repair --take-over`, else give this one keys of its own "
                "with `knnstore move`"
            )
            if claim is None or not claim.database:
                raise NotOwnerError(
                    f"the keys at {self.location} are not inside {self.home.path}, and nothing beside them "
                    f"says that {self.owner.shown!r} wrote them: if no other store uses them, {advice}"
                )
            raise NotOwnerError(
                f"the keys at {self.location} are written by {claim.shown!r}, and {self.owner.shown!r} is "
                f"another copy of that store, or was moved: if the first is gone, {advice}"
            )
        return key_owner

    def _check_not_shared(self) -> None:
        """Refuse to write keys of a copy whose files are also the original's, as hard links are.

        Raises:
            NotOwnerError: a file has a second name; names it.
        """
        folder, claim = self.folder, self._read_claim()
        if folder is None or (claim is not None and self.owner.wrote(claim)):
            return
        shared = find_hard_link(folder)
        if shared is not None:
            raise NotOwnerError(
                f"{shared} has a second name (a hard link), so another store may use the same file: replace "
                f"{folder} by a copy of it, made with `cp -r`"
            )

    @property
    def _adapter(self) -> type[Datastore]:
        return KeylessDatastore if self.engine.is_keyless else registry.load(self.engine.adapter)

    def _read_claim(self) -> Owner | None:
        """Read who claimed the keys there; None where nobody did."""
        adapter = self._adapter
        if not issubclass(adapter, SupportsOwner):
            return None
        text = adapter.owner(self.location, **self.engine.params)
        return None if text is None else Owner.parse(text)

    def open(self, mode: Mode) -> Datastore:
        """Open the datastore.

        Raises:
            ConfigError: the adapter keeps nothing after the process ends, or the folder leads elsewhere.
            NotOwnerError: opened for writing, and a file is also another store's; see `_check_not_shared`.
        """
        self._check_folder()
        if mode == "a":
            self._check_not_shared()
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
            records: number of records that will be added.
            what: the operation, as the subject of a sentence.

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
        """Return the error for a place that already has a datastore."""
        return DatastoreExistsError(
            f"a datastore is already at {self.engine.adapter} {self.engine.location}; "
            "choose another --location"
        )

    def is_empty(self) -> bool:
        """Check that the place has no datastore, or a datastore of this store without records."""
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
        key_owner = self.find_owner()
        if key_owner in (KeyOwner.OTHER_STORE, KeyOwner.OTHER_COPY):
            return f"the keys there are not this home's; {self} stays as it is"
        if key_owner is KeyOwner.NOBODY and self.remembers and not self.is_empty():
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


def exists_and_is_not_empty(path: Path) -> bool:
    """Check whether a path exists and is not an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
