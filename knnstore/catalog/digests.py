"""Digests of the catalog's content. They detect flipped bits, which a database does not notice.

A digest is BLAKE2b with 16 bytes, in hexadecimal, and is stored in the catalog. A document has two digests.
The first covers its tokens and is checked at every read of the tokens. The second covers the document's
other fields and the first digest, so it also detects tokens that were swapped between two documents;
`knnstore verify` checks it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from knnstore.catalog.types import Identity

_NOT_HASHED = {"model"}
"""Identity fields left out of the digest: the path of the model may change."""


def digest_of_bytes(content: bytes) -> str:
    """Return the digest of bytes, for example of a document's tokens."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_values(*values: Any) -> str:
    """Return the digest of JSON values; the order of an object's keys does not matter."""
    read = json.loads(json.dumps(values))  # numeric keys become strings, as in the database
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
    """Return the digest of a store's identity, without the model's path, and of its engine's parameters."""
    hashed = {name: value for name, value in asdict(identity).items() if name not in _NOT_HASHED}
    return digest_of_values(hashed, dict(params))
