"""`KNNStore`: documents in a catalog and their keys in a datastore, which always agree."""

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
from knnstore.store.store_info import describe_store
from knnstore.store.store_reader import StoreReader
from knnstore.store.store_writer import StoreChanges
from knnstore.store.verify import find_problems

Folder = str | os.PathLike[str]
Params = Mapping[str, Any] | None


class KNNStore(StoreReader):
    """Documents with their keys, searched by key; open one with `create` or `open`.

    One process may write and any number may read at the same time. Readers see each commit without reopening.
    Threads may share an object: searches run in parallel, also with one thread that writes.
    """

    def __init__(
        self, home: Home, catalog: Catalog, mode: Mode, params: Params = None, *, copied: bool = False
    ) -> None:
        self.mode: Mode = mode
        self._folder_before: _FolderState | None = None
        self._changes: StoreChanges | None = None
        with ExitStack() as opened:
            opened.callback(catalog.close)
            if mode == "a":
                opened.enter_context(home.lock_for_writing())
                writer = CatalogWriter(catalog)
            self._current = Current(home, catalog, mode, params or {}, copied=copied)
            opened.callback(self._current.close)
            super().__init__(home, catalog, self._current.view)
            self._relocation = Relocation(home, catalog, self._current)
            if mode == "a":
                self._changes = StoreChanges(home, writer, self._current)
                if self._current.owned:
                    self._changes.purge_what_fits()  # what a killed writer left
                    self._relocation.finish_or_warn()
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
        """Create an empty store and open it for writing. If the call is interrupted, repeat it.

        Args:
            home: folder of the store; it must be empty or not exist.
            identity: model, key and metric of the store.
            store: the adapter's name.
            location: place of the keys: a URL or a folder; default is ``HOME/keys``.
            params: parameters of the adapter.
            catalog: the catalog's SQLAlchemy URL; default is SQLite in the home.
            projection: weights that project the keys; saved in the store's folder. None means no projection.

        Raises:
            StoreExistsError: if the folder or the catalog's database has a store already.
            DatastoreExistsError: if the location already holds keys.
            ConfigError: if a parameter is wrong, the folder holds other files, or the vocabulary has more
                than 2**20 tokens.
            AdapterError: if the adapter is not installed.
            LockedError: if another process is creating the same store.
        """
        engine = Engine(store, location or "keys", dict(params or {}))
        folder = Path(home)
        before = _FolderState.of(folder)
        made = make_store(folder, identity, engine, catalog, projection)
        try:
            new = cls(made, Catalog.open(made.catalog_url), "a")
        except BaseException:
            _remove_home(made, before)
            raise
        new._folder_before = before
        return new

    def discard_new(self) -> None:
        """Close and delete a store that `create` has just created, because a later step has failed.

        If `home` was an empty folder before, it is an empty folder again. Keys outside the folder are erased;
        a catalog in another database stays.
        """
        place = self._current.place(self.engine)
        self.close()
        with suppress(KnnstoreError, OSError):
            place.erase()
        _remove_home(self.home, self._folder_before)

    @classmethod
    def open(cls, home: Folder, mode: Mode = "r", *, params: Params = None, copied: bool = False) -> Self:
        """Open a store.

        Args:
            home: folder of the store.
            mode: ``"r"`` to read, also while another process writes; ``"a"`` to read and write, as the only
                writer.
            params: parameters of the adapter that replace the saved parameters for this object; only for
                reading.
            copied: True also opens a copied folder for writing, for `move`, or for `repair` with `take_over`.

        Raises:
            StoreNotFoundError: if the folder has no store.
            NotOwnerError: if the keys belong to another store, or a copied folder is opened for writing.
            LockedError: if mode is ``"a"`` and another process writes. The message names the process.
            ConfigError: if the mode is unknown, a parameter is wrong, or parameters are given for writing.
        """
        if params and mode != "r":
            raise ConfigError("other parameters of the engine are for reading; `knnstore move` changes them")
        check_mode(mode)
        opened_home = Home.open(home, writing=mode == "a")
        return cls(opened_home, Catalog.open(opened_home.catalog_url), mode, params, copied=copied)

    def close(self) -> None:
        """Close the datastore, the catalog and the writer's lock. A second call does nothing."""
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
        """The engine that keeps the keys: its adapter, location and parameters."""
        return self._current.engine

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents, which become live together when the context ends without an error, or never.

        A live document with the same domain and id is replaced. The context gives an `Ingest`, to which the
        caller adds the key of every token.

        Args:
            documents: the documents, with distinct pairs of domain and id.
        """
        with self._lock_for_writing() as writer, writer.ingest(documents) as group:
            yield group

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set metadata and tags of documents in one transaction. Texts and records stay.

        Args:
            domain: domain of the documents.
            changes: new metadata and new tags of each document, by id; they replace the old ones.

        Raises:
            DocumentNotFoundError: if an id is unknown.
        """
        with self._lock_for_writing() as writer:
            writer.describe(domain, changes)

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Change the ids of documents of a domain in one transaction. Texts and records stay.

        Args:
            domain: domain of the documents.
            ids: new ids by old ids.

        Raises:
            DocumentNotFoundError: if an old id is unknown.
        """
        with self._lock_for_writing() as writer:
            writer.rename(domain, ids)

    def retag(
        self, id: str, *, domain: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> None:
        """Add tags to a document and remove other tags. Raises the errors of `document`."""
        self.retag_selected(self._select_one(id, domain), add=add, remove=remove)

    def retag_selected(
        self, selection: Selection, *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> int:
        """Add tags to the selected documents and remove other tags, in one transaction.

        Returns the number of selected documents.
        """
        with self._lock_for_writing() as writer:
            return writer.retag(self.view().rows(selection), add, remove)

    def remove_document(self, id: str, *, domain: str | None = None) -> Document:
        """Remove a document, and return its description. No later search of any reader retrieves its records.

        Raises the errors of `document`.
        """
        return self.remove_selected(self._select_one(id, domain))[0]

    def remove_selected(self, selection: Selection) -> list[Document]:
        """Remove the selected documents in one transaction, and return their descriptions.

        On a full disk they are removed in several transactions.
        """
        with self._lock_for_writing() as writer:
            removed = self.select(selection)
            writer.remove(self.view().rows(selection))
        return removed

    def remove_domain(self, name: str) -> Domain:
        """Remove a domain with all its documents, and return its description.

        Raises DomainNotFoundError if the domain does not exist.
        """
        with self._lock_for_writing() as writer:
            rows = self.view().rows(Selection((name,)))
            domain = next(domain for domain in self.domains() if domain.name == name)
            writer.remove(rows)
        return domain

    def save_settings(self, saved: SavedSettings, domains: Sequence[str] = ()) -> None:
        """Save settings for exactly this set of domains, or for the whole store without domains.

        They replace earlier settings. Files of weights that no saved settings name any more are deleted.
        """
        with self._lock_for_writing() as writer:
            writer.save_settings(saved, domains)

    def save_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> str:
        """Write fitted weights durably to a file in the store's folder, and return the file's name.

        Save settings that name the file with this same object. Otherwise the file is deleted when another
        object changes settings.
        """
        with self._lock_for_writing() as writer:
            return writer.save_weights(Weights(tensors, metadata))

    def erase(self, *, progress: Progress | None = None) -> Erased:
        """Rewrite all files of the engine and the database that still hold removed text or keys.

        When this returns, only the places that the result names may still hold removed text or keys. If the
        call is interrupted, repeat it.

        Raises:
            StoreUnavailableError: if an engine or the database cannot be reached, or readers never release
                it.
        """
        with self._lock_for_writing() as writer:
            return erase(writer, self._relocation, progress or Progress())

    def verify(self) -> list[str]:
        """Read and check all stored data. Returns the problems, one line each; empty if there are none."""
        return self._current.problems() + find_problems(self.home, self._catalog, self.view())

    def repair(self, *, take_over: bool = False) -> list[str]:
        """Repair what can be repaired without a backup, and verify.

        Removes records without documents, rebuilds indexes, and computes missing checksums. With `take_over`
        a copied store first becomes the owner of the keys.

        Returns:
            The remaining problems, one line each; empty if the store is sound.
        """
        with self._lock_for_writing(copied=take_over) as writer:
            writer.take_over()
            writer.repair()
            problems = self.verify()
            if problems:  # what an engine has just found it may make anew
                writer.optimize()
                problems = self.verify()
            return problems

    def info(self) -> dict[str, Any]:
        """Return identity, engine, and numbers of documents, tokens and records, as JSON values."""
        return describe_store(self.home, self._catalog, self.view(), self._relocation.get_unfinished_target())

    def optimize(self) -> None:
        """Build missing indexes of the engine, and reclaim the space of removed records."""
        with self._lock_for_writing() as writer:
            writer.optimize()

    def move(
        self, adapter: str, location: str, *, params: Params = None, progress: Progress | None = None
    ) -> Moved:
        """Move the keys to another engine: copy, compare, switch in one transaction, erase the old keys.

        Until the switch the store is unchanged. If the call is interrupted, the same call continues; a call
        with another target first erases the unfinished copy.

        Args:
            adapter: the new adapter's name.
            location: new location of the keys: a URL or a folder; a relative folder is inside the store's
                folder.
            params: parameters of the new adapter, as JSON values.
            progress: receives the progress of each batch.

        Raises:
            DatastoreExistsError: if the location already holds something else.
            DatastoreError: if the copy differs from its source, or an engine fails.
        """
        target = Engine(adapter, location, dict(params or {}))
        with self._lock_for_writing(copied=True) as writer, writer.finish_copying_keys():
            return self._relocation.move(writer.writer, target, progress or Progress())

    def abandon_move(self) -> Engine | None:
        """Give up an interrupted move and erase its copy. Returns the move's target; None without one."""
        with self._lock_for_writing():
            return self._relocation.abandon()

    def _select_one(self, id: str, domain: str | None) -> Selection:
        """Return the selection of one document. Raises the errors of `document`."""
        return Selection((self.document(id, domain=domain).domain,), documents=(id,))

    @contextmanager
    def _lock_for_writing(self, *, copied: bool = False) -> Iterator[StoreChanges]:
        """Hold the writer's lock in the context, and give the object that changes the store.

        Raises:
            ReadOnlyError: if the store was opened for reading.
            NotOwnerError: if the keys belong to the original of this copy, unless `copied`.
        """
        if self._changes is None:
            raise ReadOnlyError(f"{self.home.path} was opened for reading; open it with mode 'a' to write")
        with self._changes.lock:
            self._current.check_owned(copied)
            yield self._changes


@dataclass(frozen=True)
class _FolderState:
    """State of a store's folder before the store was created, to restore it."""

    mode: int | None
    """Permissions of the empty folder; None if the folder did not exist."""
    absent: tuple[Path, ...]
    """Parent folders that did not exist, the innermost first."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the present state of a folder and of its parents."""
        path = folder.resolve()
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None
        return cls(mode, tuple(parent for parent in path.parents if not parent.exists()))


def _remove_home(home: Home, before: _FolderState | None) -> None:
    """Delete the folder of a store that was just created, and restore the state of the folder before.

    Errors are ignored. Without `before` the folder is only deleted.
    """
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
