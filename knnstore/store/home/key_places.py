"""Places and owners of keys: `Place` opens, checks, claims and erases the datastore at a location.

`Owner` is a store as the owner of keys, and `KeyOwner` says whose the keys at a place are. A claim is a line
of text that a store writes beside its keys, so that other stores recognize the owner. It names the store and
the database of its catalog. A copy of a store's folder has the same store id, so the store id alone does not
identify the owner. The claim also has an identifier of the database, which differs in a copy: a copied file
has another inode number, and a restored database has other numbers.
"""

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Self

from knnstore.catalog import Catalog, Engine, Identity, identify_file
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
from knnstore.store.home.path_safety import (
    check_folder,
    find_hard_link,
    find_home_around,
    find_home_containing,
    find_mount,
    is_physically_inside,
)


class KeyOwner(Enum):
    """Owner of the keys at a location: this store, nobody, another copy of this store, or another store."""

    THIS_STORE = auto()
    """The keys belong to this store, which may write them. This includes keys that were copied together with
    the store's folder."""
    NOBODY = auto()
    """No store has claimed the keys, and this store may claim them. They are in this store's folder or at a
    URL, or there are no records, or the adapter cannot save claims."""
    OTHER_COPY = auto()
    """The keys belong to another copy of this store, for example to the original from which this store's
    folder was copied. Also the result if the owner cannot be determined."""
    OTHER_STORE = auto()
    """The keys belong to a store with another id."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A store as the owner of keys. ``str(owner)`` is the claim that the store writes beside its keys."""

    store_id: str
    """Id of the store, which copies of the store share."""
    database: str = ""
    """Identifier of the catalog's database, which a copy of the database does not share.

    Empty in a claim that an older knnstore wrote for keys inside the store's folder.
    """
    shown: str = ""
    """Location of the catalog's database: the absolute path of a SQLite file, or a URL without password."""

    @classmethod
    def from_catalog(cls, catalog: Catalog) -> Self:
        """Return the owner that stands for the store of a catalog."""
        return cls(catalog.store_id, *catalog.identify_database())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a claim, which `str(owner)` has made. Missing parts become empty strings."""
        store_id, _, rest = text.partition(" ")
        database, _, shown = rest.partition(" ")
        return cls(store_id, database, shown)

    def __str__(self) -> str:
        return f"{self.store_id} {self.database} {self.shown}".rstrip()

    def has_written(self, claim: Self) -> bool:
        """Check whether this store has written a claim (a text beside keys that names their owner).

        The claim must have the store id and the database identifier of this store. Inode numbers of two file
        systems may be equal by chance. So the result is also False if the claim names another SQLite file
        that exists and has the same identifier: that file's store has written the claim.

        Args:
            claim: the claim that was found beside the keys.
        """
        if (claim.store_id, claim.database) != (self.store_id, self.database) or not self.database:
            return False
        if "://" in claim.shown or claim.shown == self.shown:
            return True
        try:
            theirs, ours = Path(claim.shown), Path(self.shown)
            return theirs.samefile(ours) or identify_file(theirs) != claim.database
        except (OSError, ValueError):  # moved, or not ours to look at
            return True


@dataclass(frozen=True, slots=True)
class Place:
    """A location at which a vector engine keeps the keys of a store, or will keep them."""

    home: Home
    """Folder of the store."""
    identity: Identity
    """Model and parameters of the store; dimension and metric of the keys are used."""
    engine: Engine
    """Adapter, location and parameters of the vector engine."""
    owner: Owner
    """The store that uses the place."""

    def __str__(self) -> str:
        return f"{self.engine.adapter} at {self.engine.location}"

    @property
    def location(self) -> str:
        """URL, or path of the folder, of the keys. A relative path in `engine` is joined to the home."""
        return self.home.resolve_location(self.engine.location)

    @property
    def folder(self) -> Path | None:
        """Path of the folder of the keys, with symbolic links resolved; None if the location is a URL."""
        return None if "://" in self.location else Path(self.location).resolve()

    @property
    def saves_claims(self) -> bool:
        """True if the adapter can save a claim (the owner's name) beside the keys."""
        return issubclass(self._adapter_class, SupportsOwner)

    def find_owner(self) -> KeyOwner:
        """Return the owner of the keys at this place. If another store owns them, no error is raised.

        The claim (a text beside the keys that names their owner) decides. Without a claim, the location of
        the keys and the number of records decide. The section "The owner of the keys" in
        docs/architecture.md has all cases.
        """
        return self._compare_claim(self._read_claim())

    def check_owner(self, *, copied: bool = False) -> KeyOwner:
        """Check that this store may use the keys at this place, and return the owner of the keys.

        Args:
            copied: True accepts keys that belong to another copy of this store.

        Raises:
            NotOwnerError: if the keys belong to another store, or to another copy of this store and `copied`
                is False. The message says what to do.
        """
        claim = self._read_claim()
        return self._check_key_owner(claim, self._compare_claim(claim), copied)

    def claim(self, *, copied: bool = False) -> None:
        """Write this store's claim (its name as the owner) beside the keys.

        The caller has opened the keys for writing. If the adapter cannot save claims, the method does
        nothing.

        Args:
            copied: True replaces the claim of another copy of this store.

        Raises:
            NotOwnerError: if another store has claimed the keys, or if another copy of this store has claimed
                the keys and `copied` is False.
        """
        adapter, claim = self._adapter_class, self._read_claim()
        if claim is not None:
            self._check_key_owner(claim, self._compare_claim(claim), copied)
        if issubclass(adapter, SupportsOwner) and claim != self.owner:
            adapter.claim(self.location, str(self.owner), **self.engine.params)

    def check_may_take_over(self) -> None:
        """Check that this store may take the keys over from another copy of this store.

        Nothing is checked if the keys do not belong to another copy, or if their location is a URL.

        Raises:
            NotOwnerError: if the keys are inside the folder of another store, because that store still uses
                them; or if a file system is mounted inside the folder of the keys. The message names the
                folder.
        """
        folder, claim = self.folder, self._read_claim()
        if folder is None or self._compare_claim(claim) is not KeyOwner.OTHER_COPY:
            return
        mount = find_mount(folder)
        if mount is not None:
            raise NotOwnerError(
                f"{mount} is mounted inside the keys' folder, {self.location}, so its files may belong to "
                "another store: unmount it, and copy the files into the folder"
            )
        home = find_home_around(folder, self.home.path)
        if home is None and claim is not None and "://" not in claim.shown:  # a bind mount has no such parent
            home = find_home_containing(folder, Path(claim.shown).parent, self.home.path)
        if home is not None:
            raise NotOwnerError(
                f"the keys at {self.location} are inside another store, {home}, which uses them: copy them "
                "for this store with `knnstore move`"
            )

    def _compare_claim(self, claim: Owner | None) -> KeyOwner:
        """Return the owner of the keys at this place, by the claim beside the keys.

        The first rule that applies decides:

        1. a claim of a store with another id: the other store;
        2. a claim that this store has written: this store;
        3. keys physically inside this store's folder: this store, or nobody without a claim;
        4. any other claim: another copy of this store;
        5. no claim, and the location is a URL, or the adapter cannot save claims, or no records exist:
           nobody;
        6. no claim, and records exist or the keys are damaged: another copy of this store.

        Args:
            claim: the claim (a text that names the owner of the keys); None if there is no claim.
        """
        if claim is not None and claim.store_id != self.owner.store_id:
            return KeyOwner.OTHER_STORE
        if claim is not None and self.owner.has_written(claim):
            return KeyOwner.THIS_STORE
        folder = self.folder
        if folder is not None and is_physically_inside(
            folder, self.home.path
        ):  # copied with the home, if copied at all
            return KeyOwner.NOBODY if claim is None else KeyOwner.THIS_STORE
        if claim is not None:
            return KeyOwner.OTHER_COPY
        if folder is None or not self.saves_claims:
            return KeyOwner.NOBODY
        try:
            return KeyOwner.NOBODY if self.is_empty() else KeyOwner.OTHER_COPY
        except DatastoreError:  # damaged, so not empty
            return KeyOwner.OTHER_COPY

    def _check_key_owner(self, claim: Owner | None, key_owner: KeyOwner, copied: bool) -> KeyOwner:
        """Return `key_owner` unchanged if this store may use the keys, else raise an error.

        Args:
            claim: the claim beside the keys, for the message; None if there is no claim.
            key_owner: owner of the keys.
            copied: True accepts keys of another copy of this store.

        Raises:
            NotOwnerError: if the keys belong to another store, or to another copy of this store and `copied`
                is False.
        """
        if key_owner is KeyOwner.OTHER_STORE:
            raise NotOwnerError(
                f"the keys at {self.location} belong to another store: restore the keys of this store from a "
                "backup, or make a new store with `knnstore init`"
            )
        if key_owner is KeyOwner.OTHER_COPY and not copied:
            advice = (
                "claim the keys for this store with `knnstore repair --take-over`, otherwise copy them "
                "for this store with `knnstore move`"
            )
            if claim is None or not claim.database:
                raise NotOwnerError(
                    f"the keys at {self.location} are not inside {self.home.path}, and they are not "
                    f"marked as the keys of {self.owner.shown!r}: if no other store uses them, {advice}"
                )
            raise NotOwnerError(
                f"the keys at {self.location} belong to {claim.shown!r}, and {self.owner.shown!r} is a "
                "copy of that store, or the same store after it was moved: if the first no longer exists, "
                f"{advice}"
            )
        return key_owner

    def _check_no_hard_links(self) -> None:
        """Check that no file of the keys has a second name (a hard link): another store may use that name.

        Nothing is checked if this store has claimed the keys, or if the location is a URL.

        Raises:
            NotOwnerError: if a file has a second name. The message names the file.
        """
        folder, claim = self.folder, self._read_claim()
        if folder is None or (claim is not None and self.owner.has_written(claim)):
            return
        shared = find_hard_link(folder)
        if shared is not None:
            raise NotOwnerError(
                f"{shared} has a second name (a hard link), so another store may use the same file: replace "
                f"{folder} by a copy of it, made with `cp -r`"
            )

    @property
    def _adapter_class(self) -> type[Datastore]:
        """Class of the adapter that the engine names; `KeylessDatastore` for a store without keys."""
        return KeylessDatastore if self.engine.is_keyless else registry.load_adapter(self.engine.adapter)

    def _read_claim(self) -> Owner | None:
        """Read the claim (the owner's name) beside the keys.

        Returns None if there is no claim, or if the adapter cannot save claims.
        """
        adapter = self._adapter_class
        if not issubclass(adapter, SupportsOwner):
            return None
        text = adapter.owner(self.location, **self.engine.params)
        return None if text is None else Owner.parse(text)

    def open(self, mode: Mode) -> Datastore:
        """Open the datastore at this place. The owner of the keys is not checked.

        Args:
            mode: "r" opens an existing datastore for reading, "a" opens for writing or creates, "x" creates.

        Raises:
            ConfigError: if the adapter keeps keys only in memory, or links lead out of the folder of the
                keys.
            NotOwnerError: if mode is "a", and a file of keys that this store has not claimed has a second
                name (hard link).
            DatastoreNotFoundError: if mode is "r" and there is no datastore.
        """
        self._check_folder()
        if mode == "a":
            self._check_no_hard_links()
        datastore = self._adapter_class.open(
            self.location,
            dim=self.identity.dim,
            metric=Metric(self.identity.metric),
            mode=mode,
            **self.engine.params,
        )
        if not datastore.capabilities.persistent:
            datastore.close()
            raise ConfigError(
                f"{self.engine.adapter} keeps nothing after the process ends, so a store cannot use it: "
                "choose another adapter with --store, or use this one without a store"
            )
        return datastore

    def check_free(self) -> None:
        """Check that no datastore exists at this place.

        Raises:
            DatastoreExistsError: if a datastore exists.
        """
        with suppress(DatastoreNotFoundError):
            self.open("r").close()
            raise self.make_taken_error()

    def check_space(self, records: int, operation: str) -> None:
        """Check that the disk has room for more records. If the location is a URL, nothing is checked.

        Args:
            records: number of records that will be added.
            operation: name of the operation, with which a sentence of the error message begins.

        Raises:
            DiskFullError: if there is too little space.
        """
        if self.folder is not None:
            adapter: type = self._adapter_class
            size = 4 * self.identity.dim + 64  # where an engine does not say
            if issubclass(adapter, SupportsSize):
                size = adapter.record_size(self.identity.dim, **self.engine.params)
            check_space(self.folder, records * size, operation)

    def make_taken_error(self) -> DatastoreExistsError:
        """Return, without raising it, the error for a place at which a datastore exists already."""
        return DatastoreExistsError(
            f"a datastore is already at {self.engine.adapter} {self.engine.location}; "
            "choose another --location"
        )

    def is_empty(self) -> bool:
        """Check whether this place has no datastore, or a datastore without records.

        A datastore with another dimension or metric than the store's does not count as empty.
        """
        try:
            with self.open("r") as datastore:
                return datastore.count() == 0
        except DatastoreNotFoundError:
            return True
        except DatastoreMismatchError:
            return False

    def erase(self) -> str | None:
        """Erase the datastore at this place, unless it may belong to another store.

        A claim (a text beside the keys) names the owner. A datastore without a claim is erased only if it has
        no records. If the adapter cannot save claims, the owner is not checked, so the caller must know that
        the datastore belongs to this store.

        Returns:
            A message for the user with the reason why the datastore was not erased; None if it was erased.
        """
        adapter = self._adapter_class
        key_owner = self.find_owner()
        if key_owner in (KeyOwner.OTHER_STORE, KeyOwner.OTHER_COPY):
            return f"the keys belong to another store or copy; {self} is not deleted"
        if key_owner is KeyOwner.NOBODY and self.saves_claims and not self.is_empty():
            return f"no store is marked as the owner of the keys; delete {self} yourself"
        if not issubclass(adapter, SupportsErase):
            return f"the adapter {self.engine.adapter} cannot delete keys; delete {self} yourself"
        self._check_folder()
        adapter.erase(self.location, **self.engine.params)
        failpoint("move.erased")
        return None

    def _check_folder(self) -> None:
        """Raise ConfigError if the path of the keys' folder is not a valid path, or a link leads out of it.

        A missing folder, and a URL, are accepted.
        """
        if self.folder is None:
            return
        try:
            self.folder.lstat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # who needs it says so
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the keys cannot be stored at {str(self.folder)[:100]}: {error.args[-1]}"
            ) from error
        check_folder(self.folder)


def exists_and_is_not_empty(path: Path) -> bool:
    """Return True for a file or a folder with content, and False for a missing path or an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
