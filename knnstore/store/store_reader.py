"""Reading a store: search, provenance, and lists of documents and domains."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import (
    Catalog,
    Difference,
    Document,
    Domain,
    Identity,
    Lease,
    StoredVersion,
    find_other_ids,
)
from knnstore.datastore import Datastore, DeviceVisits, Ids, Keys, Neighbors, Visits
from knnstore.documents import PAIR_FIELDS, TextDocument
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
    """The reading methods of a store: search, text, provenance, and lists of documents and domains.

    A selection names the domains, tags and documents that a method uses; the default `EVERYTHING` selects all
    documents. A document's number is its primary key in the catalog. Removed documents are never used.

    Args:
        home: folder of the store.
        catalog: open catalog of the store.
        view: function that returns the view, which has the store's documents at the latest revision.
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
        """Return the view: the documents and the datastore at the latest revision (state of the store)."""
        self._last_view = view = self._current_view()
        return view

    @property
    def datastore(self) -> Datastore:
        """The open datastore of the store's keys. After a move of the keys, it is another object."""
        return self.view().datastore

    @property
    def is_keyless(self) -> bool:
        """True if the store has no keys, so that only n-grams of the stored text can be used."""
        return self.view().snapshot.engine.is_keyless

    def search(self, queries: Keys, k: int, selection: Selection = EVERYTHING) -> Neighbors:
        """Find the k nearest records of each query among the records of the selected documents.

        Args:
            queries: query vectors, float32, shape (q, dim).
            k: number of neighbors, >= 1.
            selection: documents whose records are searched.

        Returns:
            Record ids (`tokens_from_ids` returns their tokens) and distances, each of shape (q, k), nearest
            first. If the selection has fewer than k records, each missing neighbor has id -1 and distance
            +inf.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            CorruptDatastoreError: if the datastore has lost its records.
            StoreUnavailableError: if other processes change the store again and again during the search.
        """
        return self._read_at_one_revision(lambda view: view.search(queries, k, selection))

    @property
    def has_cells(self) -> bool:
        """True if the engine divides records into cells (clusters of near keys), so that `visit` works."""
        return self.view().has_cells

    def visit(self, queries: Keys, probes: int, selection: Selection = EVERYTHING) -> list[Visits]:
        """Compute the distances of each query to all records of its nearest cells (clusters of near keys).

        Args:
            queries: query vectors, float32, shape (q, dim).
            probes: number of cells to search for each query, >= 1. Cells without a selected record do not
                count.
            selection: documents whose records are compared.

        Returns:
            A list of `Visits`: arrays with row numbers of queries, record ids and distances. Padding has
            number -1, id -1 and distance +inf. A pair of a query and a record occurs at most once.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            CorruptDatastoreError: if the datastore has lost its records.
            StoreUnavailableError: if other processes change the store again and again during the call.
        """
        return self._read_at_one_revision(lambda view: view.visit(queries, probes, selection))

    def visit_on_device(
        self, queries: Any, probes: int, selection: Selection = EVERYTHING
    ) -> DeviceVisits | None:
        """Compute what `visit` computes, and leave the results on the device of the engine's keys.

        Args:
            queries: query vectors, a tensor of torch, float32, shape (q, dim), on any device. They are not
                checked.
            probes: number of cells to search for each query, >= 1. Cells without a selected record do not
                count.
            selection: documents whose records are compared.

        Returns:
            Distances and tokens of the records, without waiting for the device. None if `visit` has to be
            called: the engine's keys are not on the device of the queries, nothing is selected, or there are
            too many queries or records.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            StoreUnavailableError: if other processes change the store again and again during the call.
        """
        return self._read_at_one_revision(lambda view: view.visit_on_device(queries, probes, selection))

    def ngrams(self, selection: Selection = EVERYTHING) -> NGramCounts:
        """Return counts of all n-grams (series of tokens) of the selected documents.

        The counts are cached, and counted again if the selected documents change.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            ConfigError: if the domains have more text than can be counted together.
            StoreUnavailableError: if selected documents are removed again and again during counting.
        """
        counts = self._counting.get_latest_counts(self.view, selection, _SEARCH_ATTEMPTS)
        if counts is None:
            raise StoreUnavailableError(
                f"the store was changed during each of {_SEARCH_ATTEMPTS} attempts to count n-grams; try "
                "again"
            )
        return counts

    def count_ngrams_in_background(self) -> None:
        """Start a background thread that counts the n-grams of added documents.

        From now on, `ngrams` returns cached counts at once, even if they lack documents that were added
        since. Then the thread, or `recount_changed_ngrams`, counts again. Removed documents are never in the
        counts. Servers use this method, so that no request waits for counting. `close` ends the thread.
        """
        self._counting.count_in_background()

    def recount_changed_ngrams(self) -> None:
        """Count again, in this thread, the n-grams of each cached selection whose documents have changed.

        Errors are logged, not raised.
        """
        self._counting.recount_changed(self.view)

    def provenance(self, ids: Ids, *, before: int = 16, after: int = 8) -> list[Provenance | None]:
        """Return document, position and surrounding tokens of records.

        Args:
            ids: record ids, for example of a search, shape (n,).
            before: largest number of tokens before each record's token.
            after: largest number of tokens after each record's token.

        Returns:
            A list of n entries. An entry is None for the id -1, and for a record whose document was removed.
        """
        return self._tracer.trace(ids, self.view().snapshot, before=before, after=after)

    def document_numbers(self, ids: Ids) -> NDArray[np.int64]:
        """Return the number of the document to which each record belongs, int64, in the shape of `ids`.

        The number is the document's primary key in the catalog; -1 where the document was removed, and for
        the id -1.
        """
        return self.view().document_numbers(ids)

    def domains(self) -> list[Domain]:
        """Return every domain with its numbers of documents, tokens and records, sorted by name."""
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
        """List documents that match all arguments, in the order in which they were added.

        Unknown names give an empty list.

        Args:
            domain: list only documents of this domain; None allows all domains.
            domains: list only documents of these domains; an empty list gives no documents, None allows all
                domains.
            id: list only documents with this id, which several domains may have; None allows all ids.
            tag: list only documents with this tag; None allows documents with any tags or none.
            offset: number of documents to skip; ignored if `limit` is None.
            limit: largest number of documents; None returns all.
        """
        return self._catalog.documents(
            domain=domain, domains=domains, id=id, tag=tag, offset=offset, limit=limit
        )

    def select(self, selection: Selection) -> list[Document]:
        """Return descriptions of the selected documents, in the order in which they were added."""
        return list(self._catalog.documents_by_row(self.view().document_rows(selection)).values())

    def document(self, id: str, *, domain: str | None = None) -> Document:
        """Return the description of one document.

        Args:
            id: id of the document.
            domain: name of the document's domain; None searches all domains.

        Raises:
            DocumentNotFoundError: if no document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        matches = self._catalog.documents(id=id, domain=domain)
        if not matches:
            where = "" if domain is None else f" in domain {domain!r}"
            domain_names = sorted(self.view().snapshot.domains)
            if domain not in (None, *domain_names):
                where += f", which does not exist; the domains are: {', '.join(domain_names) or 'none'}"
            raise DocumentNotFoundError(f"no document {id!r}{where}")
        if len(matches) > 1:
            names = ", ".join(document.domain for document in matches)
            raise AmbiguousDocumentError(f"document {id!r} is in several domains, name one: {names}")
        return matches[0]

    def tokens(self, id: str, *, domain: str | None = None) -> Tokens:
        """Return the token ids of a document, uint32, shape (n,).

        Args:
            id: id of the document.
            domain: name of the document's domain; None searches all domains.

        Raises:
            DocumentNotFoundError: if no document has this id.
            AmbiguousDocumentError: if several domains have a document with this id, and `domain` is None.
        """
        document = self.document(id, domain=domain)
        for row in self._catalog.rows(id=id, domain=document.domain):
            return self.tokens_by_number(row)
        raise DocumentNotFoundError(f"document {id!r} was just removed")

    def stored_versions(self, domain: str, ids: Iterable[str]) -> dict[str, StoredVersion]:
        """Return the stored versions of documents, to compare them with documents to add.

        Args:
            domain: name of the domain; an unknown domain gives an empty result.
            ids: ids of the documents. Ids that the domain does not have are left out of the result.

        Returns:
            Primary key, SHA-256 of the text, metadata and tags of each stored document, by id.
        """
        return self._catalog.stored_versions(domain, ids)

    def difference(
        self,
        domain: str,
        documents: Iterable[TextDocument],
        tags: Iterable[str],
        kept: Collection[str] = (),
    ) -> Difference:
        """Return the changes that would make a domain equal to a list of documents. Changes nothing.

        Args:
            domain: name of the domain; an unknown domain counts as a domain without documents.
            documents: documents that the domain should have.
            tags: tags that each document should carry; additional tags of stored documents are no change.
            kept: ids of further documents that the domain should have as they are stored.
        """
        if self.identity.is_paired:
            documents = (TextDocument.from_row(document, PAIR_FIELDS) for document in documents)
        return Difference.compute(self._catalog, domain, documents, frozenset(tags), kept)

    def find_ids_by_content(self, domain: str, ids: Mapping[str, str]) -> dict[str, str]:
        """Find documents whose text a domain has stored under another id.

        Args:
            domain: name of the domain to search.
            ids: id of each document, by the SHA-256 of its text.

        Returns:
            For each id in `ids` whose text was found, the id under which the text is stored.
        """
        return find_other_ids(self._catalog, domain, ids)

    def find_stored_hashes(self, hashes: Iterable[str], selection: Selection = EVERYTHING) -> set[str]:
        """Return the hashes that are the SHA-256 of a selected document's text; drop all other hashes.

        Args:
            hashes: SHA-256 hashes of texts.
            selection: documents whose texts are compared.
        """
        return self.view().find_stored_hashes(hashes, selection)

    def measure_overlaps(
        self, texts: Sequence[Tokens], selection: Selection = EVERYTHING, letters: Letters | None = None
    ) -> list[Overlap]:
        """Measure for each text how much of it selected documents contain word for word, at any place.

        Args:
            texts: token ids of each text, uint32, shapes (n_i,).
            selection: documents to compare with; all their tokens are read.
            letters: converter of tokens to letters, so that letters are compared; None compares tokens.

        Returns:
            For each text an `Overlap`: the share of the text that the documents contain, from 0 to 1, and the
            SHA-256 of each document that counts as the same text.
        """
        return self.view().measure_overlaps(texts, selection, letters)

    def token_counts(self, selection: Selection = EVERYTHING) -> NDArray[np.int64]:
        """Return how often each token occurs in the selected documents, int64, shape (vocabulary,)."""
        return self.view().token_counts(selection, self.identity.vocab_size)

    def has_unsettled_documents(self) -> bool:
        """Return True if any document is half added or half removed, because a writer runs or was killed."""
        return bool(self._catalog.unsettled_documents())

    @property
    def id(self) -> str:
        """Random id that the store got when it was created; a copy of its folder has the same id."""
        return self._catalog.store_id

    def leases(self) -> list[Lease]:
        """Return the leases of the store, the newest first.

        A lease reserves positions for documents whose keys other processes compute.
        """
        return self._catalog.leases()

    def withdrawn_ids(self, lease: Lease, domain: str) -> set[str]:
        """Return the ids of documents that were removed or renamed after an open lease was made.

        Args:
            lease: the lease; a committed lease gives an empty set.
            domain: name of the domain.
        """
        return self._catalog.withdrawn_ids(lease.id, domain)

    def revision(self) -> int:
        """Return the store's revision, a number that grows with every change that readers can see."""
        return self._catalog.revision()

    def lengths(self, selection: Selection = EVERYTHING) -> dict[int, int]:
        """Return a dict from document number to the number of tokens, for each selected document.

        The number is the document's primary key in the catalog. The documents are in the order in which they
        were added.
        """
        return self.view().lengths(selection)

    def content_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return a dict from number (primary key) to the SHA-256 of the document's text.

        Removed documents are left out.
        """
        return self._catalog.content_hashes(numbers)

    def metadata(self, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return a dict from number (primary key) to the document's metadata (JSON values by name).

        Removed documents are left out.
        """
        return self._catalog.metadata(numbers)

    def tokens_by_number(self, number: int) -> Tokens:
        """Return the token ids of a document by its number, uint32, shape (n,).

        Args:
            number: number of the document, as `lengths` and `document_numbers` return it.

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
        """Yield the records (ids and keys) of the selected documents in batches, by ascending id.

        Args:
            selection: documents whose records are yielded.
            without: numbers of documents whose records are left out.
            batch_size: largest number of records in a batch, >= 1.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
        """
        return self.view().records(selection, without, batch_size)

    def lineage(self, domains: Iterable[str] = ()) -> Lineage:
        """Return a lineage: a description of all documents that some domains have now.

        The method `removed_share` uses the lineage later to tell how many of the documents were removed or
        replaced.

        Args:
            domains: names of the domains; empty means the whole store.
        """
        return Lineage.from_snapshot(self.view().snapshot, domains)

    def removed_share(self, lineage: Lineage) -> float:
        """Return the share (0 to 1) of documents that were removed or replaced since a lineage was made.

        Args:
            lineage: description of a set of documents, a result of the method `lineage`.
        """
        return lineage.removed_share(self.view().snapshot)

    def record_count(self, selection: Selection = EVERYTHING) -> int:
        """Return the number of records of the selected documents. The catalog gives it, not the datastore.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
        """
        return self.view().build_scope(selection).records

    def settings(self, domains: Sequence[str] = ()) -> SavedSettings | None:
        """Return the retrieval settings that are saved for a set of domains; None if none are saved.

        Settings that are saved for a larger or smaller set are not returned.

        Args:
            domains: names of the domains, in any order; empty stands for the whole store.
        """
        payload = self._catalog.settings(domains)
        return None if payload is None else SavedSettings.from_payload(payload)

    def load_weights(self, name: str) -> Weights:
        """Read fitted weights from a file in the store's folder.

        Args:
            name: name of the file, as saved settings contain it.

        Raises:
            ConfigError: if `name` is not the name of a file of weights.
            CorruptWeightsError: if the file is missing or damaged.
        """
        return load_weights(self.home.weights, name)

    def _read_at_one_revision(self, read: Callable[[View], Found]) -> Found:
        """Call a function with a view of the store, and call it again if the store changed during the call.

        Args:
            read: function that is called with a view (the documents and the datastore at one revision).

        Returns:
            The result of the first call during which the store did not change.

        Raises:
            StoreUnavailableError: if the store changed during each of `_SEARCH_ATTEMPTS` calls.
            KnnstoreError: if the function raised the error and the store did not change during the call.
        """
        view = self._last_view or self.view()  # asked once, afterwards, whether it is the latest
        for _ in range(_SEARCH_ATTEMPTS):
            try:
                result = read(view)
            except KnnstoreError:
                if self._catalog.revision() == view.snapshot.revision:
                    raise
            else:
                # A commit may have removed what the view still counts on. None has no record.
                if result is None or self._catalog.revision() == view.snapshot.revision:
                    return result
            view = self.view()
        raise StoreUnavailableError(
            f"the store was changed during each of {_SEARCH_ATTEMPTS} attempts to search it; try again"
        )
