"""Reading a store: search, provenance, and lists of documents and domains."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Difference, Document, Domain, Identity, StoredVersion, find_other_ids
from knnstore.datastore import Datastore, Ids, Keys, Neighbors, Visits
from knnstore.documents import TextDocument
from knnstore.errors import (
    AmbiguousDocumentError,
    DocumentNotFoundError,
    KnnstoreError,
    StoreUnavailableError,
)
from knnstore.store.counting import Counting
from knnstore.store.fitted import Lineage, SavedSettings, Weights, load_weights
from knnstore.store.home import Home
from knnstore.store.ngrams import Letters, NGramCounts, Overlap
from knnstore.store.provenance import Provenance, Tokens, Tracer
from knnstore.store.reader_protocol import Records
from knnstore.store.selection import EVERYTHING, Selection
from knnstore.store.view import View

_SEARCH_ATTEMPTS = 20  # a commit takes longer than a search: so many in a row are not overtaken

Found = TypeVar("Found")


class StoreReader:
    """Reading methods of a store.

    Args:
        home: folder of the store.
        catalog: the open catalog.
        view: returns the view of the latest revision, with the live documents.
    """

    def __init__(self, home: Home, catalog: Catalog, view: Callable[[], View]) -> None:
        self.home = home
        self.identity: Identity = catalog.identity
        self._catalog = catalog
        self._current_view = view
        self._last_view: View | None = None
        self._tracer = Tracer(catalog)
        self._counting = Counting(self.identity.vocab_size)

    def view(self) -> View:
        """Return the view of the latest revision."""
        self._last_view = view = self._current_view()
        return view

    @property
    def datastore(self) -> Datastore:
        """The open datastore. After a move it is another object."""
        return self.view().datastore

    @property
    def is_keyless(self) -> bool:
        """True if the store has no keys: only the n-grams of the text are used."""
        return self.view().snapshot.engine.is_keyless

    def search(self, queries: Keys, k: int, selection: Selection = EVERYTHING) -> Neighbors:
        """Find the k nearest live records of each query.

        Args:
            queries: float32, shape (q, dim).
            k: number of neighbors, >= 1.
            selection: documents whose records are searched.

        Returns:
            Record ids (see `tokens_of`) and distances, shape (q, k), nearest first. If a query has fewer
            matching records, the rest has id -1 and distance +inf.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            CorruptDatastoreError: if the datastore has lost its records.
            StoreUnavailableError: if other processes commit again and again during the search.
        """
        return self._read_at_one_revision(lambda view: view.search(queries, k, selection))

    @property
    def has_cells(self) -> bool:
        """True if the engine has cells, so that `visit` works."""
        return self.view().has_cells

    def visit(self, queries: Keys, probes: int, selection: Selection = EVERYTHING) -> list[Visits]:
        """Compute the distance of each query to every live record of its nearest cells. Raises as `search`.

        Args:
            queries: float32, shape (q, dim).
            probes: number of cells that are read for each query, >= 1; see `SupportsCells.visit`.
            selection: documents whose records are read.

        Returns:
            Visits: arrays of record ids and distances for groups of queries. Each pair of a query and a
                record occurs at most once.
        """
        return self._read_at_one_revision(lambda view: view.visit(queries, probes, selection))

    def ngrams(self, selection: Selection = EVERYTHING) -> NGramCounts:
        """Count the n-grams of the selected documents, or return the cached counts.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            ConfigError: if the domains have more text than can be counted together.
            StoreUnavailableError: if selected documents are removed again and again meanwhile.
        """
        counts = self._counting.get_latest(self.view, selection, _SEARCH_ATTEMPTS)
        if counts is None:
            raise StoreUnavailableError(
                f"each of {_SEARCH_ATTEMPTS} searches was overtaken by a commit; try again"
            )
        return counts

    def count_ngrams_in_background(self) -> None:
        """Start a background thread that counts the n-grams of added documents.

        From now on `ngrams` returns cached counts at once, also if they lack documents that were added since.
        The thread, or `catch_up_ngrams`, then counts again. Removed documents are never in the counts. This
        is for servers, whose other requests would wait. `close` ends the thread.
        """
        self._counting.count_in_background()

    def catch_up_ngrams(self) -> None:
        """Count the n-grams of each cached selection with changed documents again, in this thread."""
        self._counting.catch_up(self.view)

    def provenance(self, ids: Ids, *, before: int = 16, after: int = 8) -> list[Provenance | None]:
        """Return the documents and the surrounding text of retrieved records.

        Args:
            ids: record ids of any search, shape (n,).
            before: largest number of tokens before each record's token.
            after: largest number of tokens after each record's token.

        Returns:
            A list of n entries; None for the id -1 and for records whose document was removed since.
        """
        return self._tracer.trace(ids, self.view().snapshot, before=before, after=after)

    def holders(self, ids: Ids) -> NDArray[np.int64]:
        """Return the number of each record's document, as in `lengths`; -1 if the document is not live."""
        return self.view().holders(ids)

    def domains(self) -> list[Domain]:
        """Return every domain with its numbers of documents and tokens, by name."""
        return self._catalog.domains()

    def documents(
        self,
        *,
        domain: str | None = None,
        domains: Sequence[str] | None = None,
        id: str | None = None,
        tag: str | None = None,
        offset: int = 0,
        limit: int | None = None,
    ) -> list[Document]:
        """List live documents in the order in which they were added.

        Args:
            domain: list only documents of this domain; None lists all domains.
            domains: list only documents of these domains; an empty list gives no documents.
            id: list only documents with this id; several domains may have one.
            tag: list only documents with this tag.
            offset: number of documents to skip.
            limit: largest number of documents; None returns all.
        """
        return self._catalog.documents(
            domain=domain, domains=domains, id=id, tag=tag, offset=offset, limit=limit
        )

    def select(self, selection: Selection) -> list[Document]:
        """Return descriptions of the selected documents, in the order in which they were added."""
        return list(self._catalog.documents_of(self.view().rows(selection)).values())

    def document(self, id: str, *, domain: str | None = None) -> Document:
        """Return the description of one document.

        Args:
            id: id of the document.
            domain: domain of the document; None searches all domains.

        Raises:
            DocumentNotFoundError: if no live document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        matches = self._catalog.documents(id=id, domain=domain)
        if not matches:
            where = "" if domain is None else f" in domain {domain!r}"
            domain_names = sorted(self.view().snapshot.domains)
            if domain not in (None, *domain_names):
                where += f", which is not there; there are: {', '.join(domain_names) or 'none'}"
            raise DocumentNotFoundError(f"no document {id!r}{where}")
        if len(matches) > 1:
            names = ", ".join(document.domain for document in matches)
            raise AmbiguousDocumentError(f"document {id!r} is in several domains, name one: {names}")
        return matches[0]

    def tokens(self, id: str, *, domain: str | None = None) -> Tokens:
        """Return the tokens of a document, uint32, shape (n,). Raises the errors of `document`."""
        document = self.document(id, domain=domain)
        for row in self._catalog.rows(id=id, domain=document.domain):
            return self.text(row)
        raise DocumentNotFoundError(f"document {id!r} was just removed")

    def versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """Return the live versions of documents of a domain, by id, for comparison with documents to add."""
        return self._catalog.versions(domain, ids)

    def difference(self, domain: str, documents: Iterable[TextDocument], tags: Iterable[str]) -> Difference:
        """Return the changes that would make a domain equal to some documents with these tags.

        The domain need not exist.
        """
        return Difference.of(self._catalog, domain, documents, frozenset(tags))

    def other_ids(self, domain: str, ids: Mapping[str, str]) -> dict[str, str]:
        """Find documents whose text a domain has stored under another id.

        Args:
            domain: domain to search.
            ids: ids of the documents by their content hash.

        Returns:
            The stored id by the id in `ids`, for each document that was found.
        """
        return find_other_ids(self._catalog, domain, ids)

    def stored_content(self, hashes: Iterable[str], selection: Selection = EVERYTHING) -> set[str]:
        """Return the content hashes among these that belong to a live document of the selection."""
        return self.view().content(hashes, selection)

    def overlaps(
        self, texts: Sequence[Tokens], selection: Selection = EVERYTHING, letters: Letters | None = None
    ) -> list[Overlap]:
        """Return the parts of each text that selected documents contain word for word, at any place.

        Args:
            texts: tokens of each text, uint32, shape (n,).
            selection: documents to compare with; all their tokens are read.
            letters: letters of each token. If given, letters are compared and not tokens.
        """
        return self.view().overlaps(texts, selection, letters)

    def token_counts(self, selection: Selection = EVERYTHING) -> NDArray[np.int64]:
        """Return how often each token occurs in the selected documents, int64, shape (v,)."""
        return self.view().token_counts(selection, self.identity.vocab_size)

    def has_unsettled_documents(self) -> bool:
        """Check whether documents are partly added or removed, because a writer runs or was killed."""
        return bool(self._catalog.unsettled())

    @property
    def id(self) -> str:
        """Random id that the store got when it was created; a copy of its folder has the same id."""
        return self._catalog.store_id

    def revision(self) -> int:
        """Return the revision, which grows with every change that readers can see."""
        return self._catalog.revision()

    def lengths(self, selection: Selection = EVERYTHING) -> dict[int, int]:
        """Return the token count of each selected document by its number, in the order of adding."""
        return self.view().lengths(selection)

    def content_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the content hashes of documents by their numbers; removed documents are left out."""
        return self._catalog.content_hashes(numbers)

    def text(self, number: int) -> Tokens:
        """Return the tokens of a document by its number, uint32, shape (n,).

        Raises:
            DocumentNotFoundError: if the document was removed.
        """
        tokens = self._catalog.tokens(number)
        if tokens is None:
            raise DocumentNotFoundError(f"document number {number} was removed")
        return tokens

    def records(
        self, selection: Selection = EVERYTHING, *, without: Collection[int] = (), batch_size: int = 8192
    ) -> Iterator[Records]:
        """Yield the records of the selected documents in batches, by ascending id. Raises as `search`.

        Args:
            selection: the documents.
            without: numbers of documents whose records are left out.
            batch_size: largest number of records of a batch, >= 1.
        """
        return self.view().records(selection, without, batch_size)

    def lineage(self, domains: Iterable[str] = ()) -> Lineage:
        """Return a `Lineage` of all documents that domains, or the whole store, hold now; see `gone`."""
        return Lineage.of(self.view().snapshot, domains)

    def gone(self, lineage: Lineage) -> float:
        """Return the share of a lineage's documents that were removed or replaced since; 0 if none was."""
        return lineage.gone(self.view().snapshot)

    def record_count(self, selection: Selection = EVERYTHING) -> int:
        """Return the number of live records that a search can find. Raises the errors of `search`."""
        return self.view().scope(selection).records

    def settings(self, domains: Sequence[str] = ()) -> SavedSettings | None:
        """Return the settings that are saved for exactly this set of domains; None if there are none."""
        payload = self._catalog.settings(domains)
        return None if payload is None else SavedSettings.of_payload(payload)

    def load_weights(self, name: str) -> Weights:
        """Read fitted weights that settings name.

        Raises:
            ConfigError: if this is not the name of a file of weights.
            CorruptWeightsError: if the file is missing or damaged.
        """
        return load_weights(self.home.weights, name)

    def _read_at_one_revision(self, read: Callable[[View], Found]) -> Found:
        """Call `read` with a view, and again if a commit came meanwhile; return the result.

        Raises StoreUnavailableError if each of `_SEARCH_ATTEMPTS` calls was overtaken by a commit.
        """
        view = self._last_view or self.view()  # asked once, afterwards, whether it is the latest
        for _ in range(_SEARCH_ATTEMPTS):
            try:
                result = read(view)
            except KnnstoreError:
                if self._catalog.revision() == view.snapshot.revision:
                    raise
            else:
                # A commit may have removed what the view still counts on.
                if self._catalog.revision() == view.snapshot.revision:
                    return result
            view = self.view()
        raise StoreUnavailableError(
            f"each of {_SEARCH_ATTEMPTS} searches was overtaken by a commit; try again"
        )
