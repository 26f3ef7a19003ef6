"""Where a retrieved token comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Snapshot
from knnstore.datastore import Ids, positions_of, tokens_of

if TYPE_CHECKING:
    from knnstore.catalog import Catalog

_DOCUMENTS_KEPT = 1024

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

    def __init__(self, catalog: "Catalog") -> None:
        self._catalog = catalog
        self._kept: dict[int, tuple[str, str, Tokens]] = {}

    def trace(self, ids: Ids, snapshot: Snapshot, *, before: int, after: int) -> list[Provenance | None]:
        """Return the document and place of each record in a snapshot; see `StoreReader.provenance`."""
        positions = positions_of(ids)
        found = snapshot.documents_at(positions)
        documents = self._read(np.unique(snapshot.rows[found[found >= 0]]).tolist())
        places: list[Provenance | None] = []
        for position, token, at in zip(
            positions.tolist(), tokens_of(ids).tolist(), found.tolist(), strict=True
        ):
            document = None if at < 0 else documents.get(int(snapshot.rows[at]))
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

    def _read(self, rows: Sequence[int]) -> dict[int, tuple[str, str, Tokens]]:
        """Ids, domains and tokens of those documents that are still there."""
        kept = self._kept
        missing = [row for row in rows if row not in kept]
        labels, texts = self._catalog.labels(missing), dict(self._catalog.texts(missing))
        read = {row: (*labels[row], texts[row]) for row in missing if row in labels and row in texts}
        found = {row: kept.get(row) or read[row] for row in rows if row in kept or row in read}
        others = {row: document for row, document in kept.items() if row not in found}
        self._kept = dict(list({**others, **found}.items())[-_DOCUMENTS_KEPT:])
        return found
