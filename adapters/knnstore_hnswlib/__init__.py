"""The hnswlib adapter: keys in a folder, searched with graphs."""

from knnstore_hnswlib.hnswlib_datastore import HnswlibDatastore

__all__ = ["HnswlibDatastore"]
