"""The store: a catalogue and a datastore as one thing."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from knnstore.catalog import Catalog, CatalogWriter, Document, Domain, Engine, Identity, NewDocument
from knnstore.datastore import TOKEN_LIMIT, IdRanges, SupportsOptimize
from knnstore.durable import WriterLock
from knnstore.errors import ConfigError, DocumentNotFoundError, KnnstoreError
from knnstore.store.creation import make_store
from knnstore.store.fitted import Traces, Weights, problem_of, save_weights, sweep
from knnstore.store.home import Home
from knnstore.store.ingest import Ingest, purge
from knnstore.store.reader import Mode
from knnstore.store.relocation import RelocatableStore, settle_quietly, unfinished
from knnstore.store.saved import SavedSettings
from knnstore.store.selection import Selection
from knnstore.store.verify import problems_of, strangers_in


class KNNStore(RelocatableStore):
    """Documents with their keys, searched by key; open one with `create` or `open`.

    One process writes and any number read; readers see each commit without reopening. A handle
    may be used by several threads: searches run beside each other and beside one writing thread.

    Args:
        home: where the store is.
        catalog: its catalogue.
        mode: ``"r"`` or ``"a"``.
        params: see `open`.
    """

    def __init__(
        self, home: Home, catalog: Catalog, mode: Mode, params: Mapping[str, Any] | None = None
    ) -> None:
        self._writer: CatalogWriter | None = None
        self._writing = threading.RLock()
        self._unnamed_weights: set[str] = set()
        with ExitStack() as opened:
            opened.callback(catalog.close)
            if mode == "a":
                opened.callback(WriterLock(home.path).release)
                self._writer = CatalogWriter(catalog)
            super().__init__(home, catalog, mode, opened, params)
            if self._writer is not None:  # settle what a killed writer left
                purge(self._writer, self._datastore, self._writer.unsettled())
                settle_quietly(home, self._engine)
                self._sweep_weights()
            self._opened = opened.pop_all()

    # -- opening and closing

    @classmethod
    def create(
        cls,
        home: str | os.PathLike[str],
        identity: Identity,
        *,
        store: str = "faiss",
        location: str | None = None,
        params: Mapping[str, Any] | None = None,
        catalog: str | None = None,
        projection: Weights | None = None,
    ) -> Self:
        """Make a new, empty store and open it for writing.

        When this was interrupted, the same call goes through.

        Args:
            home: the folder that the store is known by; new or empty.
            identity: what the store is made for.
            store: the adapter's name.
            location: where the adapter keeps the keys: a URL or a folder; default ``HOME/keys``.
            params: the adapter's own parameters.
            catalog: the catalogue's SQLAlchemy URL; default is SQLite in the home.
            projection: kept in the home for as long as the store is, and named by its identity.

        Raises:
            StoreExistsError: there is a store already.
            DatastoreExistsError: somebody's keys are at the location.
            ConfigError: a parameter is wrong or the vocabulary has more than `TOKEN_LIMIT` tokens.
            AdapterError: the adapter is not installed.
        """
        if identity.vocab_size > TOKEN_LIMIT:
            raise ConfigError(f"the vocabulary has {identity.vocab_size} tokens; a store takes {TOKEN_LIMIT}")
        engine = Engine(store, location or "keys", dict(params or {}))
        place = Path(home).resolve()  # a relative one may be the folder that is replaced
        if projection is not None:
            identity = replace(identity, projection=projection.name)
        make_store(place, identity, engine, catalog, projection)
        found = Home.open(place, catalog)  # with its password, which is not written
        return cls(found, Catalog.open(found.catalog_url), "a")

    @classmethod
    def open(
        cls, home: str | os.PathLike[str], mode: Mode = "r", *, params: Mapping[str, Any] | None = None
    ) -> Self:
        """Open a store.

        Args:
            home: the folder that the store is known by.
            mode: ``"r"`` to read, beside a writer; ``"a"`` to read and write, as the only writer.
            params: parameters of the adapter in place of the store's own, as long as this handle reads.

        Raises:
            StoreNotFoundError: there is none.
            LockedError: mode ``"a"`` while another process writes; names it.
            ConfigError: a parameter is wrong, or given for writing.
        """
        if params and mode != "r":
            raise ConfigError("other parameters of the engine are for reading; `knnstore move` changes them")
        found = Home.open(home)
        return cls(found, Catalog.open(found.catalog_url), mode, params)

    # -- changing it

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents; they become live together when the block ends well, or none of them does.

        Args:
            documents: distinct in (domain, id); one that is live already is replaced.

        Yields:
            The group, to which every token's key is to be added.
        """
        with self._locked() as writer:
            with Ingest(writer, self._datastore, documents) as group:
                yield group
            self._sweep_weights()

    def describe(self, domain: str, changes: Mapping[str, tuple[Mapping[str, Any], Iterable[str]]]) -> None:
        """Set the metadata and tags of documents of a domain, by id, in one transaction; records stay.

        Raises:
            DocumentNotFoundError: one is not there; none was changed.
        """
        with self._locked() as writer:
            rows = self._rows(domain, changes)
            writer.describe({rows[id]: change for id, change in changes.items()})

    def retag(
        self, id: str, *, domain: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> None:
        """Add tags to a document and remove others."""
        document = self.document(id, domain=domain)
        tags = (set(document.tags) | set(add)) - set(remove)
        self.describe(document.domain, {id: (document.metadata, tags)})

    def remove_document(self, id: str, *, domain: str | None = None) -> Document:
        """Remove a document: when this returns, no reader retrieves anything of it.

        Returns:
            What was removed.
        """
        document = self.document(id, domain=domain)
        self._remove([self._rows(document.domain, [id])[id]])
        return document

    def remove_domain(self, name: str) -> Domain:
        """Remove a domain with all its documents.

        Returns:
            What was removed.

        Raises:
            DomainNotFoundError: there is none.
        """
        with self._locked():
            self.view().scope(Selection(domains=(name,)))
            domain = next(domain for domain in self.domains() if domain.name == name)
            self._remove(self._catalog.rows(domain=name))
        return domain

    def save_settings(self, saved: SavedSettings, domains: Sequence[str] = ()) -> None:
        """Save settings for exactly this set of domains; weights that none names are removed."""
        with self._locked() as writer:
            writer.save_settings(domains, saved.payload())
            self._unnamed_weights -= set(saved.files())
            self._sweep_weights()

    def save_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> str:
        """Write fitted weights durably to a file in the home.

        Args:
            tensors: by name.
            metadata: what is to be known about them; JSON values.

        Returns:
            The name for settings, which this handle is to save with `save_settings`: a file that
            none name is removed with the next change of settings by another handle.
        """
        with self._locked():
            name = save_weights(self._weights, Weights(tensors, metadata))
            self._unnamed_weights.add(name)
            return name

    def verify(self) -> list[str]:
        """Read everything that is stored and list what is wrong, one line each; empty when sound."""
        named = sorted(self._named_weights())
        damaged = [problem for name in named if (problem := problem_of(self._weights, name))]
        return problems_of(self._catalog, self.datastore) + damaged

    def repair(self) -> list[str]:
        """Remove records that belong to no document, and verify.

        What an interrupted writer left was settled when the store was opened for writing.
        """
        with self._locked():
            with suppress(KnnstoreError):  # which verifying reports
                strangers = strangers_in(self._catalog, self._datastore)
                self._datastore.delete(IdRanges.of_ids(strangers))
                self._datastore.flush()
            return self.verify()

    def info(self) -> dict[str, Any]:
        """What the store is made for and what is in it."""
        domains, move_target = self.domains(), unfinished(self.home, self._catalog.engine())
        snapshot, saved = self.view().snapshot, self._all_settings()
        files = {name: traces for one in saved for name, traces in one.files().items()}
        return {
            "home": str(self.home.path),
            "catalog": self.home.catalog_url.render_as_string(hide_password=True),
            "store": self._engine.adapter,
            "location": self._engine.location,
            "params": dict(self._engine.params),
            "unfinished_move": move_target.location if move_target else None,
            **{name: getattr(self.identity, name) for name in Identity.__slots__},
            "model_fingerprint": self.identity.model_fingerprint.partition(":")[0],
            "domains": len(domains),
            "documents": sum(domain.documents for domain in domains),
            "tokens": sum(domain.tokens for domain in domains),
            "records": self.datastore.count(),
            "revision": self._catalog.revision(),
            "substitutes": [
                f"of {', '.join(traces.domains) or 'the whole store'}: "
                + ("ready" if traces.are_whole(snapshot) else "outdated, documents of it are gone")
                for traces in files.values()
                if traces is not None
            ],
            "calibrated": [
                f"for {', '.join(found['domains']) or 'the whole store'}: {found['mixer']}, perplexity "
                f"{found['base_ppl']:,.2f} -> {found['knn_ppl']:,.2f} on {found['tokens']:,} tokens (SHA-256 "
                f"{found['text_hash'][:12]}), {found['date'][:10]}, revision {found['revision']}"
                for found in (one.calibration for one in saved)
                if found
            ],
        }

    def optimize(self) -> None:
        """Let the engine build its indexes and reclaim space."""
        with self._locked():
            if isinstance(self._datastore, SupportsOptimize):
                self._datastore.optimize()

    # -- parts

    def _named_weights(self) -> set[str]:
        """The files that are to be there: not those with traces of a document that is gone."""
        projection, snapshot = self.identity.projection, self.view().snapshot
        named: dict[str, Traces | None] = {} if projection is None else {projection: None}
        for saved in self._all_settings():
            named |= saved.files()
        return {name for name, traces in named.items() if traces is None or traces.are_whole(snapshot)}

    def _all_settings(self) -> list[SavedSettings]:
        return [SavedSettings.of_payload(payload) for payload in self._catalog.all_settings()]

    def _sweep_weights(self) -> None:
        if self._weights.is_dir():
            sweep(self._weights, self._unnamed_weights | self._named_weights())

    def _remove(self, rows: Sequence[int]) -> None:
        with self._locked() as writer:
            writer.retire(rows)
            purge(writer, self._datastore, writer.unsettled())
            self._sweep_weights()

    def _rows(self, domain: str, ids: Iterable[str]) -> dict[str, int]:
        """The primary keys of live documents of a domain, by id."""
        wanted = list(ids)
        found = self._catalog.versions(domain, wanted)
        for id in wanted:
            if id not in found:
                raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return {id: version.row for id, version in found.items()}
