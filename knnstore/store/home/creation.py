"""Making a store, in steps that may each be interrupted: the same call goes through afterwards.

::

    1 look      what is to be outside the home is free
    2 begin     .NAME.unfinished/creation.json, beside the home, says what is being made outside
    3 make      the datastore, then the catalog with its one row
    4 appear    the folder gets the home's name                                <- a store is there

A crash before 4 leaves no home. What it left in the folder goes with the next try. What it left outside
is known again by creation.json: a datastore by its place, where it must still be empty, and the
catalog by the store's id that stands in its row. Anything else found outside is somebody's, and refused.
"""

import json
import os
import shutil
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from uuid import uuid4

from knnstore.catalog import Catalog, Engine, Identity
from knnstore.catalog import place as place_of
from knnstore.datastore import TOKEN_LIMIT
from knnstore.durable import publish, sync_directory
from knnstore.errors import ConfigError, StoreExistsError, StoreNotFoundError
from knnstore.store.fitted import Weights, save_weights
from knnstore.store.home.home import DESCRIPTION, Home
from knnstore.store.home.places import Place, holds_something

_NAME = "creation.json"


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
            content = json.loads((folder / _NAME).read_bytes())
            return cls(str(content["store_id"]), tuple(content["datastores"]))
        except FileNotFoundError:
            return cls(uuid4().hex)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / _NAME} is damaged; remove {folder}: {error}") from error

    def write(self, folder: Path) -> None:
        """Note it, durably."""
        content = {"store_id": self.store_id, "datastores": self.datastores}
        publish(folder / _NAME, json.dumps(content).encode(), "creation")


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
        DatastoreExistsError: a datastore is at the location.
        ConfigError: the folder holds other files, or something given cannot be used.
    """
    if identity.vocab_size > TOKEN_LIMIT:
        raise ConfigError(f"the vocabulary has {identity.vocab_size} tokens; a store takes {TOKEN_LIMIT}")
    if projection is not None:
        identity = replace(identity, projection=projection.name)
    folder = path.resolve()  # a relative one may be the folder that is replaced
    if (folder / DESCRIPTION).exists():
        raise StoreExistsError(f"{folder} is a knnstore already; remove it or choose another --home")
    if holds_something(folder):
        raise ConfigError(f"{folder} is there and not an empty folder; choose another --home")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    home = Home.new(unfinished, catalog)
    place = Place(home, identity, engine)
    outside = _outside(place, folder)
    creation = Creation.read(unfinished)
    begun = outside in creation.datastores
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        _clear(unfinished)
        if catalog is not None:
            _check_catalog(home, creation.store_id)
        if outside is not None and not begun:
            place.check_free()
            creation = replace(creation, datastores=(*creation.datastores, outside))
        if catalog is not None or outside is not None:
            creation.write(unfinished)
        with place.open("a" if begun else "x") as made:
            if made.count():
                raise place.taken()
        if projection is not None:
            save_weights(home.weights, projection)
        Catalog.create(home.catalog_url, identity, engine, store_id=creation.store_id).close()
        home.write()
        os.rename(unfinished, folder)
    except BaseException:
        _clear(unfinished)
        with suppress(OSError):  # what is outside is still to be known again
            unfinished.rmdir()
        raise
    sync_directory(folder.parent)
    (folder / _NAME).unlink(missing_ok=True)
    return Home.open(folder, catalog)


def _outside(place: Place, folder: Path) -> str | None:
    """Which datastore is to be made outside the home, if it is."""
    if place.folder is None:
        return f"{place.engine.adapter} {place.location}"
    if place.folder.is_relative_to(place.home.path):
        return None
    if place.folder.is_relative_to(folder):
        raise ConfigError(f"{place.folder} is in the home: give its place there, as in --location keys")
    return f"{place.engine.adapter} {place.folder}"


def _check_catalog(home: Home, store_id: str) -> None:
    """Refuse a database that holds a store, unless this very creation has put it there."""
    try:
        with closing(Catalog.open(home.catalog_url)) as found:
            ours = found.store_id == store_id
    except StoreNotFoundError:
        return
    if not ours:
        raise StoreExistsError(f"{place_of(home.catalog_url)} already holds a store's catalog")


def _clear(unfinished: Path) -> None:
    """Remove what an interrupted creation left in its folder, but for what it knows of things outside."""
    for path in unfinished.iterdir() if unfinished.is_dir() else ():
        if path.name != _NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
