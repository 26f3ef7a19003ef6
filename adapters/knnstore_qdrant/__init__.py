"""The Qdrant adapter: vectors in a collection on a Qdrant server, behind the `Datastore` protocol."""

from knnstore_qdrant.qdrant_datastore import QdrantDatastore

__all__ = ["QdrantDatastore"]
