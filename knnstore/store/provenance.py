"""Provenance of retrieved records: the document of a record, the place in it, and the surrounding text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Snapshot
from knnstore.datastore import Ids, positions_from_ids, tokens_from_ids

if TYPE_CHECKING:
    from knnstore.catalog import Catalog

_MAX_CACHED = 1024

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The document that contains the token of a record, and the place of the token in it.

    A record is a stored token with its key.
    """

    document: str
    """Id of the document."""

    domain: str
    """Name of the document's domain."""

    position: int
    """Index of the token in the document, from 0."""

    token: int
    """Token id of the record."""

    context: Tokens
    """Token ids before the token, in the order of the text, uint32; at most as many as were requested."""

    continuation: Tokens
    """Token ids after the token, uint32; at most as many as were requested."""


class Tracer:
    """Finds the documents of records and the text around them. Caches the documents that were read last.

    Args:
        catalog: catalog from which the documents are read.
    """

    def __init__(self, catalog: "Catalog") -> None:
        self._catalog = catalog
        self._cached: dict[int, tuple[str, str, Tokens]] = {}

    def trace(self, ids: Ids, snapshot: Snapshot, *, before: int, after: int) -> list[Provenance | None]:
        """Return the document, the place and the surrounding tokens of each record.

        Args:
            ids: record ids, shape (n,).
            snapshot: documents of the store at one revision.
            before: largest number of tokens before a record's token.
            after: largest number of tokens after a record's token.

        Returns:
            A list of n entries. An entry is None for the id -1, and for a record whose document is not in the
            snapshot or was removed since.
        """
        positions = positions_from_ids(ids)
        document_indices = snapshot.documents_at(positions)
        documents = self._read_documents(
            np.unique(snapshot.rows[document_indices[document_indices >= 0]]).tolist()
        )
        places: list[Provenance | None] = []
        for position, token, index in zip(
            positions.tolist(), tokens_from_ids(ids).tolist(), document_indices.tolist(), strict=True
        ):
            document = None if index < 0 else documents.get(int(snapshot.rows[index]))
            if document is None:
                places.append(None)
                continue
            id, domain, tokens = document
            offset = position - int(snapshot.starts[index])
            places.append(
                Provenance(
                    document=id,
                    domain=domain,
                    position=offset,
                    token=token,
                    context=tokens[max(0, offset - before) : offset],
                    continuation=tokens[offset + 1 : offset + 1 + after],
                )
            )
        return places

    def _read_documents(self, rows: Sequence[int]) -> dict[int, tuple[str, str, Tokens]]:
        """Read id, domain and tokens of documents, from the cache or the catalog.

        Args:
            rows: primary keys of the documents in the catalog.

        Returns:
            A tuple (id, domain, tokens) for each document, by primary key. Removed documents are left out.
        """
        cached = self._cached
        missing = [row for row in rows if row not in cached]
        labels, texts = self._catalog.ids_and_domains(missing), dict(self._catalog.iterate_tokens(missing))
        read = {row: (*labels[row], texts[row]) for row in missing if row in labels and row in texts}
        documents = {row: cached.get(row) or read[row] for row in rows if row in cached or row in read}
        others = {row: document for row, document in cached.items() if row not in documents}
        self._cached = dict(list({**others, **documents}.items())[-_MAX_CACHED:])
        return documents
