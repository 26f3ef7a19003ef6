"""Changing a store. Each change is complete or has no effect."""

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

_CATALOG_BYTES = 12  # of a token: in the database, and before that in its log

_logger = logging.getLogger(__name__)


class StoreChanges:
    """The only writer of a store. The caller of a method holds `lock`."""

    def __init__(self, home: Home, writer: CatalogWriter, current: Current) -> None:
        self.lock = threading.RLock()
        self.writer = writer
        self._home = home
        self.current = current
        self._unnamed_weights: set[str] = set()

    def purge(self) -> None:
        """Delete the documents that are not live, and the weights that were trained on them.

        Raises:
            DiskFullError: there is no room for that; what is left nobody reads any more.
        """
        purge(self.writer, self.current.datastore, self.writer.unsettled())
        self._sweep_weights()

    def purge_what_fits(self) -> None:
        """Run `purge`; on a full disk leave the rest to the next writer."""
        try:
            self.purge()
        except DiskFullError as error:
            _logger.warning("of what was removed a part still takes space, which goes later: %s", error)
            self._sweep_weights()

    def take_over(self) -> None:
        """Make this home the owner of the keys, if they belong to the home that it is a copy of."""
        if not self.current.owned:
            self.current.take_over()
            self.purge_what_fits()

    @contextmanager
    def finish_copying_keys(self) -> Iterator[None]:
        """In this block a copied home gets keys of its own; then what the other has added since goes."""
        copied = not self.current.owned
        yield
        if copied:
            self.purge_what_fits()
            with suppress(KnnstoreError):  # the keys are moved; `verify` names what is too much
                self.remove_orphans()

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents; see `KNNStore.ingest`."""
        self._check_space(documents)
        group = Ingest(self.writer, self.current.datastore, documents)
        try:
            yield group
            group.commit()
        except BaseException:
            group.abandon()
            raise
        self._sweep_weights()
        self._home.reserve.keep()  # an earlier removal may have used it

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set the metadata and tags of documents of a domain; see `KNNStore.describe`."""
        rows = self._rows(domain, changes)
        self.writer.describe({rows[id]: change for id, change in changes.items()})

    def rename(self, domain: str, ids: Mapping[str, str]) -> None:
        """Give documents of a domain other ids; see `KNNStore.rename`."""
        rows = self._rows(domain, ids)
        self.writer.rename({rows[old]: new for old, new in ids.items()})

    def retag(self, rows: Iterable[int], add: Iterable[str], remove: Iterable[str]) -> int:
        """Change the tags of documents, by primary key, in one transaction; returns how many there are."""
        documents = self.writer.catalog.documents_of(rows)
        added, taken = distinct_names(add, "tag"), distinct_names(remove, "tag")
        self.writer.describe(
            {row: (one.metadata, ({*one.tags} | added) - taken) for row, one in documents.items()}
        )
        return len(documents)

    def remove(self, rows: Sequence[int]) -> None:
        """Remove documents, by primary key, in one transaction where the disk has room for its log.

        On a full disk the reserve is given back before and taken again after: a process that stays open, as
        a server does, can remove more than once.
        """
        self._home.reserve.give_back()
        try:
            change_in_batches_if_full(self.writer, self.writer.retire, rows)
            self.purge_what_fits()
        finally:
            self._home.reserve.keep()

    def save_settings(self, saved: SavedSettings, domains: Sequence[str]) -> None:
        """Save settings, and remove the weights that none name; see `KNNStore.save_settings`."""
        drop_damaged_settings(self.writer)
        self.writer.save_settings(domains, saved.payload())
        self._unnamed_weights -= set(saved.files())
        self._sweep_weights()

    def save_weights(self, weights: Weights) -> str:
        """Write fitted weights; see `KNNStore.save_weights`."""
        name = save_weights(self._home.weights, weights)
        self._unnamed_weights.add(name)
        return name

    def repair(self) -> None:
        """Remove records without a document, rebuild damaged indexes, and compute missing checksums."""
        with suppress(KnnstoreError):  # verifying comes next
            self.remove_orphans()
        self.optimize()
        self._add_checksums()

    def remove_orphans(self) -> None:
        """Remove records that belong to no document."""
        datastore = self.current.datastore
        orphans = retry_past_damage(datastore, lambda: find_orphans(self.writer.catalog, datastore))
        datastore.delete(IdRanges.of_ids(orphans))
        datastore.flush()
        abandon_unneeded(self.writer.catalog, datastore)

    def _add_checksums(self) -> None:
        """Save checksums of the present keys for documents that should have one and have none."""
        catalog, datastore = self.writer.catalog, self.current.datastore
        snapshot = catalog.snapshot()
        lacking = ~np.isin(snapshot.rows, list(catalog.checksums()))
        if get_checksum_precision(datastore.capabilities) is not None and lacking.any():
            checksums = make_checksum_computer(snapshot, datastore.capabilities)
            for ids, keys, _ in datastore.iterate(
                ids=ranges_of(snapshot.starts[lacking], snapshot.stops[lacking])
            ):
                checksums.add(ids, keys)
            self.writer.note_checksums(checksums.found())

    def optimize(self) -> None:
        """Build missing indexes of the engine, and reclaim space."""
        if isinstance(self.current.datastore, SupportsOptimize):
            self.current.datastore.optimize()

    def _check_space(self, documents: Sequence[NewDocument]) -> None:
        """Raise DiskFullError if the documents do not fit on the disk."""
        tokens = sum(len(document.tokens) for document in documents)
        what = f"adding {tokens:,} tokens"
        if self._home.has_catalog:
            check_space(self._home.path, _CATALOG_BYTES * tokens, what)
        self.current.place(self.current.engine).check_space(tokens, what)

    def _sweep_weights(self) -> None:
        if self._home.weights.is_dir():
            try:
                used = find_files_in_use(self.writer.catalog, self.current.view().snapshot)
            except CatalogError:  # saved settings are damaged: nobody knows which files they name
                return
            remove_unused_files(self._home.weights, self._unnamed_weights | used)

    def _rows(self, domain: str, ids: Iterable[str]) -> dict[str, int]:
        """Return the primary keys of live documents of a domain, by id."""
        wanted = list(ids)
        found = self.writer.catalog.versions(domain, wanted)
        for id in wanted:
            if id not in found:
                raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return {id: version.row for id, version in found.items()}
