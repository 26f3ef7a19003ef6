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
    """Refuse what is no mode with a ConfigError: those of a file, as ``"w"``, are not a store's."""
    if mode not in get_args(Mode):
        raise ConfigError(f"the mode is 'r' to read or 'a' to write as well, not {mode!r}")


class Current:
    """Follows the catalog from revision to revision and from engine to engine.

    The datastore is opened with `params` in place of the store's own. With `copied` it may be that of a home
    which this one is a copy of; it is then opened for reading, whatever the mode.
    """

    engine: Engine
    """The engine that the catalog names."""
    datastore: Datastore

    owned: bool
    """The keys are not those of a home that this one is a copy of."""

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
        self._viewing = threading.Lock()
        self.engine, self.datastore = self._open()

    def view(self) -> View:
        """Return the view of the latest revision."""
        with self._viewing:
            if self._view is None or self._catalog.revision() != self._view.snapshot.revision:
                while (snapshot := self._catalog.snapshot()).engine != self.engine:
                    self.engine, self.datastore = self._open()  # moved by another process
                self._view = View(snapshot, self.datastore, self._catalog)
            return self._view

    def switch(self, engine: Engine, datastore: Datastore, commit: Callable[[], None]) -> Datastore:
        """Switch to another engine, and return the old datastore.

        First `commit` makes the catalog name the engine; if it raises, nothing changes. The store then counts
        as the owner of its keys. Other threads see both changes or none.
        """
        with self._viewing:
            commit()
            old, self.datastore, self.engine, self._view = self.datastore, datastore, engine, None
            self.owned = True
        return old

    def take_over(self) -> None:
        """Claim the keys, and open them for writing."""
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
            self.place(self.engine).check_ours()

    def problems(self) -> list[str]:
        """Return the problem with the claim on the keys, if any."""
        try:
            self.place(self.engine).find_owner()
        except CorruptDatastoreError as error:
            return [str(error)]
        return []

    def place(self, engine: Engine) -> Place:
        """Return the place of an engine's keys of this store."""
        return Place(self._home, self._catalog.identity, engine, self._owner)

    def close(self) -> None:
        """Flush and release the datastore in use; a writer leaves the whole catalog in its file."""
        if self._mode == "a":
            self._catalog.take_in_log()
        self.datastore.close()

    def _open(self) -> tuple[Engine, Datastore]:
        """Open the datastore that the catalog names, also while the keys are being moved."""
        while True:
            engine = self._catalog.engine()
            place = self.place(engine)
            try:
                if self._mode == "a":  # which would make a new, empty one where the keys were lost
                    place.open("r").close()
                self.owned = self._find_owner(place) is not KeyOwner.OTHER_COPY
                given = replace(engine, params={**engine.params, **self._params})
                with ExitStack() as failed:
                    mode = self._mode if self.owned else "r"
                    opened = failed.enter_context(replace(place, engine=given).open(mode))
                    if mode == "a":
                        place.claim()
                    failed.pop_all()
                return engine, opened
            except DatastoreError:
                if self._catalog.engine() == engine:
                    raise

    def _find_owner(self, place: Place) -> KeyOwner:
        try:
            return place.check_ours(copied=self._copied)
        except CorruptDatastoreError:
            if self._mode == "a":
                raise
            return KeyOwner.NOBODY  # reading needs not know; `problems` says it
