"""`KNNStore`: a catalog and a datastore that always agree."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from knnstore.catalog import Catalog, CatalogWriter, Document, Domain, Engine, Identity, NewDocument
from knnstore.errors import ConfigError, KnnstoreError, ReadOnlyError
from knnstore.progress import Progress
from knnstore.store.current import Current, Mode, check_mode
from knnstore.store.erasing import Erased, erase
from knnstore.store.fitted import SavedSettings, Weights
from knnstore.store.home import Home, make_store
from knnstore.store.ingest import Ingest
from knnstore.store.relocation import Moved, Relocation
from knnstore.store.selection import Selection
from knnstore.store.store_info import info_of
from knnstore.store.store_reader import StoreReader
from knnstore.store.store_writer import Writing
from knnstore.store.verify import problems_of

Folder = str | os.PathLike[str]
Params = Mapping[str, Any] | None


class KNNStore(StoreReader):
    """Documents with their keys, searched by key; open one with `create` or `open`.

    One process writes and any number read; readers see each commit without reopening. A handle
    may be used by several threads: searches run beside each other and beside one writing thread.
    """

    def __init__(
        self, home: Home, catalog: Catalog, mode: Mode, params: Params = None, *, copied: bool = False
    ) -> None:
        self.mode: Mode = mode
        self._before: _Before | None = None
        self._writing: Writing | None = None
        with ExitStack() as opened:
            opened.callback(catalog.close)
            if mode == "a":
                opened.enter_context(home.locked())
                writer = CatalogWriter(catalog)
            self._current = Current(home, catalog, mode, params or {}, copied=copied)
            opened.callback(self._current.close)
            super().__init__(home, catalog, self._current.view)
            self._relocation = Relocation(home, catalog, self._current)
            if mode == "a":
                self._writing = Writing(home, writer, self._current)
                if self._current.owned:
                    self._writing.purge_what_fits()  # what a killed writer left
                    self._relocation.settle_quietly()
            self._opened = opened.pop_all()

    @classmethod
    def create(
        cls,
        home: Folder,
        identity: Identity,
        *,
        store: str = "cells",
        location: str | None = None,
        params: Params = None,
        catalog: str | None = None,
        projection: Weights | None = None,
    ) -> Self:
        """Make a new, empty store and open it for writing; when this was interrupted, call it again.

        Args:
            home: the folder that the store is known by; new or empty.
            identity: model, key and metric of the store.
            store: the adapter's name.
            location: place of the keys: a URL or a folder; default is ``HOME/keys``.
            params: the adapter's own parameters.
            catalog: the catalog's SQLAlchemy URL; default is SQLite in the home.
            projection: kept in the home for as long as the store is, and named by its identity.

        Raises:
            StoreExistsError: there is a store already.
            DatastoreExistsError: somebody's keys are at the location.
            ConfigError: a parameter is wrong or the vocabulary has more than 2**20 tokens.
            AdapterError: the adapter is not installed.
        """
        engine = Engine(store, location or "keys", dict(params or {}))
        folder = Path(home)
        before = _Before.of(folder)
        made = make_store(folder, identity, engine, catalog, projection)
        try:
            new = cls(made, Catalog.open(made.catalog_url), "a")
        except BaseException:
            _remove_home(made, before)
            raise
        new._before = before
        return new

    def discard_new(self) -> None:
        """Close and remove a store that `create` has just made, because what was to follow has failed.

        An empty folder that was there before is left there. Keys outside the home are erased; a catalog in
        a database of its own stays.
        """
        place = self._current.place(self.engine)
        self.close()
        with suppress(KnnstoreError, OSError):
            place.erase()
        _remove_home(self.home, self._before)

    @classmethod
    def open(cls, home: Folder, mode: Mode = "r", *, params: Params = None, copied: bool = False) -> Self:
        """Open a store.

        Args:
            home: the folder that the store is known by.
            mode: ``"r"`` to read, beside a writer; ``"a"`` to read and write, as the only writer.
            params: parameters of the adapter in place of the store's own, as long as this handle reads.
            copied: open also a copied home for writing, to `move` or to `repair` with `take_over`.

        Raises:
            StoreNotFoundError: there is none.
            NotOwnerError: the keys are another store's, or a copied home is opened for writing.
            LockedError: mode ``"a"`` while another process writes; names it.
            ConfigError: there is no such mode; or a parameter is wrong, or given for writing.
        """
        if params and mode != "r":
            raise ConfigError("other parameters of the engine are for reading; `knnstore move` changes them")
        check_mode(mode)
        found = Home.open(home, writing=mode == "a")
        return cls(found, Catalog.open(found.catalog_url), mode, params, copied=copied)

    def close(self) -> None:
        """Flush and release everything; a second call does nothing."""
        self._counting.stop_background()
        self._opened.close()

    def __repr__(self) -> str:
        return f"KNNStore({str(self.home.path)!r}, mode={self.mode!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The adapter of the keys, with its location and parameters."""
        return self._current.engine

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents; they become live together when the block ends well, or none of them does.

        They are distinct in (domain, id); a live one is replaced. Yields the group that takes every key.
        """
        with self._locked() as writing, writing.ingest(documents) as group:
            yield group

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set the metadata and tags of documents of a domain, by id, in one transaction; records stay."""
        with self._locked() as writing:
            writing.describe(domain, changes)

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Give documents of a domain other ids, new by old, in one transaction; records stay."""
        with self._locked() as writing:
            writing.rename(domain, ids)

    def retag(
        self, id: str, *, domain: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> None:
        """Add tags to a document and remove others."""
        self.retag_selected(self._only(id, domain), add=add, remove=remove)

    def retag_selected(
        self, selection: Selection, *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> int:
        """Add tags to the selected documents and remove others, in one transaction; returns how many."""
        with self._locked() as writing:
            return writing.retag(self.view().rows(selection), add, remove)

    def remove_document(self, id: str, *, domain: str | None = None) -> Document:
        """Remove a document and return what it was: from then on no reader retrieves anything of it."""
        return self.remove_selected(self._only(id, domain))[0]

    def remove_selected(self, selection: Selection) -> list[Document]:
        """Remove the selected documents in one transaction, and return what they were."""
        with self._locked() as writing:
            gone = self.select(selection)
            writing.remove(self.view().rows(selection))
        return gone

    def remove_domain(self, name: str) -> Domain:
        """Remove a domain with all its documents, and return what it was, or raise DomainNotFoundError."""
        with self._locked() as writing:
            rows = self.view().rows(Selection((name,)))
            domain = next(domain for domain in self.domains() if domain.name == name)
            writing.remove(rows)
        return domain

    def save_settings(self, saved: SavedSettings, domains: Sequence[str] = ()) -> None:
        """Save settings for exactly this set of domains; weights that none names are removed."""
        with self._locked() as writing:
            writing.save_settings(saved, domains)

    def save_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> str:
        """Write fitted weights durably to a file in the home, and return its name for settings.

        This handle is to save these: a file that none name goes when another handle changes settings.
        """
        with self._locked() as writing:
            return writing.save_weights(Weights(tensors, metadata))

    def erase(self, *, progress: Progress | None = None) -> Erased:
        """Rewrite whatever still holds text or keys that were removed, in the engine and in the database.

        When it returns, no file of the store holds any, but for what it names; interrupted, call it again.

        Raises:
            StoreUnavailableError: an engine or the database cannot be reached, or is read without an end.
        """
        with self._locked() as writing:
            return erase(writing, self._relocation, progress or Progress())

    def verify(self) -> list[str]:
        """Read everything that is stored and list what is wrong, one line each; empty when sound."""
        return self._current.problems() + problems_of(self.home, self._catalog, self.view())

    def repair(self, *, take_over: bool = False) -> list[str]:
        """Do what can be done without a backup, and verify; `take_over` makes a copied home the owner."""
        with self._locked(copied=take_over) as writing:
            writing.take_over()
            writing.repair()
            problems = self.verify()
            if problems:  # what an engine has just found it may make anew
                writing.optimize()
                problems = self.verify()
            return problems

    def info(self) -> dict[str, Any]:
        """Return the store's identity and contents."""
        return info_of(self.home, self._catalog, self.view(), self._relocation.unfinished())

    def optimize(self) -> None:
        """Build the engine's indexes and reclaim space."""
        with self._locked() as writing:
            writing.optimize()

    def move(
        self, adapter: str, location: str, *, params: Params = None, progress: Progress | None = None
    ) -> Moved:
        """Move the keys to another engine: copy, compare, switch in one transaction, erase the old ones.

        Until the switch the store is as it was. Interrupted, the same call goes on; one with another target
        erases the half-made copy first.

        Args:
            adapter: the new adapter's name.
            location: a new place: a URL or a folder, a relative one inside the home.
            params: the new adapter's own parameters; JSON values.
            progress: is told of each batch.

        Raises:
            DatastoreExistsError: something else is at the location.
            DatastoreError: the copy differs from its source, or an engine failed.
        """
        target = Engine(adapter, location, dict(params or {}))
        with self._locked(copied=True) as writing, writing.parting():
            return self._relocation.move(writing.writer, target, progress or Progress())

    def abandon_move(self) -> Engine | None:
        """Give up an interrupted move and erase its copy; returns where it was to go, or None."""
        with self._locked():
            return self._relocation.abandon()

    def _only(self, id: str, domain: str | None) -> Selection:
        return Selection((self.document(id, domain=domain).domain,), documents=(id,))

    @contextmanager
    def _locked(self, *, copied: bool = False) -> Iterator[Writing]:
        if self._writing is None:
            raise ReadOnlyError(f"{self.home.path} was opened for reading; open it with mode 'a' to write")
        with self._writing.lock:
            self._current.check_owned(copied)
            yield self._writing


@dataclass(frozen=True)
class _Before:
    """State of a home's folder before the home was made."""

    mode: int | None
    """Permissions of the empty folder there; None if there was none."""
    absent: tuple[Path, ...]
    """Folders above it that did not exist, the innermost first."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        path = folder.resolve()
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None
        return cls(mode, tuple(parent for parent in path.parents if not parent.exists()))


def _remove_home(home: Home, before: _Before | None) -> None:
    """Remove a home that was just made, and make the empty folder again if there was one."""
    path = home.path.resolve()
    shutil.rmtree(path, ignore_errors=True)
    if before is None:
        return
    if before.mode is not None:
        path.mkdir()
        path.chmod(before.mode)
    with suppress(OSError):
        for parent in before.absent:
            parent.rmdir()
