"""The current datastore, which the catalog names, and the current view of the live documents."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, get_args

from knnstore.catalog import Catalog, Engine
from knnstore.datastore import Datastore
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreError
from knnstore.store.home import Home, KeyOwner, Owner, Place
from knnstore.store.view import View

Mode = Literal["r", "a"]


def check_mode(mode: Mode) -> None:
    """Raise ConfigError unless a mode is "r" or "a". Other modes of files, such as "w", are refused too."""
    if mode not in get_args(Mode):
        raise ConfigError(f"the mode is 'r' to read or 'a' to write as well, not {mode!r}")


class Current:
    """Holds the open datastore, and follows the catalog to new revisions and to another engine after a move.

    Args:
        home: the folder of the store.
        catalog: the open catalog.
        mode: "r" opens the datastore for reading, "a" also for writing.
        params: parameters of the engine that replace the store's saved parameters.
        copied: True accepts keys that belong to the store that this one is a copy of. They are then opened
            for reading, whatever the mode.
    """

    engine: Engine
    """The engine that the catalog names."""
    datastore: Datastore

    owned: bool
    """False if the keys belong to the store that this one is a copy of."""

    def __init__(
        self, home: Home, catalog: Catalog, mode: Mode, params: Mapping[str, Any], *, copied: bool
    ) -> None:
        self._home = home
        self._owner = Owner.of(catalog)
        self._copied = copied or mode == "r"
        self._catalog = catalog
        self._mode: Mode = mode
        self._params = dict(params)
        self._view: View | None = None
        self._view_lock = threading.Lock()
        self.engine, self.datastore = self._open_current_engine()

    def view(self) -> View:
        """Return the view of the latest revision, cached. Follows a move by another process."""
        with self._view_lock:
            if self._view is None or self._catalog.revision() != self._view.snapshot.revision:
                while (snapshot := self._catalog.snapshot()).engine != self.engine:
                    self.engine, self.datastore = self._open_current_engine()  # moved by another process
                self._view = View(snapshot, self.datastore, self._catalog)
            return self._view

    def switch(self, engine: Engine, datastore: Datastore, commit: Callable[[], None]) -> Datastore:
        """Switch to another engine, and return the old datastore.

        First `commit` makes the catalog name the engine; if it raises, nothing changes. The store then counts
        as the owner of its keys. Other threads see both changes or none.
        """
        with self._view_lock:
            commit()
            old, self.datastore, self.engine, self._view = self.datastore, datastore, engine, None
            self.owned = True
        return old

    def take_over(self) -> None:
        """Claim the keys of the original for this copy of the store, and open them for writing.

        Raises:
            NotOwnerError: if the keys are inside another store's folder, or a part of them is mounted.
        """
        place = self.place(self.engine)
        place.check_may_take_over()
        with ExitStack() as failed:
            opened = failed.enter_context(place.open("a"))
            place.claim(copied=True)
            self.switch(self.engine, opened, lambda: None).close()
            failed.pop_all()

    def check_owned(self, copied: bool) -> None:
        """Raise NotOwnerError if the keys belong to the home that this one is a copy of, unless `copied`."""
        if not (copied or self.owned):
            self.place(self.engine).check_owner()

    def problems(self) -> list[str]:
        """Return the problem with the claim on the keys, as a list of one line; empty without a problem."""
        try:
            self.place(self.engine).find_owner()
        except CorruptDatastoreError as error:
            return [str(error)]
        return []

    def place(self, engine: Engine) -> Place:
        """Return the `Place` at which an engine keeps the keys of this store."""
        return Place(self._home, self._catalog.identity, engine, self._owner)

    def close(self) -> None:
        """Close the datastore. A writer first moves the catalog's write-ahead log into the database file."""
        if self._mode == "a":
            self._catalog.take_in_log()
        self.datastore.close()

    def _open_current_engine(self) -> tuple[Engine, Datastore]:
        """Open the datastore that the catalog names, and return its engine and the datastore.

        Also sets `owned`. Tries again if another process moves the keys meanwhile.
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
        """Return the owner of the keys, checked. A reader takes a damaged claim for no claim."""
        try:
            return place.check_owner(copied=self._copied)
        except CorruptDatastoreError:
            if self._mode == "a":
                raise
            return KeyOwner.NOBODY  # reading needs not know; `problems` says it
