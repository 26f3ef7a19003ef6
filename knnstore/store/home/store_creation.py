"""Create a store in steps, each of which may be interrupted; the same call then finishes the creation.

::

    1 check     the places outside the home are free
    2 note      .NAME.unfinished/creation.json, next to the home, lists what is being created outside
    3 create    the datastore, then the catalog with its single row
    4 rename    the folder gets the name of the home                           <- the store exists

A crash before step 4 leaves no home. The next call removes what the crash left in the unfinished folder. It
recognizes what the crash left outside by creation.json: a datastore by its place, where it must still be
empty, and the catalog by the store id in its row. Anything else outside belongs to somebody else, and is
refused. If several processes create the same home, one locks the unfinished folder and the others fail.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from uuid import uuid4

from knnstore.catalog import KEYLESS, Catalog, Engine, Identity, render_location
from knnstore.datastore import TOKEN_LIMIT, checked_kind, registry
from knnstore.durable import NoFileError, publish, read_file, sync_directory
from knnstore.errors import ConfigError, LockedError, StoreExistsError, StoreNotFoundError
from knnstore.space import medium_errors
from knnstore.store.fitted import Weights, save_weights
from knnstore.store.home.home import Home
from knnstore.store.home.key_owners import KeyOwner, Owner
from knnstore.store.home.key_places import Place, exists_and_is_not_empty
from knnstore.store.home.path_safety import DESCRIPTION

LOCK = "creation.lock"
_TRIES = 1000
"""Attempts to make and lock the folder, while other processes make and remove it."""
NOTE = "creation.json"
"""File with the state of an interrupted creation; it stays until a creation is complete."""


@contextmanager
def lock_new_folder(folder: Path) -> Iterator[None]:
    """Make and lock the folder of a new home, and delete what an interrupted creation left in it.

    Only the file `NOTE` of the interrupted creation is kept. If the block raises, the folder is deleted with
    the parents that were made; else it stays, and the block has renamed it.

    Raises:
        LockedError: another process makes the same home.
        ConfigError: the folder has files that no creation has left.
    """
    absent = [parent for parent in folder.parents if not parent.exists()]
    lock = _taken(folder)
    try:
        _clear(folder)
        try:
            yield
        except BaseException:
            _clear(folder)
            # From here on it is the next one's, who may be there already.
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
                for parent in absent:
                    parent.rmdir()
            raise
    finally:
        os.close(lock)


def _taken(folder: Path) -> int:
    """Make and lock the folder; the kernel drops the lock when its holder dies."""
    for _ in range(_TRIES):
        _check(folder)
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # whoever had it has just finished or given up
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(lock)
            raise LockedError(f"another process is just making a store, in {folder}: wait for it") from None
        os.close(lock)
    raise ConfigError(f"no folder can be made in {folder.parent}: choose another --home")


def _check(folder: Path) -> None:
    """Make the folder, or look that what is there was left by a creation."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        left = set(os.listdir(folder))
    except FileNotFoundError:  # see above
        return
    except (FileExistsError, NotADirectoryError):
        left = {"a file"}
    if folder.is_symlink() or (left and left.isdisjoint({LOCK, NOTE})):
        raise ConfigError(
            f"{folder}, where the store is to be made, holds what knnstore did not leave there: move it away"
        )


def _clear(folder: Path) -> None:
    """Remove what an interrupted creation left, but for what it knows of things outside."""
    for path in folder.iterdir():
        if path.name not in (LOCK, NOTE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@dataclass(frozen=True, slots=True)
class Creation:
    """A creation that has begun to make things outside its folder."""

    store_id: str
    """Id of the new store, as in the catalog."""
    datastores: tuple[str, ...] = ()
    """Empty places at which the creation began to make a datastore."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the interrupted creation in a folder; without one, a new creation."""
        try:
            content = json.loads(read_file(folder / NOTE))
            return cls(str(content["store_id"]), tuple(content["datastores"]))
        except FileNotFoundError:
            return cls(uuid4().hex)
        except (NoFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{folder / NOTE} is damaged; remove {folder}: {error}") from error

    def write(self, folder: Path) -> None:
        """Note it, durably."""
        content = {"store_id": self.store_id, "datastores": self.datastores}
        publish(folder / NOTE, json.dumps(content).encode(), "creation")


def make_store(
    path: Path,
    identity: Identity,
    engine: Engine,
    catalog: str | None,
    projection: Weights | None,
) -> Home:
    """Make a home with an empty datastore and a catalog, whole or not there; see `KNNStore.create`.

    Returns:
        The home, its catalog's URL with the password, which is not written.

    Raises:
        StoreExistsError: a store is there, or in the catalog's database.
        LockedError: another process is just making one there.
        DatastoreExistsError: a datastore is at the location.
        ConfigError: the folder holds other files, or something given cannot be used.
    """
    if identity.vocab_size > TOKEN_LIMIT:
        raise ConfigError(f"the vocabulary has {identity.vocab_size} tokens; a store takes {TOKEN_LIMIT}")
    if projection is not None:
        identity = replace(identity, projection=projection.name)
    folder = path.resolve()  # a relative one may be the folder that is replaced
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    home = Home.new(unfinished, catalog)
    outside = _outside(home, engine, folder)
    with medium_errors(unfinished), lock_new_folder(unfinished):
        _check_absent(folder)
        creation = Creation.read(unfinished)
        begun = outside in creation.datastores
        place = Place(home, identity, engine, Owner(creation.store_id))
        key_owner = (
            place.find_owner()
        )  # or the error that this engine keeps nothing there, before anything is made
        if catalog is not None:
            _check_catalog(home, creation.store_id)
        if outside is not None and not begun:
            place.check_free()
            creation = replace(creation, datastores=(*creation.datastores, outside))
        if catalog is not None or outside is not None:
            creation.write(unfinished)
        if begun and key_owner is KeyOwner.OTHER_STORE:
            raise place.taken()
        try:
            opened = place.open("a" if begun else "x")
        except BaseException:
            if not (begun or place.folder is None or place.folder.exists()):
                (unfinished / NOTE).unlink(missing_ok=True)  # there is nothing outside to know again
            raise
        with opened as made:
            if made.count():
                raise place.taken()
            if projection is not None:
                save_weights(home.weights, projection)
            with closing(
                Catalog.create(home.catalog_url, identity, engine, store_id=creation.store_id)
            ) as new:
                replace(place, owner=Owner.of(new)).claim(copied=begun)
        home.write()
        os.rename(unfinished, folder)
    sync_directory(folder.parent)
    for name in (NOTE, LOCK):
        (folder / name).unlink(missing_ok=True)
    return Home.open(folder, catalog)


def check_new(home: str | os.PathLike[str], adapter: str, codes: str | None = None) -> None:
    """Refuse what can be refused of a store to be made before its model is loaded and a sample read.

    Args:
        home: folder of the new store.
        adapter: name of the adapter of its datastore.
        codes: codes of the keys; None leaves the choice to the adapter.

    Raises:
        StoreExistsError: a store is at `home`.
        ConfigError: another thing is there, or there is no such kind of codes.
        AdapterError: there is no such adapter, or what it needs is not installed.
    """
    _check_absent(Path(home).resolve())
    if codes not in (None, "auto", "none"):
        checked_kind(codes)
    if adapter != KEYLESS:
        registry.load(adapter)


def _check_absent(folder: Path) -> None:
    """Refuse to make a home where something is."""
    if (folder / DESCRIPTION).exists():
        raise StoreExistsError(f"{folder} is a knnstore already; remove it or choose another --home")
    if exists_and_is_not_empty(folder):
        raise ConfigError(f"{folder} is there and not an empty folder; choose another --home")


def _outside(home: Home, engine: Engine, folder: Path) -> str | None:
    """Return the place of the datastore to make outside the home; None if it is inside."""
    location = home.resolve(engine.location)
    if "://" in location:
        return f"{engine.adapter} {location}"
    keys = Path(location).resolve()
    if keys.is_relative_to(home.path):
        return None
    if keys.is_relative_to(folder):
        raise ConfigError(f"{keys} is in the home: give its place there, as in --location keys")
    return f"{engine.adapter} {keys}"


def _check_catalog(home: Home, store_id: str) -> None:
    """Refuse a database that holds a store, unless this very creation has put it there."""
    try:
        with closing(Catalog.open(home.catalog_url)) as found:
            ours = found.store_id == store_id
    except StoreNotFoundError:
        return
    if not ours:
        raise StoreExistsError(f"{render_location(home.catalog_url)} already holds a store's catalog")
