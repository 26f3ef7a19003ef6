"""The keys and the documents as they are now: the datastore that the catalog names, and what is live."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from knnstore.catalog import Catalog, Engine
from knnstore.datastore import Datastore
from knnstore.errors import DatastoreError
from knnstore.store.home import Home, Place
from knnstore.store.view import View

Mode = Literal["r", "a"]


class Current:
    """Follows the catalog from revision to revision and from engine to engine.

    The datastore is opened with `params` in place of the store's own.
    """

    engine: Engine
    """As the catalog names it."""
    datastore: Datastore

    def __init__(self, home: Home, catalog: Catalog, mode: Mode, params: Mapping[str, Any]) -> None:
        self._home = home
        self._catalog = catalog
        self._mode: Mode = mode
        self._params = dict(params)
        self._view: View | None = None
        self._viewing = threading.Lock()
        self.engine, self.datastore = self._open()

    def view(self) -> View:
        """What is live at the latest revision."""
        with self._viewing:
            if self._view is None or self._catalog.revision() != self._view.snapshot.revision:
                while (snapshot := self._catalog.snapshot()).engine != self.engine:
                    self.engine, self.datastore = self._open()  # moved by another process
                self._view = View(snapshot, self.datastore, self._catalog)
            return self._view

    @property
    def place(self) -> Place:
        """Where the keys are."""
        return Place(self._home, self._catalog.identity, self.engine)

    def switch(self, engine: Engine, datastore: Datastore, commit: Callable[[], None]) -> Datastore:
        """Go over to another engine once `commit` has made the catalog name it; returns the old datastore.

        Other threads see both changes or none.
        """
        with self._viewing:
            commit()
            old, self.datastore, self.engine, self._view = self.datastore, datastore, engine, None
        return old

    def close(self) -> None:
        """Flush and release the datastore in use; a writer leaves the whole catalog in its file."""
        if self._mode == "a":
            self._catalog.take_in_log()
        self.datastore.close()

    def _open(self) -> tuple[Engine, Datastore]:
        """Open the datastore that the catalog names, also while the keys are being moved."""
        while True:
            engine = self._catalog.engine()
            place = Place(self._home, self._catalog.identity, engine)
            try:
                if self._mode == "a":  # which would make a new, empty one where the keys were lost
                    place.open("r").close()
                given = replace(engine, params={**engine.params, **self._params})
                return engine, replace(place, engine=given).open(self._mode)
            except DatastoreError:
                if self._catalog.engine() == engine:
                    raise
