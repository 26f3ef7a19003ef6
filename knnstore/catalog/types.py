"""Data classes that the catalog returns and accepts; they do not depend on SQL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Identity:
    """Model and parameters that a store was created for. Never changes; a model must match it."""

    model: str
    """Path or hub id from which the model is loaded."""
    model_fingerprint: str
    """A hash, a colon, and a sample of the weights."""
    tokenizer_fingerprint: str
    key: str
    """Canonical location in the model where keys are taken, and how several hidden states are joined."""
    dim: int
    """Number of components of a key."""
    metric: str
    vocab_size: int
    max_length: int
    """Number of tokens in a window, including the prefix."""
    stride: int
    """Number of tokens between the starts of successive windows."""
    has_prefix: bool = True
    """True if a prefix token precedes every document, so that the document's first token has a record."""
    projection: str | None = None
    """File of the weights that project keys to `dim` components; None if keys are not projected."""


KEYLESS = "none"
"""Value of `Engine.adapter` for a store that keeps no keys."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Adapter that holds the keys, with its location and parameters."""

    adapter: str
    """Name of the adapter, or `KEYLESS`."""
    location: str
    """URL or directory; a relative directory is inside the store's folder."""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_keyless(self) -> bool:
        """True if the store keeps no keys, so that documents have no records."""
        return self.adapter == KEYLESS


@dataclass(frozen=True, slots=True)
class NewDocument:
    """Document to store."""

    id: str
    """External id, chosen by the user; unique among the live documents of a domain."""
    domain: str
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    tokens: NDArray[np.unsignedinteger[Any]]
    """Token ids, shape (n,)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """Document that is pending or deleting, with the token positions that are allocated to it."""

    row: int
    """Primary key in SQL."""
    group: int
    """Id of the domain."""
    start: int
    """Position of the first token."""
    stop: int
    """Position after the last token."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Fields of a live document that decide whether a document with the same id replaces it."""

    row: int
    content_hash: str
    metadata: Mapping[str, Any]
    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Domain:
    """Domain with the totals of its live documents."""

    name: str
    documents: int
    tokens: int
    records: int
    """Number of records: one for each token that has a predecessor; 0 in a store without keys."""


@dataclass(frozen=True, slots=True)
class Document:
    """Live document."""

    id: str
    """External id."""
    domain: str
    tokens: int
    """Number of tokens."""
    tags: tuple[str, ...]
    """Tags, sorted."""
    metadata: Mapping[str, Any]
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    added_at: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Snapshot:
    """Documents that are live at one revision, sorted by position. The arrays are read-only."""

    revision: int
    engine: Engine
    rows: NDArray[np.int64]
    """Primary keys, shape (n,)."""
    groups: NDArray[np.int64]
    """Domain ids, shape (n,)."""
    starts: NDArray[np.int64]
    """First position of each document, shape (n,), ascending."""
    stops: NDArray[np.int64]
    """Position after the last token of each document, shape (n,)."""
    records: NDArray[np.int64]
    """Number of records of each document, shape (n,)."""
    domains: Mapping[str, int]
    """Ids of the domains that have a live document, by name."""

    def documents_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the document that contains each position.

        Args:
            positions: int64, any shape.

        Returns:
            Indices into this snapshot's arrays, int64, same shape as `positions`; -1 where no live document
            contains the position.
        """
        if not len(self.starts):
            return np.full(positions.shape, -1, np.int64)
        indices = np.searchsorted(self.starts, positions, side="right") - 1
        return np.where((indices >= 0) & (positions < self.stops[np.maximum(indices, 0)]), indices, -1)
