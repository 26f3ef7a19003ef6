"""Cache of cells in memory between searches (`CellCache`).

A cell is a cluster of records whose keys are near each other.
"""

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
    """The r records of a cell (a cluster of near keys) in memory, without deleted and replaced records."""

    ids: Ids
    """Record ids, int64, shape (r,)."""

    keys: "Tensor"
    """Keys, decoded and rotated, float32, shape (r, width); for L2 minus the mean of the cell centers."""

    norms: "Tensor"
    """|key|² of each row of `keys`, float32, shape (r,)."""


class Sharer(Protocol):
    """Another cache whose memory counts towards the memory limit of a `CellCache`."""

    held: int
    """Number of bytes that this cache has in memory now."""

    def forget(self) -> None:
        """Remove everything from this cache, so that `held` becomes 0."""


class CellCache:
    """A cache of cells in memory that drops random cells when it is full.

    A cell is a cluster of records with near keys. Scoring reads all cells in turn, again and again. If the
    cache dropped the least recently used cell, a cache that is a little too small would never have a hit.

    Args:
        size: largest number of bytes of keys in memory, including the bytes in all sharers (other caches that
            use the same limit, see `add_sharer`).
    """

    size: int
    """Largest number of bytes of keys in memory."""

    def __init__(self, size: int) -> None:
        self.size, self._held = size, 0
        self._sharers = WeakSet[Sharer]()
        self._cells: dict[tuple[object, int], Cell] = {}
        self._names: list[tuple[object, int]] = []
        self._random = Random(0)  # noqa: S311  # not for secrets
        self._lock, self._growth_lock = RLock(), Lock()

    def get(self, owner: object, number: int, read: Callable[[int], Cell]) -> Cell:
        """Return a cell (the records of a cluster) from the cache. If it is not cached, it is read and added.

        Args:
            owner: object to which the cell belongs. Two owners may have different cells with the same number.
            number: number of the cell.
            read: function that reads a cell; it is called with `number` if the cell is not in the cache.
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
        """Count the memory of another cache towards the memory limit, as long as the other cache exists.

        The other cache must call `shrink` after it has grown, so that this cache drops cells (clusters of
        near keys).

        Args:
            sharer: the other cache; only a weak reference to it is kept.
        """
        with self._lock:
            self._sharers.add(sharer)

    @contextmanager
    def wait_to_grow(self) -> Iterator[None]:
        """Enter a ``with`` block in which the caller, a sharer, may use more memory.

        Sharers are the other caches that count towards the memory limit of this cache, see `add_sharer`. A
        second thread that calls the method waits until the block ends. If all sharers together exceed the
        limit at the beginning, all sharers are emptied first.
        """
        with self._growth_lock:
            with self._lock:
                sharers = list(self._sharers)
            if sum(sharer.held for sharer in sharers) > self.size:
                for sharer in sharers:
                    sharer.forget()
            yield

    def shrink(self) -> None:
        """Drop random cells until the cells and all sharers together are within the memory limit.

        Sharers are other caches with the same limit; they are not emptied. If they alone exceed the limit,
        all cells are dropped.
        """
        with self._lock:
            others = sum(sharer.held for sharer in self._sharers)
            while self._names and self._held + others > self.size:
                index = self._random.randrange(len(self._names))
                self._names[index], self._names[-1] = self._names[-1], self._names[index]
                self._held -= self._cells.pop(self._names.pop()).keys.nbytes

    def _add_cell(self, name: tuple[object, int], cell: Cell) -> None:
        """Add a cell, and drop random cells if the cache is full. The caller holds `_lock`.

        Args:
            name: owner and number of the cell.
            cell: the cell.
        """
        self._cells[name] = cell
        self._names.append(name)
        self._held += cell.keys.nbytes
        self.shrink()
