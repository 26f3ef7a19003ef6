"""The cells adapter: a datastore that compares a query with all records of its nearest cells."""

from knnstore_cells.datastore import CellsDatastore

__all__ = ["CellsDatastore"]
