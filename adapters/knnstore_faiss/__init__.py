"""FAISS behind the `Datastore` protocol."""

from knnstore_faiss.datastore import FaissDatastore

__all__ = ["FaissDatastore"]
