"""Digests (checksums) of the catalog's content. They detect flipped bits, which a database does not notice.

A digest is BLAKE2b with 16 bytes, in hexadecimal, and is stored in the catalog. A document has two digests.
The first digest covers the tokens, and is checked whenever the tokens are read. The second digest covers the
document's other fields and the first digest, so it also detects tokens that were swapped between two
documents; `knnstore verify` checks the second digest.
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
    """Return the BLAKE2b digest (16 bytes) of some bytes as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_values(*values: Any) -> str:
    """Return the BLAKE2b digest of a sequence of JSON values as 32 hexadecimal digits.

    The order of the values matters; the order of the keys in an object does not. Numeric keys of objects
    count as strings.
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
    """Return the digest (checksum) of a document's fields as 32 hexadecimal digits.

    Args:
        id: id that the user gave the document.
        domain: name of the domain.
        start: position of the first token in the store.
        stop: position of the last token plus one.
        content_hash: SHA-256 of the text.
        metadata: metadata of the document, JSON values by name.
        tags: tags of the document, in any order.
        tokens: digest of the document's tokens, a result of `hash_bytes`.
    """
    return hash_values(id, domain, start, stop, content_hash, dict(metadata), sorted(tags), tokens)


def hash_store_identity(identity: Identity, params: Mapping[str, Any]) -> str:
    """Return the digest (checksum) of a store's identity and its engine's parameters, 32 hexadecimal digits.

    The path of the model is not included, because it may change.

    Args:
        identity: model and parameters of the store.
        params: parameters of the vector engine that holds the keys.
    """
    hashed = {name: value for name, value in asdict(identity).items() if name not in _NOT_HASHED}
    return hash_values(hashed, dict(params))
