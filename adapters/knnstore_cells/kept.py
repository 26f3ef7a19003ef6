"""The cells that stay in memory between searches."""

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
    """Another cache that shares the room of `KeptCells`."""

    held: int
    """Number of bytes that it holds."""

    def forget(self) -> None:
        """Drop everything."""


class KeptCells:
    """A cache of cells with random replacement.

    Scoring visits all cells in turn, again and again. If the least recently used cell was replaced, a cache
    that is a little too small would never have a hit.

    Args:
        size: maximum number of bytes, of keys and of all sharers together.
    """

    size: int
    """Maximum number of bytes."""

    def __init__(self, size: int) -> None:
        self.size, self._held = size, 0
        self._sharers = WeakSet[Sharer]()
        self._cells: dict[tuple[object, int], Cell] = {}
        self._names: list[tuple[object, int]] = []
        self._random = Random(0)  # noqa: S311  # not for secrets
        self._lock, self._turns = RLock(), Lock()

    def get(self, owner: object, number: int, read: Callable[[int], Cell]) -> Cell:
        """Return the cell of an owner with a number; `read` reads it if it is not in the cache."""
        name = owner, number
        cell = self._cells.get(name)
        if cell is None:
            cell = read(number)
            with self._lock:
                if name not in self._cells:
                    self._keep(name, cell)
        return cell

    def share(self, sharer: Sharer) -> None:
        """Share the room with another cache while it exists. Cells are dropped when it needs room."""
        with self._lock:
            self._sharers.add(sharer)

    @contextmanager
    def scanning(self) -> Iterator[None]:
        """Allow one sharer at a time to grow. If the sharers alone exceed the room, all are emptied first."""
        with self._turns:
            with self._lock:
                sharers = list(self._sharers)
            if sum(sharer.held for sharer in sharers) > self.size:
                for sharer in sharers:
                    sharer.forget()
            yield

    def shrink(self) -> None:
        """Drop cells until all caches fit into the room."""
        with self._lock:
            others = sum(sharer.held for sharer in self._sharers)
            while self._names and self._held + others > self.size:
                at = self._random.randrange(len(self._names))
                self._names[at], self._names[-1] = self._names[-1], self._names[at]
                self._held -= self._cells.pop(self._names.pop()).keys.nbytes

    def _keep(self, name: tuple[object, int], cell: Cell) -> None:
        """Add a cell, and drop others if there is no room."""
        self._cells[name] = cell
        self._names.append(name)
        self._held += cell.keys.nbytes
        self.shrink()
