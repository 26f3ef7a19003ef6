"""The cells adapter: a datastore whose records lie in cells, which queries visit as a whole."""

from knnstore_cells.datastore import CellsDatastore

__all__ = ["CellsDatastore"]
