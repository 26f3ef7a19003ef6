"""Where a retrieved token comes from."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import Ids, positions_of, tokens_of

_DOCUMENTS_KEPT = 256

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
    """The tokens before it, the nearest last, shape (<= before,)."""

    continuation: Tokens
    """The tokens after it, shape (<= after,)."""


class Tracer:
    """Finds the provenance of records; remembers the documents read last."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._document = lru_cache(_DOCUMENTS_KEPT)(self._read)

    def trace(self, ids: Ids, snapshot: Snapshot, *, before: int, after: int) -> list[Provenance | None]:
        """The place of each record in the documents of a snapshot; see `StoreReader.provenance`."""
        positions = positions_of(ids)
        found = snapshot.documents_at(positions)
        places: list[Provenance | None] = []
        for position, token, at in zip(
            positions.tolist(), tokens_of(ids).tolist(), found.tolist(), strict=True
        ):
            document = None if at < 0 else self._document(int(snapshot.rows[at]))
            if document is None:
                places.append(None)
                continue
            id, domain, tokens = document
            offset = position - int(snapshot.starts[at])
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

    def _read(self, row: int) -> tuple[str, str, Tokens] | None:
        labels, tokens = self._catalog.labels([row]), self._catalog.tokens(row)
        return None if tokens is None or row not in labels else (*labels[row], tokens)
