"""`KNNStore`: documents in a catalog (SQL), their keys in a datastore (vector engine); both always agree."""

import atexit
import os
import shutil
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from knnstore.catalog import Catalog, CatalogWriter, Document, Domain, Engine, Identity, Lease, NewDocument
from knnstore.errors import ConfigError, KnnstoreError, ReadOnlyError
from knnstore.progress import Progress
from knnstore.store.current import Current, Mode, check_mode
from knnstore.store.erasing import Erased, erase
from knnstore.store.fitted import SavedSettings, Weights
from knnstore.store.home import Home, make_store
from knnstore.store.ingest import Ingest, LeasedIngest
from knnstore.store.relocation import Moved, Relocation
from knnstore.store.selection import Selection
from knnstore.store.store_info import describe_store
from knnstore.store.store_reader import StoreReader
from knnstore.store.store_writer import StoreChanges
from knnstore.store.uploads import UploadTarget
from knnstore.store.verify import find_problems

Folder = str | os.PathLike[str]
Params = Mapping[str, Any] | None

_OPEN_STORES: "weakref.WeakSet[KNNStore]" = weakref.WeakSet()
"""All stores of this process; see `_close_open_stores`."""


class KNNStore(StoreReader):
    """A store: documents in a catalog, and a key (vector) for each of their tokens in a vector engine.

    `create` makes a new store, and `open` opens a store. One process may write, and any number may read at
    the same time. Readers see each change without reopening the store. Threads may share an object: searches
    run in parallel with each other and with one thread that writes.

    Args:
        home: folder of the store.
        catalog: open catalog of the store; the object closes it.
        mode: ``"r"`` to read, ``"a"`` to read and write.
        params: parameters of the adapter that replace the saved parameters for this object; None replaces
            none.
        copied: True accepts a copied folder whose keys still belong to the original store.
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
        self._process = os.getpid()
        _OPEN_STORES.add(self)

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
            identity: model and parameters of the store, which never change.
            store: name of the adapter (the class that connects knnstore to a vector engine).
            location: location of the keys: a URL or a folder; None means the folder ``keys`` in `home`.
            params: parameters of the adapter; None means the adapter's defaults.
            catalog: SQLAlchemy URL of the catalog's database; None means a SQLite file in `home`.
            projection: weights that project the keys to fewer components, saved in the store's folder. None
                means that keys are not projected.

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
        before = _FolderState.inspect(folder)
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

        The folder is deleted. If it was an empty folder before `create`, it is an empty folder again. Keys
        outside the folder are erased if the adapter can erase them; errors are ignored. A catalog in another
        database stays.
        """
        place = self._current.place(self.engine)
        self.close()
        with suppress(KnnstoreError, OSError):
            place.erase()
        _remove_home(self.home, self._folder_before)

    @classmethod
    def open(cls, home: Folder, mode: Mode = "r", *, params: Params = None, copied: bool = False) -> Self:
        """Open an existing store.

        Args:
            home: folder of the store.
            mode: ``"r"`` to read, also while another process writes; ``"a"`` to read and write, as the only
                writer.
            params: parameters of the adapter that replace the saved parameters for this object; None replaces
                none. They are allowed only with mode ``"r"``.
            copied: matters if the folder was copied from another store and the keys still belong to that
                store. True opens the copy for writing, but only `move`, and `repair` with `take_over`, can
                write. False raises NotOwnerError.

        Raises:
            StoreNotFoundError: if the folder has no store.
            NotOwnerError: if the keys belong to another store, or a copied folder is opened for writing and
                `copied` is False.
            LockedError: if mode is ``"a"`` and another process writes. The message names the process.
            ConfigError: if the mode is unknown, a parameter is wrong, or parameters are given for writing.
        """
        if params and mode != "r":
            raise ConfigError(
                "parameters of the engine can be given only for reading: change them with `knnstore move`"
            )
        check_mode(mode)
        opened_home = Home.open(home, writing=mode == "a")
        return cls(opened_home, Catalog.open(opened_home.catalog_url), mode, params, copied=copied)

    def close(self) -> None:
        """Close the datastore, the catalog and the writer's lock. A second call does nothing.

        Does nothing in a forked child process: the store's connections and lock belong to the process that
        opened the store.
        """
        if self._process == os.getpid():
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
        """The vector engine that has the store's keys: name of the adapter, location and parameters."""
        return self._current.engine

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents in a ``with`` block, in which the caller passes the key of every token.

        The block receives an `Ingest`, whose method `add` takes the keys. When the block ends without an
        error, all documents become visible to readers together, and stored documents with the same domain and
        id are replaced. After an error, no document is added.

        Args:
            documents: the documents. Each pair of domain and id may occur only once.
        """
        with self._lock_for_writing() as writer, writer.ingest(documents) as group:
            yield group

    def lease(self, id: str, tokens: int, folder: Path) -> Lease:
        """Reserve positions for the tokens of documents whose keys other processes compute.

        A position is the number of a token in the store. Returns the lease, which describes the reserved
        positions. Other leases of the same folder are released.

        Args:
            id: id of the lease, 32 characters.
            tokens: number of tokens.
            folder: folder of the plan.
        """
        with self._lock_for_writing() as writer:
            place = str(folder.absolute())
            writer.release([lease for lease in self.leases() if lease.folder == place])
            return writer.writer.lease_positions(id, tokens, place)

    def release(self, id: str) -> None:
        """Delete a lease (reserved positions). An unknown id is ignored.

        If the lease is not committed, records that were uploaded for it are deleted too. If it is committed,
        its documents stay.
        """
        with self._lock_for_writing() as writer:
            writer.release([lease for lease in self.leases() if lease.id == id])

    def prepare_uploads(self, domain: str) -> UploadTarget | None:
        """Return the engine to which workers may upload the records of planned documents.

        Uploaded records have positions of a lease. Readers do not see them until the documents are added. The
        domain is created in the catalog if it does not exist, because its records need a group number.

        Args:
            domain: domain of the documents.

        Returns:
            The engine and the group number of the domain. None if the engine accepts no uploads, or if its
            location may contain a secret.
        """
        with self._lock_for_writing() as writer:
            return writer.prepare_uploads(domain)

    @contextmanager
    def ingest_leased(self, lease: Lease) -> Iterator[LeasedIngest]:
        """Add documents with leased positions, part by part, in a ``with`` block.

        The block receives a `LeasedIngest`, whose method `add_part` takes documents with their keys. When the
        block ends without an error, all documents become visible to readers in one transaction, and the lease
        is committed. After an error, no document is added, and the lease stays open.

        Args:
            lease: the lease of the documents' positions, which is not committed.
        """
        with self._lock_for_writing() as writer, writer.ingest_leased(lease) as documents:
            yield documents

    def replace_metadata(
        self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]
    ) -> None:
        """Replace the metadata and tags of documents in one transaction. Texts and keys do not change.

        Args:
            domain: name of the documents' domain.
            changes: pair (new metadata, new tags) of each document, by id of the document.

        Raises:
            DocumentNotFoundError: if an id is unknown.
        """
        with self._lock_for_writing() as writer:
            writer.replace_metadata(domain, changes)

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Change the ids of documents in one transaction. Texts and keys do not change.

        Args:
            domain: name of the documents' domain.
            ids: new id of each document, by its old id.

        Raises:
            DocumentNotFoundError: if an old id is unknown.
        """
        with self._lock_for_writing() as writer:
            writer.rename(domain, ids)

    def retag(
        self, id: str, *, domain: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> None:
        """Add tags to one document, and remove tags from it, in one transaction.

        Args:
            id: id of the document.
            domain: name of its domain; None searches all domains.
            add: tags to add; tags that the document has already are ignored.
            remove: tags to remove; tags that the document does not have are ignored. A tag in both `add` and
                `remove` is removed.

        Raises:
            DocumentNotFoundError: if no document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        self.retag_selected(self._select_one(id, domain), add=add, remove=remove)

    def retag_selected(
        self, selection: Selection, *, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> int:
        """Add tags to all selected documents, and remove tags from them, in one transaction.

        Args:
            selection: the documents.
            add: tags to add.
            remove: tags to remove. A tag in both `add` and `remove` is removed.

        Returns:
            The number of selected documents.
        """
        with self._lock_for_writing() as writer:
            return writer.retag(self.view().document_rows(selection), add, remove)

    def remove_document(self, id: str, *, domain: str | None = None) -> Document:
        """Remove a document, and return its description. No later search of any reader finds its records.

        Args:
            id: id of the document.
            domain: name of its domain; None searches all domains.

        Raises:
            DocumentNotFoundError: if no document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        return self.remove_selected(self._select_one(id, domain))[0]

    def remove_selected(self, selection: Selection) -> list[Document]:
        """Remove all selected documents in one transaction, and return their descriptions.

        If the disk is full, the documents are removed in several small transactions.
        """
        with self._lock_for_writing() as writer:
            removed = self.select(selection)
            writer.remove(self.view().document_rows(selection))
        return removed

    def remove_domain(self, name: str) -> Domain:
        """Remove a domain with all its documents, and return its description.

        Raises DomainNotFoundError if the domain does not exist.
        """
        with self._lock_for_writing() as writer:
            rows = self.view().document_rows(Selection((name,)))
            domain = next(domain for domain in self.domains() if domain.name == name)
            writer.remove(rows)
        return domain

    def save_settings(self, saved: SavedSettings, domains: Sequence[str] = ()) -> None:
        """Save retrieval settings for a set of domains. Settings that were saved for this set are replaced.

        Files of weights that no saved settings name any more are deleted.

        Args:
            saved: the settings.
            domains: names of the domains; empty means the whole store.
        """
        with self._lock_for_writing() as writer:
            writer.save_settings(saved, domains)

    def save_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> str:
        """Write fitted weights durably to a file in the store's folder, and return the file's name.

        The file is kept until this object is closed, and afterwards as long as saved settings name it. So
        settings that name the file must be saved with this same object.

        Args:
            tensors: the weights, as arrays by name.
            metadata: JSON values by name.
        """
        with self._lock_for_writing() as writer:
            return writer.save_weights(Weights(tensors, metadata))

    def erase(self, *, progress: Progress | None = None) -> Erased:
        """Rewrite all files that still hold text or keys of removed documents, so that none of it is left.

        Only the places that the result names may still hold removed text or keys afterwards. If the call is
        interrupted, repeat it.

        Args:
            progress: object that shows messages and progress to the user; None shows nothing.

        Returns:
            The number of records, the duration, and the places that could not be rewritten.

        Raises:
            StoreUnavailableError: if the engine or the database cannot be reached, or readers of the database
                do not end in time.
        """
        with self._lock_for_writing() as writer:
            return erase(writer, self._relocation, progress or Progress())

    def verify(self) -> list[str]:
        """Read and check all stored data, without changing anything.

        Returns one line of text for each problem; the list is empty if the store is sound.
        """
        return self._current.check_claim() + find_problems(self.home, self._catalog, self.view())

    def repair(self, *, take_over: bool = False) -> list[str]:
        """Repair the store as far as possible without a backup, then check all stored data.

        Records without documents are removed, indexes are built again, and missing checksums are computed.

        Args:
            take_over: True first makes this store the owner of the keys if it is a copied store: its folder
                was copied from another store (the original), and its keys still belong to the original. Use
                True only if the original does not exist any more. False raises an error for a copied store.

        Returns:
            The remaining problems, one line of text each; empty if the store is sound.

        Raises:
            ReadOnlyError: if the store was opened for reading.
            NotOwnerError: if this is a copied store and `take_over` is False, or if the keys are inside the
                folder of another store.
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
        """Return a description of the store as JSON values by name.

        The values are the store's identity, its engine, its numbers of documents, tokens and records, and its
        trained and calibrated settings.
        """
        return describe_store(self.home, self._catalog, self.view(), self._relocation.get_unfinished_target())

    def optimize(self) -> None:
        """Build missing indexes of the vector engine, and reclaim the space of removed records.

        Does nothing if the adapter has nothing to optimize.
        """
        with self._lock_for_writing() as writer:
            writer.optimize()

    def move(
        self, adapter: str, location: str, *, params: Params = None, progress: Progress | None = None
    ) -> Moved:
        """Move the keys to another vector engine or location.

        All records are copied, and the copy is compared with its source. Then the store switches to the copy
        in one transaction, and the old keys are erased. If the call is interrupted before the switch, the
        store is unchanged: the same call continues the move, and a call with another target first erases the
        unfinished copy.

        Before the move, records that workers have uploaded for plans are deleted; the commit of a plan then
        adds the keys from the folder of the plan. If a worker uploads records during the call, the call
        fails.

        Args:
            adapter: name of the new adapter.
            location: new location of the keys: a URL or a folder; a relative folder is inside the store's
                folder.
            params: parameters of the new adapter, as JSON values; None means the adapter's defaults.
            progress: object that shows messages and progress to the user; None shows nothing.

        Raises:
            DatastoreExistsError: if the location already holds something else.
            DatastoreError: if the copy differs from its source, or an engine fails.
        """
        target = Engine(adapter, location, dict(params or {}))
        with self._lock_for_writing(copied=True) as writer, writer.finish_copying_keys():
            writer.delete_uploads(self.leases())
            return self._relocation.move_keys(writer.writer, target, progress or Progress())

    def abandon_move(self) -> Engine | None:
        """Give up a move of the keys that was interrupted before its switch, and erase its copy.

        If the copy cannot be erased, a warning is logged. A copy that the move did not create, and that has
        records, is not erased.

        Returns:
            The target engine of the move; None if there is no such move.
        """
        with self._lock_for_writing():
            return self._relocation.abandon_move()

    def _select_one(self, id: str, domain: str | None) -> Selection:
        """Return a selection that contains exactly one document.

        Args:
            id: id of the document.
            domain: name of its domain; None searches all domains.

        Raises:
            DocumentNotFoundError: if no document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        return Selection((self.document(id, domain=domain).domain,), documents=(id,))

    @contextmanager
    def _lock_for_writing(self, *, copied: bool = False) -> Iterator[StoreChanges]:
        """Hold the lock for changes in the ``with`` block, and yield the object that changes the store.

        Args:
            copied: True accepts a copied store whose keys still belong to its original.

        Raises:
            ReadOnlyError: if the store was opened for reading.
            NotOwnerError: if the keys belong to the original of this copied store, and `copied` is False.
        """
        if self._changes is None:
            raise ReadOnlyError(f"{self.home.path} was opened for reading; open it with mode 'a' to write")
        with self._changes.lock:
            self._current.check_owned(copied)
            yield self._changes


@dataclass(frozen=True)
class _FolderState:
    """State of a folder before a store is created in it, so that it can be restored if a later step fails."""

    mode: int | None
    """Permissions of the folder; None if the folder does not exist."""
    absent: tuple[Path, ...]
    """Parent folders that do not exist, the innermost first."""

    @classmethod
    def inspect(cls, folder: Path) -> Self:
        """Return the present state of a folder and its parents."""
        path = folder.resolve()
        mode = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None
        return cls(mode, tuple(parent for parent in path.parents if not parent.exists()))


@atexit.register
def _close_open_stores() -> None:
    """Close the stores that a script has not closed, when Python exits."""
    for store in list(_OPEN_STORES):
        store.close()


def _remove_home(home: Home, before: _FolderState | None) -> None:
    """Delete the folder of a store that was just created, and restore the earlier state of the folder.

    Errors are ignored.

    Args:
        home: folder of the store.
        before: state of the folder before the store was created; None only deletes the folder.
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
