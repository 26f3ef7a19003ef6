"""Make the checked-in database of a schema: run once, when the schema is released.

    python tests/catalog/assets/make.py tests/catalog/assets/0001.db

Later packages must be able to upgrade every file made so, and use it.
"""

import hashlib
import sqlite3
import sys

import numpy as np

from knnstore.catalog import Catalog, CatalogWriter, Engine, Identity, NewDocument, parse_url

IDENTITY = Identity("gpt2", "a" * 64, "b" * 64, "ffn_input:11", 768, "l2", 50257, 1024, 512)


def document(id: str, domain: str, tokens: int, *tags: str) -> NewDocument:
    content = hashlib.sha256(id.encode()).hexdigest()
    values = np.arange(tokens, dtype=np.uint32)
    return NewDocument(id, domain, content, values, {"title": f"On {id}"}, frozenset(tags))


def main(path: str) -> None:
    catalog = Catalog.create(parse_url(f"sqlite:///{path}"), IDENTITY, Engine("faiss", "keys", {"m": 8}))
    writer = CatalogWriter(catalog)
    documents = [document("a", "law", 3, "x", "y"), document("b", "law", 4), document("c", "tax", 5, "x")]
    a, b, c = (placed.row for placed in writer.insert_pending_documents(documents))
    writer.make_documents_live([a, b, c])
    writer.mark_as_deleting([b])
    writer.insert_pending_documents([document("pending", "tax", 6)])
    writer.save_settings([], {"k": 64})
    writer.save_settings(["law"], {"k": 8})
    catalog.close()
    with sqlite3.connect(path) as connection:  # one file, without a log beside it
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
