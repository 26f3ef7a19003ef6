"""Provenance of retrieved records: document, position and surrounding text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Snapshot
from knnstore.datastore import Ids, positions_of, tokens_of

if TYPE_CHECKING:
    from knnstore.catalog import Catalog

_MAX_CACHED = 1024

Tokens = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place of one record in its document."""

    document: str
    """The document's id."""

    domain: str

    position: int
    """Index of the token in the document, from 0."""

    token: int
    """The token that the record predicts."""

    context: Tokens
    """Up to `before` tokens before the token, in the order of the text."""

    continuation: Tokens
    """Up to `after` tokens after the token."""


class Tracer:
    """Finds the document and the surrounding text of records; caches the documents read last."""

    def __init__(self, catalog: "Catalog") -> None:
        self._catalog = catalog
        self._cached: dict[int, tuple[str, str, Tokens]] = {}

    def trace(self, ids: Ids, snapshot: Snapshot, *, before: int, after: int) -> list[Provenance | None]:
        """Return the document and place of each record in a snapshot.

        None for the id -1 and for records of documents that are not in the snapshot or were just removed.
        """
        positions = positions_of(ids)
        document_indices = snapshot.documents_at(positions)
        documents = self._read_documents(
            np.unique(snapshot.rows[document_indices[document_indices >= 0]]).tolist()
        )
        places: list[Provenance | None] = []
        for position, token, index in zip(
            positions.tolist(), tokens_of(ids).tolist(), document_indices.tolist(), strict=True
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
        """Return id, domain and tokens of documents by primary key; removed documents are left out."""
        cached = self._cached
        missing = [row for row in rows if row not in cached]
        labels, texts = self._catalog.labels(missing), dict(self._catalog.texts(missing))
        read = {row: (*labels[row], texts[row]) for row in missing if row in labels and row in texts}
        documents = {row: cached.get(row) or read[row] for row in rows if row in cached or row in read}
        others = {row: document for row, document in cached.items() if row not in documents}
        self._cached = dict(list({**others, **documents}.items())[-_MAX_CACHED:])
        return documents
