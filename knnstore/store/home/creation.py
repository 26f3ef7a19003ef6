"""Making a store, in steps that may each be interrupted: the same call goes through afterwards.

::

    1 look      what is to be outside the home is free
    2 begin     .NAME.unfinished/creation.json, beside the home, says what is being made outside
    3 make      the datastore, then the catalog with its one row
    4 appear    the folder gets the home's name                                <- a store is there

A crash before 4 leaves no home. What it left in the folder goes with the next try. What it left outside
is known again by creation.json: a datastore by its place, where it must still be empty, and the
catalog by the store's id that stands in its row. Anything else found outside is somebody's, and refused.
Of several processes that make the same home, one has the folder to itself; the others are refused.
"""

import json
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from uuid import uuid4

from knnstore.catalog import KEYLESS, Catalog, Engine, Identity
from knnstore.catalog import place as place_of
from knnstore.datastore import TOKEN_LIMIT, checked_kind, registry
from knnstore.durable import NoFileError, publish, read_file, sync_directory
from knnstore.errors import ConfigError, StoreExistsError, StoreNotFoundError
from knnstore.space import medium_errors
from knnstore.store.fitted import Weights, save_weights
from knnstore.store.home.following import DESCRIPTION
from knnstore.store.home.home import Home
from knnstore.store.home.owners import Owner, Whose
from knnstore.store.home.places import Place, holds_something
from knnstore.store.home.unfinished import LOCK, NOTE, alone_in


@dataclass(frozen=True, slots=True)
class Creation:
    """A creation that has begun to make things outside its folder."""

    store_id: str
    """The id that the store gets; stands in the catalog's row."""
    datastores: tuple[str, ...] = ()
    """Where it began to make a datastore, nothing being there."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The creation that was interrupted in a folder, else a new one."""
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
    with medium_errors(unfinished), alone_in(unfinished):
        _check_absent(folder)
        creation = Creation.read(unfinished)
        begun = outside in creation.datastores
        place = Place(home, identity, engine, Owner(creation.store_id))
        whose = place.whose()  # or the error that this engine keeps nothing there, before anything is made
        if catalog is not None:
            _check_catalog(home, creation.store_id)
        if outside is not None and not begun:
            place.check_free()
            creation = replace(creation, datastores=(*creation.datastores, outside))
        if catalog is not None or outside is not None:
            creation.write(unfinished)
        if begun and whose is Whose.ANOTHERS:
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
        home: where it is to be.
        adapter: of its datastore.
        codes: what keys are to be kept as; None leaves it to the adapter.

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
    if holds_something(folder):
        raise ConfigError(f"{folder} is there and not an empty folder; choose another --home")


def _outside(home: Home, engine: Engine, folder: Path) -> str | None:
    """Which datastore is to be made outside the home, if it is."""
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
        raise StoreExistsError(f"{place_of(home.catalog_url)} already holds a store's catalog")
