"""Create a store in steps, each of which may be interrupted; the same call then finishes the creation.

::

    1 check     the places outside the home are free
    2 note      .NAME.unfinished/creation.json, next to the home, lists what is being created outside
    3 create    the datastore, then the catalog with its single row
    4 rename    the folder gets the name of the home                           <- the store exists

A crash before step 4 leaves no home (the folder of a store). The next call removes the files that the crash
left in the unfinished folder. By creation.json it also recognizes a datastore and a catalog that the crash
left outside the folder: the datastore by its location and because it is empty, the catalog by its store id.
Any other datastore or catalog at these places belongs to somebody else, so an error is raised. If several
processes create the same home, one process locks the unfinished folder, and the other processes fail.
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
from knnstore.datastore import TOKEN_LIMIT, registry, validate_kind
from knnstore.durable import NoFileError, read_file, sync_directory, write_atomically
from knnstore.errors import ConfigError, LockedError, StoreExistsError, StoreNotFoundError
from knnstore.space import convert_disk_errors
from knnstore.store.fitted import Weights, save_weights
from knnstore.store.home.home import Home
from knnstore.store.home.key_places import KeyOwner, Owner, Place, exists_and_is_not_empty
from knnstore.store.home.path_safety import DESCRIPTION

LOCK = "creation.lock"
_LOCK_ATTEMPTS = 1000
"""Largest number of attempts to create and lock the folder, while other processes create and remove it."""
CREATION_FILE = "creation.json"
"""Name of the file with the state of an unfinished creation; it stays until the creation is complete."""


@contextmanager
def lock_new_folder(folder: Path) -> Iterator[None]:
    """Create the temporary folder of a new store, and hold its lock in the ``with`` block.

    Files that an interrupted creation left in the folder are deleted, except `CREATION_FILE`. In the block,
    the caller fills the folder and renames it. If the block raises an error, all files in the folder except
    `CREATION_FILE` are deleted. The folder and the parents that were created are deleted too if they are
    empty.

    Args:
        folder: path of the temporary folder.

    Raises:
        LockedError: if another process is creating the same store.
        ConfigError: if the folder has files that are not from a creation.
    """
    absent = [parent for parent in folder.parents if not parent.exists()]
    lock = _create_and_lock(folder)
    try:
        _clear_unfinished(folder)
        try:
            yield
        except BaseException:
            _clear_unfinished(folder)
            # From here on it is the next one's, who may be there already.
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
                for parent in absent:
                    parent.rmdir()
            raise
    finally:
        os.close(lock)


def _create_and_lock(folder: Path) -> int:
    """Create a folder if it is missing, lock it, and return the file descriptor of the lock.

    Closing the descriptor, or the end of the process, releases the lock.

    Raises:
        LockedError: if another process holds the lock.
        ConfigError: if the folder cannot be created, or has files that are not from an interrupted creation.
    """
    for _ in range(_LOCK_ATTEMPTS):
        _create_folder(folder)
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
            raise LockedError(
                f"another process is creating a store in {folder}: wait until it ends"
            ) from None
        os.close(lock)
    raise ConfigError(f"no folder can be created in {folder.parent}: choose another --home")


def _create_folder(folder: Path) -> None:
    """Create a folder for a new store if it is missing, with missing parents.

    Raises ConfigError if the path is a file or a link, or the folder has files that are not from a creation
    of a store.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        names = set(os.listdir(folder))
    except FileNotFoundError:  # see above
        return
    except (FileExistsError, NotADirectoryError):
        names = {"a file"}
    if folder.is_symlink() or (names and names.isdisjoint({LOCK, CREATION_FILE})):
        raise ConfigError(
            f"{folder}, which is needed to create the store, was not made by knnstore: move it away"
        )


def _clear_unfinished(folder: Path) -> None:
    """Delete all files and folders in a folder, except the lock file and `CREATION_FILE`."""
    for path in folder.iterdir():
        if path.name not in (LOCK, CREATION_FILE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@dataclass(frozen=True, slots=True)
class Creation:
    """State of the creation of a store, saved before a datastore or catalog outside the folder is created."""

    store_id: str
    """Id of the new store, which its catalog has too."""
    datastores: tuple[str, ...] = ()
    """Adapter and location, joined by a space, of each datastore that the creation began to create outside of
    the store's folder."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the state of the interrupted creation in a folder.

        If the folder has no `CREATION_FILE`, returns a new state with a random store id.
        """
        try:
            content = json.loads(read_file(folder / CREATION_FILE))
            return cls(str(content["store_id"]), tuple(content["datastores"]))
        except FileNotFoundError:
            return cls(uuid4().hex)
        except (NoFileError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{folder / CREATION_FILE} is damaged; remove {folder}: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the state durably to `CREATION_FILE` in a folder."""
        content = {"store_id": self.store_id, "datastores": self.datastores}
        write_atomically(folder / CREATION_FILE, json.dumps(content).encode(), "creation")


def make_store(
    path: Path,
    identity: Identity,
    engine: Engine,
    catalog: str | None,
    projection: Weights | None,
) -> Home:
    """Create a store with an empty datastore and a catalog, completely or not at all.

    If an earlier call was interrupted, this call finishes the creation; see the docstring of the module.

    Args:
        path: folder of the new store.
        identity: model and parameters of the store. `projection` is replaced by the name of the file with the
            weights of the projection.
        engine: vector engine of the keys: adapter, location and parameters.
        catalog: URL of the catalog; None means a SQLite file in the folder.
        projection: weights that project the keys to fewer components, saved in the folder; None for keys that
            are not projected.

    Returns:
        The home (folder) of the new store. The URL of its catalog has the password, which is not written to
        the folder.

    Raises:
        StoreExistsError: if the folder or the catalog's database has a store already.
        LockedError: if another process is creating the same store.
        DatastoreExistsError: if the location already has a datastore.
        ConfigError: if the folder has other files, or an argument cannot be used.
    """
    if identity.vocab_size > TOKEN_LIMIT:
        raise ConfigError(
            f"the vocabulary has {identity.vocab_size} tokens; a store can have at most {TOKEN_LIMIT}"
        )
    if projection is not None:
        identity = replace(identity, projection=projection.name)
    folder = path.resolve()  # a relative path may name the folder that is replaced
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    home = Home.new(unfinished, catalog)
    outside = _locate_outside(home, engine, folder)
    with convert_disk_errors(unfinished), lock_new_folder(unfinished):
        # 1) Check that the places are free, unless an interrupted creation has begun to use them.
        _check_absent(folder)
        creation = Creation.read(unfinished)
        has_begun = outside in creation.datastores
        place = Place(home, identity, engine, Owner(creation.store_id))
        key_owner = place.find_owner()  # raises an error if the engine keeps nothing, before anything is made
        if catalog is not None:
            _check_catalog_is_free(home, creation.store_id)
        if outside is not None and not has_begun:
            place.check_free()
            creation = replace(creation, datastores=(*creation.datastores, outside))
        # 2) Note what will be created outside of the folder.
        if catalog is not None or outside is not None:
            creation.write(unfinished)
        if has_begun and key_owner is KeyOwner.OTHER_STORE:
            raise place.make_taken_error()
        # 3) Create the datastore, then the catalog.
        try:
            opening = place.open("a" if has_begun else "x")
        except BaseException:
            if not (has_begun or place.folder is None or place.folder.exists()):
                (unfinished / CREATION_FILE).unlink(missing_ok=True)  # nothing was created outside
            raise
        with opening as datastore:
            if datastore.count():
                raise place.make_taken_error()
            if projection is not None:
                save_weights(home.weights, projection)
            with closing(
                Catalog.create(home.catalog_url, identity, engine, store_id=creation.store_id)
            ) as new:
                replace(place, owner=Owner.from_catalog(new)).claim(copied=has_begun)
        # 4) Rename the folder: now the store exists.
        home.write()
        os.rename(unfinished, folder)
    sync_directory(folder.parent)
    for name in (CREATION_FILE, LOCK):
        (folder / name).unlink(missing_ok=True)
    return Home.open(folder, catalog)


def check_new(home: str | os.PathLike[str], adapter: str, codes: str | None = None) -> None:
    """Check the arguments of a new store, before the slow steps: loading the model and reading a sample.

    Nothing is created.

    Args:
        home: folder of the new store.
        adapter: name of the adapter (the class that connects knnstore to a vector engine).
        codes: kind of codes to which keys are compressed, such as "pq32"; "none" for uncompressed keys; None
            or "auto" leaves the choice to the adapter.

    Raises:
        StoreExistsError: if `home` has a store already.
        ConfigError: if `home` is a file or a folder with files, or the kind of codes is unknown.
        AdapterError: if the adapter is unknown, or a package that it needs is not installed.
    """
    _check_absent(Path(home).resolve())
    if codes not in (None, "auto", "none"):
        validate_kind(codes)
    if adapter != KEYLESS:
        registry.load_adapter(adapter)


def _check_absent(folder: Path) -> None:
    """Check that a folder is missing or empty.

    Raises:
        StoreExistsError: if the folder has a store.
        ConfigError: if the folder has other files, or is a file.
    """
    if (folder / DESCRIPTION).exists():
        raise StoreExistsError(f"{folder} is a knnstore already; remove it or choose another --home")
    if exists_and_is_not_empty(folder):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another --home")


def _locate_outside(home: Home, engine: Engine, folder: Path) -> str | None:
    """Return adapter and location of a new datastore, joined by a space, if it is outside the home.

    Args:
        home: the temporary folder in which the store is created.
        engine: adapter, location and parameters of the datastore.
        folder: the folder of the complete store.

    Returns:
        The text; None if the datastore is inside the home.

    Raises:
        ConfigError: if the location is an absolute path inside `folder`.
    """
    location = home.resolve_location(engine.location)
    if "://" in location:
        return f"{engine.adapter} {location}"
    keys = Path(location).resolve()
    if keys.is_relative_to(home.path):
        return None
    if keys.is_relative_to(folder):
        raise ConfigError(
            f"{keys} is inside the store: give the path relative to the store, such as --location keys"
        )
    return f"{engine.adapter} {keys}"


def _check_catalog_is_free(home: Home, store_id: str) -> None:
    """Raise StoreExistsError if the catalog's database has a store with another id than `store_id`."""
    try:
        with closing(Catalog.open(home.catalog_url)) as existing:
            is_ours = existing.store_id == store_id
    except StoreNotFoundError:
        return
    if not is_ours:
        raise StoreExistsError(f"{render_location(home.catalog_url)} already holds a store's catalog")
