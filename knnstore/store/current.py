"""The open datastore that the catalog names, and the current view: the documents at the latest revision."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal, get_args

from knnstore.catalog import Catalog, Engine
from knnstore.datastore import Datastore
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreError, KnnstoreError
from knnstore.store.home import Home, KeyOwner, Owner, Place
from knnstore.store.view import View

Mode = Literal["r", "a"]


def check_mode(mode: Mode) -> None:
    """Raise ConfigError unless a mode is "r" (read) or "a" (read and write)."""
    if mode not in get_args(Mode):
        raise ConfigError(f"the mode must be 'r' (read) or 'a' (read and write), not {mode!r}")


class Current:
    """Holds the open datastore of a store, and keeps datastore and view up to date with the catalog.

    The view is the set of documents at the latest revision. If another process moves the keys to another
    vector engine, the datastore of the new engine is opened.

    A copied store is a store whose folder was copied; its keys outside the folder still belong to the
    original.

    Args:
        home: the folder of the store.
        catalog: the open catalog.
        mode: "r" opens the datastore for reading, "a" also for writing.
        params: parameters of the engine that replace the store's saved parameters.
        copied: True accepts a copied store whose keys belong to its original. These keys are opened for
            reading, whatever the mode. False raises an error with mode "a".
    """

    engine: Engine
    """The vector engine that the catalog names: adapter, location and parameters."""
    datastore: Datastore
    """The open datastore of this engine."""

    owned: bool
    """False if this is a copied store and the keys belong to its original."""

    def __init__(
        self, home: Home, catalog: Catalog, mode: Mode, params: Mapping[str, Any], *, copied: bool
    ) -> None:
        self._home = home
        self._owner = Owner.from_catalog(catalog)
        self._copied = copied or mode == "r"
        self._catalog = catalog
        self._mode: Mode = mode
        self._params = dict(params)
        self._view: View | None = None
        self._view_lock = threading.Lock()
        self.engine, self.datastore = self._open_current_engine()

    def view(self) -> View:
        """Return the documents of the store at the latest revision; the same object until the store changes.

        If another process has moved the keys to another engine, the new engine's datastore is opened first.
        """
        with self._view_lock:
            if self._view is None or self._catalog.revision() != self._view.snapshot.revision:
                while (snapshot := self._catalog.snapshot()).engine != self.engine:
                    self._follow_move()
                self._view = View(snapshot, self.datastore, self._catalog)
            return self._view

    def switch_engine(self, engine: Engine, datastore: Datastore, commit: Callable[[], None]) -> Datastore:
        """Replace the engine and its open datastore, and return the old datastore, which is still open.

        Afterwards this store counts as the owner of the keys. Other threads see the old state or the new
        state, never a mixture.

        Args:
            engine: the new engine.
            datastore: the open datastore of the new engine.
            commit: function that is called first, and makes the catalog name the new engine. If it raises an
                exception, nothing changes.
        """
        with self._view_lock:
            commit()
            old, self.datastore, self.engine, self._view = self.datastore, datastore, engine, None
            self.owned = True
        return old

    def take_over(self) -> None:
        """Make this copied store the owner of the keys of its original, and open the keys for writing.

        A copied store is a store whose folder was copied from another store, its original.

        Raises:
            NotOwnerError: if the folder of the keys is inside another store's folder, or a file system is
                mounted inside it.
        """
        place = self.place(self.engine)
        place.check_may_take_over()
        with ExitStack() as failed:
            opened = failed.enter_context(place.open("a"))
            place.claim(copied=True)
            self.switch_engine(self.engine, opened, lambda: None).close()
            failed.pop_all()

    def check_owned(self, copied: bool) -> None:
        """Raise NotOwnerError if this store is a copy whose keys still belong to the original store.

        Args:
            copied: True accepts such a copy; then nothing is checked.
        """
        if not (copied or self.owned):
            self.place(self.engine).check_owner()

    def check_claim(self) -> list[str]:
        """Check that the claim can be read. A claim is a text beside the keys that names their owner.

        Returns a list with one line of text if the claim is damaged, else an empty list.
        """
        try:
            self.place(self.engine).find_owner()
        except CorruptDatastoreError as error:
            return [str(error)]
        return []

    def place(self, engine: Engine) -> Place:
        """Return an object that opens, claims or erases the keys of this store at an engine's location."""
        return Place(self._home, self._catalog.identity, engine, self._owner)

    def close(self) -> None:
        """Close the datastore.

        With mode "a", SQLite's write-ahead log is first copied into the catalog's database file.
        """
        if self._mode == "a":
            self._catalog.take_in_log()
        self.datastore.close()

    def _follow_move(self) -> None:
        """Replace the datastore by that of the engine that the catalog names now.

        Another process has moved the keys, or this process has, and the database's answer was lost. A store
        that is open for writing closes the old datastore, so that its lock is released and its keys can be
        erased. Other threads may still read from the old datastore of a store that is open for reading.
        """
        old = self.datastore
        self.engine, self.datastore = self._open_current_engine()
        if self._mode == "a":
            with suppress(KnnstoreError):  # what is durable has moved already
                old.close()

    def _open_current_engine(self) -> tuple[Engine, Datastore]:
        """Open the datastore that the catalog names, set `owned`, and return the engine and the datastore.

        If another process moves the keys to another engine meanwhile, that engine's datastore is opened.
        """
        while True:
            engine = self._catalog.engine()
            place = self.place(engine)
            try:
                if self._mode == "a":  # which would make a new, empty one where the keys were lost
                    place.open("r").close()
                self.owned = self._find_key_owner(place) is not KeyOwner.OTHER_COPY
                with_params = replace(engine, params={**engine.params, **self._params})
                with ExitStack() as failed:
                    mode = self._mode if self.owned else "r"
                    opened = failed.enter_context(replace(place, engine=with_params).open(mode))
                    if mode == "a":
                        place.claim()
                    failed.pop_all()
                return engine, opened
            except DatastoreError:
                if self._catalog.engine() == engine:
                    raise

    def _find_key_owner(self, place: Place) -> KeyOwner:
        """Check that this store may use the keys at a place, and return the owner of the keys.

        With mode "r", a damaged claim (the text beside the keys that names their owner) counts as no claim.

        Args:
            place: location and engine of the keys.

        Raises:
            NotOwnerError: the keys belong to another store; or this store is a copy, is opened for writing,
                and the keys belong to its original.
            CorruptDatastoreError: the claim is damaged, and the mode is "a".
        """
        try:
            return place.check_owner(copied=self._copied)
        except CorruptDatastoreError:
            if self._mode == "a":
                raise
            return KeyOwner.NOBODY  # reading needs not know; `check_claim` says it
