"""What the catalog hands out and takes in, free of SQL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Identity:
    """What a store was made for; fixed at creation, and a model must match it."""

    model: str
    """Path or hub id of the model, to load it again."""
    model_fingerprint: str
    """A hash, a colon, and a sample of the weights."""
    tokenizer_fingerprint: str
    key: str
    """Where in the model the keys are taken, as a canonical location, and how states are joined."""
    dim: int
    metric: str
    vocab_size: int
    max_length: int
    """Tokens in a window, the prefix included."""
    stride: int
    """Tokens by which a window moves on."""
    has_prefix: bool = True
    """Whether a token comes before every document, so that its first token has a record too."""
    projection: str | None = None
    """File of the weights that project the keys to `dim` components; None keeps them as they are."""


KEYLESS = "none"
"""Stands in the place of an adapter's name where a store keeps no keys."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Which adapter holds the keys, and where."""

    adapter: str
    """Its name, or `KEYLESS`."""
    location: str
    """A URL, or a directory; a relative one is inside the store's home."""
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_keyless(self) -> bool:
        """Whether no keys are kept: documents have no records."""
        return self.adapter == KEYLESS


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document about to be stored."""

    id: str
    """The user's own id, unique within its domain."""
    domain: str
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    tokens: NDArray[np.unsignedinteger[Any]]
    """Its token ids, shape (n,)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A pending document with the positions that were allocated to it."""

    row: int
    """Its primary key in SQL."""
    group: int
    """Its domain's id."""
    start: int
    """The position of its first token."""
    stop: int


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The live version of a document, as far as deciding whether to store it anew needs."""

    row: int
    content_hash: str
    metadata: Mapping[str, Any]
    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain and what is live in it."""

    name: str
    documents: int
    tokens: int
    records: int
    """Number of records: one for each token that has a predecessor; 0 in a store without keys."""


@dataclass(frozen=True, slots=True)
class Document:
    """A live document."""

    id: str
    domain: str
    tokens: int
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]
    content_hash: str
    added_at: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Snapshot:
    """Which documents are live at one revision, sorted by position. The arrays are read-only."""

    revision: int
    engine: Engine
    rows: NDArray[np.int64]
    """Primary keys, shape (n,)."""
    groups: NDArray[np.int64]
    """Domain ids, shape (n,)."""
    starts: NDArray[np.int64]
    """First position of each document, shape (n,), ascending."""
    stops: NDArray[np.int64]
    records: NDArray[np.int64]
    """How many records each document has, shape (n,)."""
    domains: Mapping[str, int]
    """Id of each domain that has a live document, by name."""

    def documents_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which document holds each position.

        Args:
            positions: int64, any shape.

        Returns:
            Index into this snapshot's arrays, -1 where no live document holds the position.
        """
        if not len(self.starts):
            return np.full(positions.shape, -1, np.int64)
        at = np.searchsorted(self.starts, positions, side="right") - 1
        return np.where((at >= 0) & (positions < self.stops[np.maximum(at, 0)]), at, -1)
