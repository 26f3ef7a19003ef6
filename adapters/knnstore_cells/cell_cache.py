"""Cache of the cells that stay in memory between searches (`CellCache`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import Lock, RLock
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

from knnstore.datastore import Ids

if TYPE_CHECKING:  # listing and removing must not load torch
    from torch import Tensor


class Cell(NamedTuple):
    """The live records of a cell."""

    ids: Ids
    """Record ids, int64, shape (r,)."""

    keys: "Tensor"
    """Keys, float32, shape (r, dim); for L2 the group's middle is subtracted."""

    norms: "Tensor"
    """|key|² of each key, float32, shape (r,)."""


class Sharer(Protocol):
    """Another cache that shares the memory of a `CellCache`."""

    held: int
    """Number of bytes that the other cache holds."""

    def forget(self) -> None:
        """Drop everything that the other cache holds."""


class CellCache:
    """A cache of cells with random replacement.

    Scoring reads all cells in turn, again and again. If the least recently used cell were replaced, a cache
    that is a little too small would never have a hit.

    Args:
        size: maximum number of bytes of keys, including the bytes that all sharers hold.
    """

    size: int
    """Maximum number of bytes."""

    def __init__(self, size: int) -> None:
        self.size, self._held = size, 0
        self._sharers = WeakSet[Sharer]()
        self._cells: dict[tuple[object, int], Cell] = {}
        self._names: list[tuple[object, int]] = []
        self._random = Random(0)  # noqa: S311  # not for secrets
        self._lock, self._growth_lock = RLock(), Lock()

    def get(self, owner: object, number: int, read: Callable[[int], Cell]) -> Cell:
        """Return a cell from the cache, or read the cell and add it to the cache.

        Args:
            owner: object that the cell belongs to. Cells of different owners are different.
            number: number of the cell.
            read: reads the cell with a number.
        """
        name = owner, number
        cell = self._cells.get(name)
        if cell is None:
            cell = read(number)
            with self._lock:
                if name not in self._cells:
                    self._add_cell(name, cell)
        return cell

    def add_sharer(self, sharer: Sharer) -> None:
        """Share the memory with another cache, as long as the other cache exists.

        The other cache calls `shrink` after it has grown, so that cells are dropped here.
        """
        with self._lock:
            self._sharers.add(sharer)

    @contextmanager
    def wait_to_grow(self) -> Iterator[None]:
        """Let a sharer grow during the block; other sharers wait until the end of the block.

        If the sharers alone exceed the size of the cache, all sharers are emptied first.
        """
        with self._growth_lock:
            with self._lock:
                sharers = list(self._sharers)
            if sum(sharer.held for sharer in sharers) > self.size:
                for sharer in sharers:
                    sharer.forget()
            yield

    def shrink(self) -> None:
        """Drop random cells until the cells and all sharers together fit into the size of the cache."""
        with self._lock:
            others = sum(sharer.held for sharer in self._sharers)
            while self._names and self._held + others > self.size:
                index = self._random.randrange(len(self._names))
                self._names[index], self._names[-1] = self._names[-1], self._names[index]
                self._held -= self._cells.pop(self._names.pop()).keys.nbytes

    def _add_cell(self, name: tuple[object, int], cell: Cell) -> None:
        """Add a cell, and drop random cells if the cache is full. The caller holds the lock."""
        self._cells[name] = cell
        self._names.append(name)
        self._held += cell.keys.nbytes
        self.shrink()
