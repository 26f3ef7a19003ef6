"""hnswlib behind the `Datastore` protocol."""

from knnstore_hnswlib.datastore import HnswlibDatastore

__all__ = ["HnswlibDatastore"]
