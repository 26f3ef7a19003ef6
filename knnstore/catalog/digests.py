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


def hash_bytes(content: bytes) -> str:
    """Return the BLAKE2b digest of bytes, for example of a document's tokens: 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_values(*values: Any) -> str:
    """Return the digest of JSON values; the order of the values matters, that of an object's keys does not.

    Numeric keys of objects count as strings.
    """
    normalized_values = json.loads(json.dumps(values))  # numeric keys become strings, as in the database
    return hash_bytes(json.dumps(normalized_values, sort_keys=True).encode())


def hash_document_fields(
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
    """Return the digest of a document's fields; the order of the tags does not matter.

    Args:
        id: external id.
        domain: name of the domain.
        start: position of the first token.
        stop: position after the last token.
        content_hash: SHA-256 of the text.
        metadata: metadata.
        tags: tags.
        tokens: digest of the document's tokens.
    """
    return hash_values(id, domain, start, stop, content_hash, dict(metadata), sorted(tags), tokens)


def hash_store_identity(identity: Identity, params: Mapping[str, Any]) -> str:
    """Return the digest of a store's identity, without the model's path, and of its engine's parameters."""
    hashed = {name: value for name, value in asdict(identity).items() if name not in _NOT_HASHED}
    return hash_values(hashed, dict(params))
