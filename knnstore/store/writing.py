"""Changing what is in a store: each change is whole or not there."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from knnstore.catalog import CatalogWriter, NewDocument
from knnstore.datastore import IdRanges
from knnstore.errors import DocumentNotFoundError, KnnstoreError
from knnstore.store.current import Current
from knnstore.store.fitted import SavedSettings, Weights, files_in_use, save_weights, sweep
from knnstore.store.home import Home
from knnstore.store.ingest import Ingest, purge
from knnstore.store.verify import orphans_in


class Writing:
    """The one writer of a store; whoever calls a method holds `lock`."""

    def __init__(self, home: Home, writer: CatalogWriter, current: Current) -> None:
        self.lock = threading.RLock()
        self.writer = writer
        self._home = home
        self.current = current
        self._unnamed_weights: set[str] = set()

    def purge(self) -> None:
        """Remove the documents that are not live, for good, with the weights that hold traces of them."""
        purge(self.writer, self.current.datastore, self.writer.unsettled())
        self._sweep_weights()

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents; see `KNNStore.ingest`."""
        group = Ingest(self.writer, self.current.datastore, documents)
        try:
            yield group
            group.commit()
        except BaseException:
            group.abandon()
            raise
        self._sweep_weights()

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set the metadata and tags of documents of a domain; see `KNNStore.describe`."""
        rows = self._rows(domain, changes)
        self.writer.describe({rows[id]: change for id, change in changes.items()})

    def remove(self, domain: str, ids: Iterable[str] | None = None) -> None:
        """Remove documents of a domain, or none if one is not there; None is all."""
        gone = self.writer.catalog.rows(domain=domain) if ids is None else self._rows(domain, ids).values()
        self.writer.retire(list(gone))
        self.purge()

    def save_settings(self, saved: SavedSettings, domains: Sequence[str]) -> None:
        """Save settings, and remove the weights that none name; see `KNNStore.save_settings`."""
        self.writer.save_settings(domains, saved.payload())
        self._unnamed_weights -= set(saved.files())
        self._sweep_weights()

    def save_weights(self, weights: Weights) -> str:
        """Write fitted weights; see `KNNStore.save_weights`."""
        name = save_weights(self._home.weights, weights)
        self._unnamed_weights.add(name)
        return name

    def remove_orphans(self) -> None:
        """Remove records that belong to no document; what fails is left to verifying."""
        with suppress(KnnstoreError):
            orphans = orphans_in(self.writer.catalog, self.current.datastore)
            self.current.datastore.delete(IdRanges.of_ids(orphans))
            self.current.datastore.flush()

    def _sweep_weights(self) -> None:
        if self._home.weights.is_dir():
            used = files_in_use(self.writer.catalog, self.current.view().snapshot)
            sweep(self._home.weights, self._unnamed_weights | used)

    def _rows(self, domain: str, ids: Iterable[str]) -> dict[str, int]:
        """The primary keys of live documents of a domain, by id."""
        wanted = list(ids)
        found = self.writer.catalog.versions(domain, wanted)
        for id in wanted:
            if id not in found:
                raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return {id: version.row for id, version in found.items()}
