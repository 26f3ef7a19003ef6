"""Cells that are kept ready between searches."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from knnstore.datastore import Ids

if TYPE_CHECKING:  # what only lists or removes need not wait for torch
    from torch import Tensor


class Cell(NamedTuple):
    """The live records of a cell."""

    ids: Ids
    """Shape (r,)."""
    keys: "Tensor"
    """Float32, shape (r, dim); relative to the cell's center where distances are squared differences."""
    norms: "Tensor"
    """|key|² of each, shape (r,)."""


class KeptCells:
    """Cells that were read a moment ago, as many as have room.

    Args:
        size: bytes of keys to keep at most.
    """

    def __init__(self, size: int) -> None:
        self._size, self._held = size, 0
        self._cells: OrderedDict[tuple[object, int], Cell] = OrderedDict()
        self._lock = Lock()

    def get(self, owner: object, number: int, read: Callable[[int], Cell]) -> Cell:
        """A cell by whose it is and its number; it is read if it is not here."""
        name = owner, number
        with self._lock:
            if name in self._cells:
                self._cells.move_to_end(name)
                return self._cells[name]
        cell = read(number)
        with self._lock:
            if name not in self._cells:
                self._cells[name] = cell
                self._held += cell.keys.nbytes
            while self._held > self._size:
                self._held -= self._cells.popitem(last=False)[1].keys.nbytes
        return cell
