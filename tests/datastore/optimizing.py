"""Engines that use their index from the first search on, however few the records.

The processes that the conformance kit starts import the class by its name. Here they load the engine alone,
without pytest, and without torch, which takes a second and is first used when cells are searched.
"""

from knnstore_cells import CellsDatastore
from knnstore_faiss import FaissDatastore
from knnstore_hnswlib import HnswlibDatastore

from knnstore.datastore import Filter, Keys, Neighbors
from knnstore.datastore.embedded import EmbeddedDatastore


class _OptimizesFirst(EmbeddedDatastore):
    """Builds its index before each search of an open writer."""

    def search(self, queries: Keys, k: int, *, where: Filter | None = None) -> Neighbors:
        if self._segments._lock is not None and not self._segments._closed:
            self.optimize()
        return super().search(queries, k, where=where)


class OptimizingCells(_OptimizesFirst, CellsDatastore):
    """Arranges its records in cells."""


class OptimizingFaiss(_OptimizesFirst, FaissDatastore):
    """Searches through inverted files."""


class OptimizingHnswlib(_OptimizesFirst, HnswlibDatastore):
    """Searches through graphs."""
