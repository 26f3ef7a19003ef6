"""Qdrant behind the `Datastore` protocol: a server, or Qdrant's engine in this process.

The engines' packages are imported when a location needs them; one of the two is enough.
"""

from importlib.util import find_spec

from knnstore_qdrant.datastore import QdrantDatastore

if find_spec("qdrant_client") is None and find_spec("qdrant_edge") is None:
    import qdrant_client  # noqa: F401  # raises, and so names what to install

__all__ = ["QdrantDatastore"]
