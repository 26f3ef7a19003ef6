"""Cells behind the `Datastore` protocol: records that are summed over, and searched, cell by cell."""

from knnstore_cells.datastore import CellsDatastore

__all__ = ["CellsDatastore"]
