"""Digests of what the catalog stores, kept with it: they tell flipped bits, which a database does not notice.

Each is BLAKE2b of 16 bytes, hexadecimal. A document has two. One is of its tokens and is checked whenever
they are read. The other is of everything else that says what the document is, and of the first, so tokens
that were exchanged with another document's are noticed; `knnstore verify` checks it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from knnstore.catalog.types import Identity

_NOT_HASHED = {"model"}
"""Where the model lies; whoever moves it says so."""


def digest_of_bytes(content: bytes) -> str:
    """Return the digest of bytes, as of a document's tokens."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_values(*values: Any) -> str:
    """Return the digest of JSON values; the order of an object's names does not count."""
    read = json.loads(json.dumps(values))  # names that are numbers become text, as in the database
    return digest_of_bytes(json.dumps(read, sort_keys=True).encode())


def digest_of_document(
    *,
    id: str,
    domain: str,
    start: int,
    stop: int,
    content_hash: str,
    metadata: Mapping[str, Any],
    tags: Iterable[str],
    tokens: str,
) -> str:
    """Return the digest of a document; `tokens` is the digest of its tokens."""
    return digest_of_values(id, domain, start, stop, content_hash, dict(metadata), sorted(tags), tokens)


def digest_of_store(identity: Identity, params: Mapping[str, Any]) -> str:
    """Return the digest of what a store was made for, and of its engine's parameters."""
    hashed = {name: value for name, value in asdict(identity).items() if name not in _NOT_HASHED}
    return digest_of_values(hashed, dict(params))
