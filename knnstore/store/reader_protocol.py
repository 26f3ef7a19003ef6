"""`Reader`: the methods of a store that a language model uses. They change nothing."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Domain, Identity
from knnstore.datastore import DeviceVisits, Ids, Keys, Neighbors, Visits
from knnstore.store.fitted import Lineage, SavedSettings, Weights
from knnstore.store.ngrams import Letters, NGramCounts, Overlap
from knnstore.store.provenance import Provenance, Tokens
from knnstore.store.selection import EVERYTHING, Selection

if TYPE_CHECKING:
    from knnstore.store.home import Home


class Records(NamedTuple):
    """A batch of n stored records: their ids and keys."""

    ids: Ids
    """Record ids, int64, shape (n,), ascending."""
    keys: Keys
    """Keys, float32, shape (n, dim)."""


class Reader(Protocol):
    """The reading methods of a store that a language model uses.

    A selection names the domains, tags and documents that a method uses; the default `EVERYTHING` selects all
    documents. A document's number is its primary key in the catalog. `StoreReader` implements the methods,
    and describes their exceptions.
    """

    home: "Home"
    """Folder of the store."""
    identity: Identity
    """Model and parameters for which the store was created."""

    def search(self, queries: Keys, k: int, selection: Selection = EVERYTHING) -> Neighbors:
        """Find the k nearest records of each query among the records of the selected documents.

        Args:
            queries: query vectors, float32, shape (q, dim).
            k: number of neighbors, >= 1.
            selection: documents whose records are searched.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. Missing neighbors have id -1 and
            distance +inf.
        """

    @property
    def is_keyless(self) -> bool:
        """True if the store has no keys, so that only n-grams of the stored text can be used."""

    @property
    def has_cells(self) -> bool:
        """True if the engine divides records into cells (clusters of near keys), so that `visit` works."""

    def visit(self, queries: Keys, probes: int, selection: Selection = EVERYTHING) -> list[Visits]:
        """Compute the distances of each query to all records of its nearest cells (clusters of near keys).

        Args:
            queries: query vectors, float32, shape (q, dim).
            probes: number of cells to search for each query, >= 1.
            selection: documents whose records are compared.

        Returns:
            A list of `Visits`: arrays with row numbers of queries, record ids and distances. Padding has
            number -1, id -1 and distance +inf.
        """

    def visit_on_device(
        self, queries: Any, probes: int, selection: Selection = EVERYTHING
    ) -> DeviceVisits | None:
        """Compute what `visit` computes, and leave the results on the device of the engine's keys.

        Args:
            queries: query vectors, a tensor of torch, float32, shape (q, dim), on any device.
            probes: number of cells to search for each query, >= 1.
            selection: documents whose records are compared.

        Returns:
            Distances and tokens of the records, without waiting for the device. None if `visit` has to be
            called.
        """

    def ngrams(self, selection: Selection = EVERYTHING) -> NGramCounts:
        """Return counts of all n-grams (series of tokens) of the selected documents; they are cached."""

    def provenance(self, ids: Ids, *, before: int = 16, after: int = 8) -> list[Provenance | None]:
        """Return document, position and surrounding tokens of records.

        Args:
            ids: record ids, shape (n,).
            before: largest number of tokens before a record's token.
            after: largest number of tokens after a record's token.

        Returns:
            A list of n entries; None for the id -1 and for a record whose document was removed.
        """

    def document_numbers(self, ids: Ids) -> NDArray[np.int64]:
        """Return the number of the document to which each record belongs, int64, in the shape of `ids`.

        The number is the document's primary key in the catalog; -1 where the document was removed, and for
        the id -1.
        """

    def revision(self) -> int:
        """Return the store's revision, a number that grows with every change that readers can see."""

    def domains(self) -> list[Domain]:
        """Return every domain with its numbers of documents, tokens and records, sorted by name."""

    def lengths(self, selection: Selection = EVERYTHING) -> dict[int, int]:
        """Return a dict from number (primary key) to the number of tokens, for each selected document."""

    def content_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return a dict from number (primary key) to the SHA-256 of the document's text.

        Removed documents are left out.
        """

    def metadata(self, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return a dict from number (primary key) to the document's metadata (JSON values by name).

        Removed documents are left out.
        """

    def tokens_by_number(self, number: int) -> Tokens:
        """Return the token ids of a document by its number (primary key in the catalog), uint32, shape (n,).

        Raises DocumentNotFoundError if the document was removed.
        """

    def records(
        self, selection: Selection = EVERYTHING, *, without: Collection[int] = (), batch_size: int = 8192
    ) -> Iterator[Records]:
        """Yield the records of the selected documents in batches, by ascending id.

        Args:
            selection: documents whose records are yielded.
            without: numbers of documents whose records are left out.
            batch_size: largest number of records in a batch, >= 1.
        """

    def record_count(self, selection: Selection = EVERYTHING) -> int:
        """Return the number of records of the selected documents."""

    def token_counts(self, selection: Selection = EVERYTHING) -> NDArray[np.int64]:
        """Return how often each token occurs in the selected documents, int64, shape (vocabulary,)."""

    def find_stored_hashes(self, hashes: Iterable[str], selection: Selection = EVERYTHING) -> set[str]:
        """Return the hashes that are the SHA-256 of a selected document's text; drop all other hashes.

        Args:
            hashes: SHA-256 hashes of texts.
            selection: documents whose texts are compared.
        """

    def measure_overlaps(
        self, texts: Sequence[Tokens], selection: Selection = EVERYTHING, letters: Letters | None = None
    ) -> list[Overlap]:
        """Measure for each text how much of it selected documents contain word for word.

        Args:
            texts: token ids of each text, uint32, shapes (n_i,).
            selection: documents to compare with.
            letters: converter of tokens to letters, so that letters are compared; None compares tokens.

        Returns:
            For each text an `Overlap`: the share of the text that the documents contain, from 0 to 1, and the
            SHA-256 of each document that counts as the same text.
        """

    def lineage(self, domains: Iterable[str] = ()) -> Lineage:
        """Return a lineage: a description of all documents that some domains have now.

        The method `removed_share` uses the lineage later to tell how many of the documents were removed or
        replaced.

        Args:
            domains: names of the domains; empty means the whole store.
        """

    def removed_share(self, lineage: Lineage) -> float:
        """Return the share (0 to 1) of documents that were removed or replaced since a lineage was made.

        Args:
            lineage: description of a set of documents, a result of the method `lineage`.
        """

    def settings(self, domains: Sequence[str] = ()) -> SavedSettings | None:
        """Return the retrieval settings that are saved for a set of domains; None if none are saved.

        Settings that are saved for a larger or smaller set are not returned.

        Args:
            domains: names of the domains; empty stands for the whole store.
        """

    def load_weights(self, name: str) -> Weights:
        """Read fitted weights from a file in the store's folder.

        Args:
            name: name of the file; saved settings name the files that they need.
        """
