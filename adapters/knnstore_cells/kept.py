"""Cells that are kept ready between searches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import Lock, RLock
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

from knnstore.datastore import Ids

if TYPE_CHECKING:  # what only lists or removes need not wait for torch
    from torch import Tensor


class Cell(NamedTuple):
    """The live records of a cell."""

    ids: Ids
    """Shape (r,)."""
    keys: "Tensor"
    """Float32, shape (r, dim); relative to the middle of its group but for inner products."""
    norms: "Tensor"
    """|key|² of each, shape (r,)."""


class Sharer(Protocol):
    """What keeps cells in a form of its own."""

    held: int
    """Bytes."""

    def forget(self) -> None:
        """Keep nothing."""


class KeptCells:
    """Cells that were read before, as many as have room; which one goes for another is left to chance.

    Scoring visits all cells in turn, again and again. Were the one to go that was used longest ago, none
    would be found where there is room for nearly all.

    Args:
        size: bytes to keep at most, of keys and of what sharers keep.
    """

    size: int
    """Bytes to keep at most."""

    def __init__(self, size: int) -> None:
        self.size, self._held = size, 0
        self._sharers = WeakSet[Sharer]()
        self._cells: dict[tuple[object, int], Cell] = {}
        self._names: list[tuple[object, int]] = []
        self._random = Random(0)  # noqa: S311  # no secret
        self._lock, self._turns = RLock(), Lock()

    def get(self, owner: object, number: int, read: Callable[[int], Cell]) -> Cell:
        """A cell by whose it is and its number; it is read if it is not here."""
        name = owner, number
        cell = self._cells.get(name)
        if cell is None:
            cell = read(number)
            with self._lock:
                if name not in self._cells:
                    self._keep(name, cell)
        return cell

    def share(self, sharer: Sharer) -> None:
        """Count what another keeps, as long as there is one; cells here give way to it."""
        with self._lock:
            self._sharers.add(sharer)

    @contextmanager
    def scanning(self) -> Iterator[None]:
        """Let one sharer at a time keep more; before it all forget theirs where that alone fills the room."""
        with self._turns:
            with self._lock:
                sharers = list(self._sharers)
            if sum(sharer.held for sharer in sharers) > self.size:
                for sharer in sharers:
                    sharer.forget()
            yield

    def shrink(self) -> None:
        """Let cells go until what is kept has room."""
        with self._lock:
            others = sum(sharer.held for sharer in self._sharers)
            while self._names and self._held + others > self.size:
                at = self._random.randrange(len(self._names))
                self._names[at], self._names[-1] = self._names[-1], self._names[at]
                self._held -= self._cells.pop(self._names.pop()).keys.nbytes

    def _keep(self, name: tuple[object, int], cell: Cell) -> None:
        self._cells[name] = cell
        self._names.append(name)
        self._held += cell.keys.nbytes
        self.shrink()
