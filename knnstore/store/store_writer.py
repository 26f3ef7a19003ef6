"""Changes of a store. Each change is made completely or has no effect."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from knnstore.catalog import CatalogWriter, Lease, NewDocument
from knnstore.checks import check_distinct_names
from knnstore.datastore import IdRanges, SupportsOptimize, SupportsUploads, id_ranges_from_positions
from knnstore.errors import CatalogError, DiskFullError, DocumentNotFoundError, KnnstoreError
from knnstore.space import check_space
from knnstore.store.current import Current
from knnstore.store.fitted import (
    SavedSettings,
    Weights,
    drop_damaged_settings,
    find_files_in_use,
    remove_unused_files,
    save_weights,
)
from knnstore.store.home import Home
from knnstore.store.ingest import Ingest, LeasedIngest, change_in_batches_if_full, delete_unfinished_documents
from knnstore.store.soundness import (
    abandon_unneeded,
    get_checksum_precision,
    make_checksum_computer,
    retry_past_damage,
)
from knnstore.store.uploads import UploadTarget, takes_uploads
from knnstore.store.verify import find_orphans, select_open_positions

_CATALOG_BYTES_PER_TOKEN = 12  # of a token: in the database, and before that in its log

_logger = logging.getLogger(__name__)


class StoreChanges:
    """Changes a store, as its only writer. The caller of each method holds the attribute `lock`.

    Args:
        home: folder of the store.
        writer: writer of the store's catalog.
        current: the open datastore of the store.
    """

    def __init__(self, home: Home, writer: CatalogWriter, current: Current) -> None:
        self.lock = threading.RLock()
        self.writer = writer
        self._home = home
        self.current = current
        self._new_weights: set[str] = set()

    def delete_unfinished_documents(self) -> None:
        """Delete incompletely added documents, and the rest of documents that were removed incompletely.

        Settings and weights that were fitted on removed documents are deleted too.

        Raises:
            DiskFullError: if the disk has no room for the changes. Readers do not see the documents that
                could not be deleted.
        """
        delete_unfinished_documents(self.writer, self.current.datastore, self.writer.unsettled_documents())
        self._delete_unused_weight_files()

    def purge_what_fits(self) -> None:
        """Delete incompletely added documents, and the rest of documents that were removed incompletely.

        If the disk is full, the method stops, logs a warning and raises no error. The next writer deletes the
        rest.
        """
        try:
            self.delete_unfinished_documents()
        except DiskFullError as error:
            _logger.warning(
                "not all space of removed documents could be freed; the next command that writes frees "
                "it: %s",
                error,
            )
            self._delete_unused_weight_files()

    def take_over(self) -> None:
        """Make a copied store the owner of the keys of its original, and delete half added documents.

        Does nothing if this store owns its keys already. Raises NotOwnerError if the keys are inside another
        store's folder.
        """
        if not self.current.owned:
            self.current.take_over()
            self.purge_what_fits()

    @contextmanager
    def finish_copying_keys(self) -> Iterator[None]:
        """Delete superfluous records after the ``with`` block, in which the store's keys are moved.

        If the keys belong to the original of this copied store, the move also copies the records that the
        original has added since. They belong to no document of this store, and are deleted.
        """
        is_copy = not self.current.owned
        yield
        if is_copy:
            self.purge_what_fits()
            with suppress(KnnstoreError):  # the keys are moved; `verify` names what is too much
                self.remove_orphans()

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents in a ``with`` block, all or none; see `KNNStore.ingest`.

        Raises DiskFullError if the disk has no room for the documents.
        """
        self._check_space(sum(len(document.tokens) for document in documents))
        group = Ingest(self.writer, self.current.datastore, documents)
        try:
            yield group
            group.commit()
        except BaseException:
            group.abandon()
            raise
        self._delete_unused_weight_files()
        self._home.reserve.ensure_reserved()  # an earlier removal may have used it

    @contextmanager
    def ingest_leased(self, lease: Lease) -> Iterator[LeasedIngest]:
        """Add documents with leased positions, all or none; see `KNNStore.ingest_leased`.

        Raises DiskFullError if the disk has no room for the documents, or for removing what an earlier
        attempt has left.
        """
        self._check_space(lease.stop - lease.start)
        # An earlier attempt may have left documents at the same positions. Removing them later would remove
        # the new records too.
        self.delete_unfinished_documents()
        documents = LeasedIngest(self.writer, self.current.datastore, lease)
        try:
            yield documents
            documents.commit()
        except BaseException:
            documents.abandon()
            raise
        self._delete_unused_weight_files()
        self._home.reserve.ensure_reserved()

    def release(self, leases: Sequence[Lease]) -> None:
        """Delete leases (reserved positions).

        Records that were uploaded for uncommitted leases are deleted too. Documents of committed leases stay.
        """
        self.delete_uploads(leases)
        self.writer.delete_leases(lease.id for lease in leases)

    def prepare_uploads(self, domain: str) -> UploadTarget | None:
        """Return the engine to which workers may upload records; see `KNNStore.prepare_uploads`."""
        engine = self.current.engine
        if not takes_uploads(engine.location, self.current.datastore):
            return None
        return UploadTarget(
            engine.adapter, engine.location, dict(engine.params), self.writer.create_domain(domain)
        )

    def delete_uploads(self, leases: Sequence[Lease]) -> None:
        """Durably delete the records that were uploaded for uncommitted leases (reserved positions).

        Does nothing if the engine accepts no uploads, or if this store is a copy whose keys belong to its
        original.

        Args:
            leases: leases of this store; committed leases are ignored.
        """
        datastore = self.current.datastore
        uploaded = select_open_positions(leases)
        if uploaded and self.current.owned and isinstance(datastore, SupportsUploads):
            datastore.delete(uploaded)
            datastore.flush()

    def replace_metadata(
        self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]
    ) -> None:
        """Replace the metadata and tags of documents in one transaction; see `KNNStore.replace_metadata`."""
        rows = self._find_rows(domain, changes)
        self.writer.replace_metadata({rows[id]: change for id, change in changes.items()})

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Change the ids of documents in one transaction; see `KNNStore.rename`."""
        rows = self._find_rows(domain, ids)
        self.writer.rename_documents({rows[old]: new for old, new in ids.items()})

    def retag(self, rows: Iterable[int], add: Iterable[str], remove: Iterable[str]) -> int:
        """Add tags to documents, and remove tags from them, in one transaction.

        A tag in both `add` and `remove` is removed. Returns the number of documents.

        Args:
            rows: primary keys of the documents.
            add: tags to add.
            remove: tags to remove.
        """
        documents = self.writer.catalog.documents_by_row(rows)
        added_tags, removed_tags = check_distinct_names(add, "tag"), check_distinct_names(remove, "tag")
        self.writer.replace_metadata(
            {
                row: (document.metadata, ({*document.tags} | added_tags) - removed_tags)
                for row, document in documents.items()
            }
        )
        return len(documents)

    def remove(self, rows: Sequence[int]) -> None:
        """Remove documents; in one transaction if the disk has room for its log, else in several.

        The file that reserves disk space is deleted first if the disk is full, and is written again at the
        end. So a process that runs on, such as a server, can remove documents from a full disk more than
        once.

        Args:
            rows: primary keys of the documents.
        """
        self._home.reserve.give_back()
        try:
            change_in_batches_if_full(self.writer, self.writer.mark_as_deleting, rows)
            self.purge_what_fits()
        finally:
            self._home.reserve.ensure_reserved()

    def save_settings(self, saved: SavedSettings, domains: Sequence[str]) -> None:
        """Save retrieval settings for a set of domains; see `KNNStore.save_settings`.

        Also deletes damaged settings, and files of weights that no saved settings refer to.
        """
        drop_damaged_settings(self.writer)
        self.writer.save_settings(domains, saved.to_payload())
        self._new_weights -= set(saved.list_weight_files())
        self._delete_unused_weight_files()

    def save_weights(self, weights: Weights) -> str:
        """Write fitted weights durably to a file, and return the file's name.

        No saved settings refer to the file yet. It is not deleted as unused until this object has saved
        settings that refer to it.
        """
        name = save_weights(self._home.weights, weights)
        self._new_weights.add(name)
        return name

    def repair(self) -> None:
        """Remove records without a document, build missing and damaged indexes, compute missing checksums."""
        with suppress(KnnstoreError):  # verifying comes next
            self.remove_orphans()
        self.optimize()
        self._add_checksums()

    def remove_orphans(self) -> None:
        """Delete the records that belong to no live document, except records at positions of open leases.

        A document is live if it was stored completely and has not been removed. Damaged parts of the
        datastore (such as files) are deleted too. But a damaged part stays if a live document has lost
        records because of it.
        """
        datastore = self.current.datastore
        orphans = retry_past_damage(datastore, lambda: find_orphans(self.writer.catalog, datastore))
        datastore.delete(IdRanges.from_ids(orphans))
        datastore.flush()
        abandon_unneeded(self.writer.catalog, datastore)

    def _add_checksums(self) -> None:
        """Compute a checksum of the keys of each document that has no checksum in the catalog, and save it.

        Does nothing if the vector engine checks its keys itself.
        """
        catalog, datastore = self.writer.catalog, self.current.datastore
        snapshot = catalog.snapshot()
        lacks_checksum = ~np.isin(snapshot.rows, list(catalog.key_checksums()))
        if get_checksum_precision(datastore.capabilities) is not None and lacks_checksum.any():
            checksums = make_checksum_computer(snapshot, datastore.capabilities)
            for ids, keys, _ in datastore.iterate(
                ids=id_ranges_from_positions(snapshot.starts[lacks_checksum], snapshot.stops[lacks_checksum])
            ):
                checksums.add_records(ids, keys)
            self.writer.note_checksums(checksums.get_checksums())

    def optimize(self) -> None:
        """Build missing indexes of the vector engine, and reclaim the space of removed records.

        Does nothing if the adapter has nothing to optimize.
        """
        if isinstance(self.current.datastore, SupportsOptimize):
            self.current.datastore.optimize()

    def _check_space(self, tokens: int) -> None:
        """Raise DiskFullError if the disks have too little room for new documents.

        A catalog or datastore on a server is not checked.

        Args:
            tokens: number of tokens that will be added.
        """
        operation = f"adding {tokens:,} tokens"
        if self._home.has_catalog:
            check_space(self._home.path, _CATALOG_BYTES_PER_TOKEN * tokens, operation)
        self.current.place(self.current.engine).check_space(tokens, operation)

    def _delete_unused_weight_files(self) -> None:
        """Delete the files of weights that no saved settings name, except new files, see `save_weights`.

        Does nothing if saved settings are damaged.
        """
        if self._home.weights.is_dir():
            try:
                used_files = find_files_in_use(self.writer.catalog, self.current.view().snapshot)
            except CatalogError:  # saved settings are damaged: nobody knows which files they name
                return
            remove_unused_files(self._home.weights, self._new_weights | used_files)

    def _find_rows(self, domain: str, ids: Iterable[str]) -> dict[str, int]:
        """Return a dict from document id to primary key, for documents of a domain.

        Args:
            domain: name of the domain.
            ids: ids of the documents.

        Raises:
            DocumentNotFoundError: if the domain has no document with one of the ids.
        """
        listed_ids = list(ids)
        versions = self.writer.catalog.stored_versions(domain, listed_ids)
        for id in listed_ids:
            if id not in versions:
                raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return {id: version.row for id, version in versions.items()}
