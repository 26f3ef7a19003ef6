"""The FAISS adapter: keys in a folder, searched with inverted files."""

from knnstore_faiss.faiss_datastore import FaissDatastore

__all__ = ["FaissDatastore"]
