"""`Reader`: the methods of a store that a language model uses, all for reading."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Domain, Identity
from knnstore.datastore import Ids, Keys, Neighbors, Visits
from knnstore.store.fitted import Lineage, SavedSettings, Weights
from knnstore.store.ngrams import Letters, NGramCounts, Overlap
from knnstore.store.provenance import Provenance, Tokens
from knnstore.store.selection import EVERYTHING, Selection

if TYPE_CHECKING:
    from knnstore.store.home import Home


class Records(NamedTuple):
    """Stored records: ids and keys."""

    ids: Ids
    """Shape (n,), ascending."""
    keys: Keys
    """Float32, shape (n, dim)."""


class Reader(Protocol):
    """Reading methods of a store. `StoreReader` describes the arguments and exceptions of each method."""

    home: "Home"
    identity: Identity

    def search(self, queries: Keys, k: int, selection: Selection = EVERYTHING) -> Neighbors:
        """Find the k nearest live records of each query."""

    @property
    def is_keyless(self) -> bool:
        """True if the store has no keys: only the n-grams of the text are used."""

    @property
    def has_cells(self) -> bool:
        """True if the engine has cells, so that `visit` works."""

    def visit(self, queries: Keys, probes: int, selection: Selection = EVERYTHING) -> list[Visits]:
        """Compute the distances of each query to all live records of the cells nearest to the query."""

    def ngrams(self, selection: Selection = EVERYTHING) -> NGramCounts:
        """Count the n-grams of the selected documents."""

    def provenance(self, ids: Ids, *, before: int = 16, after: int = 8) -> list[Provenance | None]:
        """Return document, position and surrounding tokens of records; None for removed documents."""

    def holders(self, ids: Ids) -> NDArray[np.int64]:
        """Return the document number of each record, shaped as `ids`; -1 if the document is not live."""

    def revision(self) -> int:
        """Return the revision, a number that grows with every change that readers can see."""

    def domains(self) -> list[Domain]:
        """Return every domain with its numbers of documents and tokens, by name."""

    def lengths(self, selection: Selection = EVERYTHING) -> dict[int, int]:
        """Return the token count of each selected document, by the document's number."""

    def content_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the content hashes of documents by their numbers; removed documents are left out."""

    def text(self, number: int) -> Tokens:
        """Return the tokens of a document by its number. Raises DocumentNotFoundError if it was removed."""

    def records(
        self, selection: Selection = EVERYTHING, *, without: Collection[int] = (), batch_size: int = 8192
    ) -> Iterator[Records]:
        """Yield the records of the selected documents in batches, without some documents."""

    def record_count(self, selection: Selection = EVERYTHING) -> int:
        """Return the number of live records that a search in the selected documents can find."""

    def token_counts(self, selection: Selection = EVERYTHING) -> NDArray[np.int64]:
        """Return how often each token of the vocabulary occurs in the selected documents."""

    def stored_content(self, hashes: Iterable[str], selection: Selection = EVERYTHING) -> set[str]:
        """Return the content hashes among these that belong to a live document of the selection."""

    def overlaps(
        self, texts: Sequence[Tokens], selection: Selection = EVERYTHING, letters: Letters | None = None
    ) -> list[Overlap]:
        """Return the parts of each text that selected documents contain word for word."""

    def lineage(self, domains: Iterable[str] = ()) -> Lineage:
        """Return a `Lineage` of the documents that domains hold now, to detect later that one is removed."""

    def gone(self, lineage: Lineage) -> float:
        """Return the share of a lineage's documents that were removed or replaced since, 0 to 1."""

    def settings(self, domains: Sequence[str] = ()) -> SavedSettings | None:
        """Return the settings that are saved for exactly this set of domains; None if there are none."""

    def load_weights(self, name: str) -> Weights:
        """Read fitted weights by the file name in saved settings."""
