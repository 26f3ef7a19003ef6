"""Data classes that the catalog returns and accepts; they do not depend on SQL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAIR_MARK = "pair:"
"""Prefix of a tokenizer's fingerprint in a store of an encoder-decoder model, whose documents are pairs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Model and parameters for which a store was created. They never change.

    A model can use the store only if it matches these values.
    """

    model: str
    """Path or hub id from which the model is loaded."""
    model_fingerprint: str
    """Text by which the model is recognized: a hash, a colon, and a sample of the weights."""
    tokenizer_fingerprint: str
    """Hash by which the tokenizer is recognized. For an encoder-decoder model, the text begins with
    `PAIR_MARK`, and the languages of the tokenizer are hashed too."""
    key: str
    """Name of the layer or place in the model whose hidden states are the keys; it also says how several
    hidden states are joined to one key."""
    dim: int
    """Number of components of a key."""
    metric: str
    """Metric of the distances, ``"l2"`` or ``"ip"``."""
    vocab_size: int
    """Number of token ids of the model."""
    max_length: int
    """Number of tokens in a window (a part of a document that the model processes in one pass), with its
    prefix token."""
    stride: int
    """Number of tokens between the starts of successive windows of a long document."""
    has_prefix: bool = True
    """True if the model puts a prefix token before every document. Then the document's first token has a
    record too; otherwise it has none."""
    projection: str | None = None
    """File of the weights that project keys to `dim` components; None if keys are not projected."""

    @property
    def is_paired(self) -> bool:
        """True if documents are pairs of a source and a text, for an encoder-decoder model."""
        return self.tokenizer_fingerprint.startswith(PAIR_MARK)


KEYLESS = "none"
"""Value of `Engine.adapter` for a store that keeps no keys."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The vector engine that holds a store's keys: name of the adapter, location and parameters."""

    adapter: str
    """Name of the adapter (the class that connects knnstore to the engine); `KEYLESS` for no keys."""
    location: str
    """URL or directory; a relative directory is inside the store's folder."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the adapter, by name."""

    @property
    def is_keyless(self) -> bool:
        """True if the store keeps no keys, so that documents have no records; False if it keeps keys."""
        return self.adapter == KEYLESS


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A tokenized document that is to be stored."""

    id: str
    """Id that the user chose. A stored document of the domain with the same id is replaced."""
    domain: str
    """Name of the domain."""
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    tokens: NDArray[np.unsignedinteger[Any]]
    """Token ids, shape (n,)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata, JSON values by name."""
    tags: frozenset[str] = frozenset()
    """Tags (labels) of the document."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions that are reserved for documents whose keys other processes compute."""

    id: str
    """Random id of the lease."""
    start: int
    """First reserved position. A position is the number of a token in the store."""
    stop: int
    """Last reserved position plus one."""
    folder: str
    """Absolute path of the folder of the plan, on the machine that made the plan."""
    is_committed: bool
    """True if the documents were added already."""


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document that is being added or removed, with the positions in the store that its tokens have.

    A position is the number of a token in the store.
    """

    row: int
    """Primary key of the document in the catalog's database."""
    group: int
    """Primary key of its domain, which is also the group number of its records in the vector engine."""
    start: int
    """Position of the first token."""
    stop: int
    """Position of the last token plus one."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Fields of a stored document, for the comparison with a new document that has the same id."""

    row: int
    """Primary key of the document in the catalog's database."""
    start: int
    """Position of the document's first token in the store. It identifies this version of the document."""
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    metadata: Mapping[str, Any]
    """Metadata, JSON values by name."""
    tags: frozenset[str]
    """Tags (labels) of the document."""


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain (a named set of documents) with the totals of its documents.

    Documents that are not completely stored, or are removed, do not count.
    """

    name: str
    """Name of the domain."""
    documents: int
    """Number of documents."""
    tokens: int
    """Number of tokens."""
    records: int
    """Number of records (tokens stored with a key): one for each token that has a predecessor; 0 in a store
    without keys."""


@dataclass(frozen=True, slots=True)
class Document:
    """Description of a stored document, without its text."""

    id: str
    """Id that the user chose, unique in the domain."""
    domain: str
    """Name of the domain."""
    tokens: int
    """Number of tokens."""
    tags: tuple[str, ...]
    """Tags, sorted."""
    metadata: Mapping[str, Any]
    """Metadata, JSON values by name."""
    content_hash: str
    """SHA-256 of the text, hexadecimal."""
    added_at: str
    """Time when the document was added, ISO 8601, UTC."""


@dataclass(frozen=True)
class Snapshot:
    """All n stored documents at one revision (state of the store), sorted by position.

    A position is the number of a token in the store. The arrays are read-only, and index i of each array
    belongs to the i-th document.
    """

    revision: int
    """Number of the revision; it grows with every change of the store."""
    engine: Engine
    """The vector engine that holds the keys."""
    rows: NDArray[np.int64]
    """Primary keys of the documents in the catalog's database, shape (n,)."""
    groups: NDArray[np.int64]
    """Primary key of each document's domain, shape (n,). It is the group number of the document's records."""
    starts: NDArray[np.int64]
    """Position of each document's first token, shape (n,), ascending."""
    stops: NDArray[np.int64]
    """Position of each document's last token plus one, shape (n,)."""
    records: NDArray[np.int64]
    """Number of records (tokens with a vector key) of each document, shape (n,)."""
    domains: Mapping[str, int]
    """Primary keys of the domains that have a document, by name."""

    def documents_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the document to which the token at each position belongs.

        Args:
            positions: positions of tokens in the store, int64, any shape.

        Returns:
            Indices of documents in this snapshot's arrays, int64, in the shape of `positions`; -1 where the
            position belongs to no document, for example because the document was removed.
        """
        if not len(self.starts):
            return np.full(positions.shape, -1, np.int64)
        indices = np.searchsorted(self.starts, positions, side="right") - 1
        return np.where((indices >= 0) & (positions < self.stops[np.maximum(indices, 0)]), indices, -1)
