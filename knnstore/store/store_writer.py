"""Changes of a store. Each change is made completely or has no effect."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from knnstore.catalog import CatalogWriter, NewDocument
from knnstore.checks import distinct_names
from knnstore.datastore import IdRanges, SupportsOptimize, ranges_of
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
from knnstore.store.ingest import Ingest, change_in_batches_if_full, purge
from knnstore.store.soundness import (
    abandon_unneeded,
    get_checksum_precision,
    make_checksum_computer,
    retry_past_damage,
)
from knnstore.store.verify import find_orphans

_CATALOG_BYTES_PER_TOKEN = 12  # of a token: in the database, and before that in its log

_logger = logging.getLogger(__name__)


class StoreChanges:
    """Changes a store, as its only writer. The caller of a method holds `lock`."""

    def __init__(self, home: Home, writer: CatalogWriter, current: Current) -> None:
        self.lock = threading.RLock()
        self.writer = writer
        self._home = home
        self.current = current
        self._new_weights: set[str] = set()

    def purge(self) -> None:
        """Delete the documents that are not live, and settings and weights that were fitted on them.

        Raises:
            DiskFullError: if the disk has no room for the changes. No reader sees the remaining documents.
        """
        purge(self.writer, self.current.datastore, self.writer.unsettled())
        self._remove_unused_weights()

    def purge_what_fits(self) -> None:
        """Run `purge`; on a full disk log a warning and leave the rest to the next writer."""
        try:
            self.purge()
        except DiskFullError as error:
            _logger.warning("of what was removed a part still takes space, which goes later: %s", error)
            self._remove_unused_weights()

    def take_over(self) -> None:
        """Make this store the owner of the keys, if they belong to the original of this copy.

        Then deletes documents that are not live. Does nothing if this store owns the keys.
        """
        if not self.current.owned:
            self.current.take_over()
            self.purge_what_fits()

    @contextmanager
    def finish_copying_keys(self) -> Iterator[None]:
        """Context in which a copied store gets its own copy of the keys.

        After the context, records that the original has added since the copy was made are deleted.
        """
        is_copy = not self.current.owned
        yield
        if is_copy:
            self.purge_what_fits()
            with suppress(KnnstoreError):  # the keys are moved; `verify` names what is too much
                self.remove_orphans()

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents. Commits at the end of the context; abandons the documents after an error.

        Raises:
            DiskFullError: if the documents do not fit on the disk.
        """
        self._check_space(documents)
        group = Ingest(self.writer, self.current.datastore, documents)
        try:
            yield group
            group.commit()
        except BaseException:
            group.abandon()
            raise
        self._remove_unused_weights()
        self._home.reserve.keep()  # an earlier removal may have used it

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set metadata and tags of documents. Raises DocumentNotFoundError for an unknown id."""
        rows = self._find_rows(domain, changes)
        self.writer.describe({rows[id]: change for id, change in changes.items()})

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Change the ids of documents, given as new ids by old ids. Raises DocumentNotFoundError."""
        rows = self._find_rows(domain, ids)
        self.writer.rename({rows[old]: new for old, new in ids.items()})

    def retag(self, rows: Iterable[int], add: Iterable[str], remove: Iterable[str]) -> int:
        """Change the tags of documents by primary key, in one transaction. Returns their number."""
        documents = self.writer.catalog.documents_of(rows)
        added_tags, removed_tags = distinct_names(add, "tag"), distinct_names(remove, "tag")
        self.writer.describe(
            {
                row: (document.metadata, ({*document.tags} | added_tags) - removed_tags)
                for row, document in documents.items()
            }
        )
        return len(documents)

    def remove(self, rows: Sequence[int]) -> None:
        """Remove documents by primary key, in one transaction if the disk has room for its log.

        The file that reserves disk space is deleted before and written again after, so that a process that
        runs on, such as a server, can remove documents from a full disk more than once.
        """
        self._home.reserve.give_back()
        try:
            change_in_batches_if_full(self.writer, self.writer.retire, rows)
            self.purge_what_fits()
        finally:
            self._home.reserve.keep()

    def save_settings(self, saved: SavedSettings, domains: Sequence[str]) -> None:
        """Save settings of domains. Deletes damaged settings, and weights that no settings name."""
        drop_damaged_settings(self.writer)
        self.writer.save_settings(domains, saved.payload())
        self._new_weights -= set(saved.files())
        self._remove_unused_weights()

    def save_weights(self, weights: Weights) -> str:
        """Write fitted weights to a file, keep the file until settings name it, and return its name."""
        name = save_weights(self._home.weights, weights)
        self._new_weights.add(name)
        return name

    def repair(self) -> None:
        """Remove records without a document, rebuild damaged indexes, and compute missing checksums."""
        with suppress(KnnstoreError):  # verifying comes next
            self.remove_orphans()
        self.optimize()
        self._add_checksums()

    def remove_orphans(self) -> None:
        """Delete the records that belong to no document, and damaged parts that no document needs."""
        datastore = self.current.datastore
        orphans = retry_past_damage(datastore, lambda: find_orphans(self.writer.catalog, datastore))
        datastore.delete(IdRanges.of_ids(orphans))
        datastore.flush()
        abandon_unneeded(self.writer.catalog, datastore)

    def _add_checksums(self) -> None:
        """Compute and save the missing checksums of documents, if the engine does not check keys itself."""
        catalog, datastore = self.writer.catalog, self.current.datastore
        snapshot = catalog.snapshot()
        lacks_checksum = ~np.isin(snapshot.rows, list(catalog.checksums()))
        if get_checksum_precision(datastore.capabilities) is not None and lacks_checksum.any():
            checksums = make_checksum_computer(snapshot, datastore.capabilities)
            for ids, keys, _ in datastore.iterate(
                ids=ranges_of(snapshot.starts[lacks_checksum], snapshot.stops[lacks_checksum])
            ):
                checksums.add(ids, keys)
            self.writer.note_checksums(checksums.get_checksums())

    def optimize(self) -> None:
        """Build missing indexes of the engine, and reclaim space. Does nothing if the adapter cannot."""
        if isinstance(self.current.datastore, SupportsOptimize):
            self.current.datastore.optimize()

    def _check_space(self, documents: Sequence[NewDocument]) -> None:
        """Raise DiskFullError if the disk has no room for the documents in the catalog or the datastore."""
        tokens = sum(len(document.tokens) for document in documents)
        operation = f"adding {tokens:,} tokens"
        if self._home.has_catalog:
            check_space(self._home.path, _CATALOG_BYTES_PER_TOKEN * tokens, operation)
        self.current.place(self.current.engine).check_space(tokens, operation)

    def _remove_unused_weights(self) -> None:
        """Delete the files of weights that no settings name. Does nothing if saved settings are damaged."""
        if self._home.weights.is_dir():
            try:
                used_files = find_files_in_use(self.writer.catalog, self.current.view().snapshot)
            except CatalogError:  # saved settings are damaged: nobody knows which files they name
                return
            remove_unused_files(self._home.weights, self._new_weights | used_files)

    def _find_rows(self, domain: str, ids: Iterable[str]) -> dict[str, int]:
        """Return the primary keys of live documents by id. Raises DocumentNotFoundError for an unknown id."""
        listed_ids = list(ids)
        versions = self.writer.catalog.versions(domain, listed_ids)
        for id in listed_ids:
            if id not in versions:
                raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return {id: version.row for id, version in versions.items()}
