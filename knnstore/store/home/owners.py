"""Whose keys are these: what is written beside them, and what it means to a store that finds it."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self

from knnstore.catalog import Catalog


class Whose(Enum):
    """Whose keys a store finds at a place."""

    OURS = auto()
    NOBODYS = auto()
    """Of an older knnstore, of an adapter that remembers no owner, or none are there."""
    A_COPYS = auto()
    """Of a store that this one is a copy of, or that is a copy of this one."""
    ANOTHERS = auto()


@dataclass(frozen=True, slots=True)
class Owner:
    """A store as the owner of keys.

    A copied store has the same id, so keys that were not copied with it know its database as well.
    """

    store_id: str
    database: str = ""
    """See `Catalog.database`; empty for keys inside a home, which are copied with it."""
    shown: str = ""
    """Where the database is."""

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """The owner that a catalog makes a store."""
        return cls(catalog.store_id, *catalog.database())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gave."""
        store_id, _, rest = text.partition(" ")
        database, _, shown = rest.partition(" ")
        return cls(store_id, database, shown)

    def __str__(self) -> str:
        return f"{self.store_id} {self.database} {self.shown}".rstrip()

    def inside(self) -> Self:
        """The same for keys inside its home."""
        return replace(self, database="", shown="")

    def whose(self, found: Self | None) -> Whose:
        """Whose keys these are, by what is written beside them."""
        if found is None:
            return Whose.NOBODYS
        if found.store_id != self.store_id:
            return Whose.ANOTHERS
        same = not (found.database and self.database) or found.database == self.database
        return Whose.OURS if same else Whose.A_COPYS
