"""The store: a catalogue and a datastore as one thing."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from knnstore.catalog import (
    Catalog,
    CatalogWriter,
    Document,
    Domain,
    Engine,
    Identity,
    NewDocument,
    StoredVersion,
)
from knnstore.datastore import Datastore, Ids, Keys, Metric, Neighbors, SupportsOptimize, registry
from knnstore.datastore import Mode as DatastoreMode
from knnstore.datastore.files import WriterLock
from knnstore.errors import AmbiguousDocumentError, ConfigError, DocumentNotFoundError, ReadOnlyError
from knnstore.store.home import Home
from knnstore.store.provenance import Provenance, Tracer
from knnstore.store.records import TOKEN_LIMIT
from knnstore.store.selection import EVERYTHING, Selection
from knnstore.store.view import View
from knnstore.store.writing import Ingest, purge

Mode = Literal["r", "a"]

_SEARCH_ATTEMPTS = 5  # a commit every few seconds cannot overtake so many searches in a row


class KNNStore:
    """Documents with their keys, searched by key; open one with `create` or `open`.

    One process writes and any number read; readers see each commit without reopening. A handle
    may be used by several threads: searches run beside each other and beside one writing thread.

    Args:
        home: where the store is.
        catalog: its catalogue.
        mode: ``"r"`` or ``"a"``.
    """

    def __init__(self, home: Home, catalog: Catalog, mode: Mode) -> None:
        self.home = home
        self.mode: Mode = mode
        self.identity: Identity = catalog.identity
        self._catalog = catalog
        self._writing = threading.RLock()
        self._viewing = threading.Lock()
        self._tracer = Tracer(catalog)
        self._writer: CatalogWriter | None = None
        with ExitStack() as opened:
            opened.callback(catalog.close)
            if mode == "a":
                opened.callback(WriterLock(home.path).release)
                self._writer = CatalogWriter(catalog)
            self._engine = catalog.engine()
            self._datastore = _open_datastore(home, self.identity, self._engine, mode)
            opened.callback(self._close_datastore)
            self._view: View | None = None
            if self._writer is not None:
                self._recover(self._writer)
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
    ) -> Self:
        """Make a new, empty store and open it for writing.

        Args:
            home: the folder that the store is known by; new or empty.
            identity: what the store is made for.
            store: the adapter's name.
            location: where the adapter keeps the keys: a URL or a folder; default ``HOME/keys``.
            params: the adapter's own parameters.
            catalog: the catalogue's SQLAlchemy URL; default is SQLite in the home.

        Raises:
            StoreExistsError: there is a store already.
            ConfigError: a parameter is wrong or the vocabulary has more than 2**20 tokens.
            AdapterError: the adapter is not installed.
        """
        if identity.vocab_size > TOKEN_LIMIT:
            raise ConfigError(f"the vocabulary has {identity.vocab_size} tokens; a store takes {TOKEN_LIMIT}")
        engine = Engine(store, location or "keys", dict(params or {}))
        with Home.create(home, catalog) as made:
            _open_datastore(made, identity, engine, "x").close()
            Catalog.create(made.catalog_url, identity, engine).close()
        return cls.open(home, "a")

    @classmethod
    def open(cls, home: str | os.PathLike[str], mode: Mode = "r") -> Self:
        """Open a store.

        Args:
            home: the folder that the store is known by.
            mode: ``"r"`` to read, beside a writer; ``"a"`` to read and write, as the only writer.

        Raises:
            StoreNotFoundError: there is none.
            LockedError: mode ``"a"`` while another process writes; names it.
        """
        found = Home.open(home)
        return cls(found, Catalog.open(found.catalog_url), mode)

    def close(self) -> None:
        """Flush and release everything; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- searching

    def search(self, queries: Keys, k: int, selection: Selection = EVERYTHING) -> Neighbors:
        """Find the k nearest live records of each query.

        Args:
            queries: float32, shape (q, dim).
            k: how many, >= 1.
            selection: among which documents.

        Returns:
            Record ids (see `tokens_of`) and distances, shape (q, k), nearest first; id -1 at
            distance +inf where fewer records match.
        """
        for _ in range(_SEARCH_ATTEMPTS):
            view = self.view()
            found = view.search(queries, k, selection)
            # A commit between the two may have removed what the view still counts on.
            if self._catalog.revision() == view.snapshot.revision:
                break
        return found

    def view(self) -> View:
        """What is live at the latest revision."""
        with self._viewing:
            if self._view is None or self._catalog.revision() != self._view.snapshot.revision:
                engine = self._catalog.engine()
                if engine != self._engine:  # the keys were moved by another process
                    moved = _open_datastore(self.home, self.identity, engine, self.mode)
                    self._datastore, self._engine = moved, engine
                self._view = View(self._catalog.snapshot(), self._datastore, self._catalog)
            return self._view

    def provenance(self, ids: Ids, *, before: int = 16, after: int = 8) -> list[Provenance | None]:
        """Say where retrieved records come from.

        Args:
            ids: record ids of any search, shape (n,).
            before: tokens of context to give.
            after: tokens of continuation to give.

        Returns:
            n entries; None for id -1 and for records whose document was removed since.
        """
        return self._tracer.trace(ids, self.view().snapshot, before=before, after=after)

    # -- what is in the store

    def domains(self) -> list[Domain]:
        """Every domain with its documents and tokens, by name."""
        return self._catalog.domains()

    def documents(self, *, domain: str | None = None, tag: str | None = None) -> list[Document]:
        """The live documents in the order in which they were added."""
        return self._catalog.documents(domain=domain, tag=tag)

    def document(self, id: str, *, domain: str | None = None) -> Document:
        """One document.

        Raises:
            DocumentNotFoundError: there is none.
            AmbiguousDocumentError: several domains have one of this id and none was named.
        """
        found = self._catalog.documents(id=id, domain=domain)
        if not found:
            where = "" if domain is None else f" in domain {domain!r}"
            raise DocumentNotFoundError(f"no document {id!r}{where}")
        if len(found) > 1:
            names = ", ".join(document.domain for document in found)
            raise AmbiguousDocumentError(f"document {id!r} is in several domains, name one: {names}")
        return found[0]

    def versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """The live versions of documents of a domain, by id; what ingest compares with."""
        return self._catalog.versions(domain, ids)

    def stored_content(self, hashes: Iterable[str]) -> set[str]:
        """Which of these content hashes belong to a live document."""
        return set(self._catalog.rows_by_content(hashes))

    def settings(self, domains: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """The retrieval settings saved for exactly this set of domains, if any."""
        return self._catalog.settings(domains)

    @property
    def engine(self) -> Engine:
        """The adapter that holds the keys, where, and with which parameters."""
        return self._engine

    @property
    def datastore(self) -> Datastore:
        """The datastore itself."""
        return self._datastore

    # -- changing it

    @contextmanager
    def ingest(self, documents: Sequence[NewDocument]) -> Iterator[Ingest]:
        """Add documents; they become live together when the block ends well, or none of them does.

        Args:
            documents: distinct in (domain, id); one that is live already is replaced.

        Yields:
            The group, to which every token's key is to be added.
        """
        with self._locked() as writer, Ingest(writer, self._datastore, documents) as group:
            yield group

    def describe(self, id: str, domain: str, *, metadata: Mapping[str, Any], tags: Iterable[str]) -> None:
        """Set the metadata and tags of a document; its records stay."""
        with self._locked() as writer:
            writer.describe({self._row(id, domain): (metadata, tags)})

    def retag(
        self, id: str, *, domain: str | None = None, add: Iterable[str] = (), remove: Iterable[str] = ()
    ) -> None:
        """Add tags to a document and remove others."""
        document = self.document(id, domain=domain)
        tags = (set(document.tags) | set(add)) - set(remove)
        self.describe(id, document.domain, metadata=document.metadata, tags=tags)

    def remove_document(self, id: str, *, domain: str | None = None) -> Document:
        """Remove a document: when this returns, no reader retrieves anything of it.

        Returns:
            What was removed.
        """
        document = self.document(id, domain=domain)
        self._remove([self._row(id, document.domain)])
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

    def save_settings(self, payload: Mapping[str, Any], domains: Sequence[str] = ()) -> None:
        """Save retrieval settings for exactly this set of domains."""
        with self._locked() as writer:
            writer.save_settings(domains, payload)

    def optimize(self) -> None:
        """Let the engine build its indexes and reclaim space."""
        with self._locked():
            if isinstance(self._datastore, SupportsOptimize):
                self._datastore.optimize()

    # -- parts

    def _remove(self, rows: Sequence[int]) -> None:
        with self._locked() as writer:
            writer.retire(rows)
            purge(writer, self._datastore, writer.unsettled())

    def _row(self, id: str, domain: str) -> int:
        found = self._catalog.versions(domain, [id])
        if id not in found:
            raise DocumentNotFoundError(f"no document {id!r} in domain {domain!r}")
        return found[id].row

    @contextmanager
    def _locked(self) -> Iterator[CatalogWriter]:
        if self._writer is None:
            raise ReadOnlyError(f"{self.home.path} was opened for reading; open it with mode 'a' to write")
        with self._writing:
            yield self._writer

    def _close_datastore(self) -> None:
        self._datastore.close()  # the one in use now, after a move another than the first

    def _recover(self, writer: CatalogWriter) -> None:
        """Settle what a killed writer left."""
        purge(writer, self._datastore, writer.unsettled())


def _open_datastore(home: Home, identity: Identity, engine: Engine, mode: DatastoreMode) -> Datastore:
    opened = registry.load(engine.adapter).open(
        home.resolve(engine.location),
        dim=identity.dim,
        metric=Metric(identity.metric),
        mode=mode,
        **engine.params,
    )
    if not opened.capabilities.persistent:
        opened.close()
        raise ConfigError(
            f"{engine.adapter} keeps nothing after the process ends, so a store cannot stand on it: "
            "choose another store, or use the adapter directly"
        )
    return opened
