"""Who owns the keys at a place: the claim written beside the keys, and how a store compares it with itself.

A claim names a store and the catalog that wrote it. A copy of a home has the same store id, so the store id
alone proves nothing. The catalog's numbers do: a copied file has another inode, a restored database other
numbers.
"""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Self

from knnstore.catalog import Catalog, identify_file


class KeyOwner(Enum):
    """Owner of the keys that a store finds at a place."""

    THIS_STORE = auto()
    """This store. It may write the keys, and claim them if they were copied together with its home."""
    NOBODY = auto()
    """No store has claimed the keys, and this store may.

    They are in its home, empty, or kept by an adapter without claims."""
    OTHER_COPY = auto()
    """Another copy of this store: its original or its duplicate. Also if the owner cannot be determined."""
    OTHER_STORE = auto()
    """A store with another id."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A store as the owner of keys; also what a claim says."""

    store_id: str
    database: str = ""
    """Numbers that distinguish the catalog's database from a copy; see `Catalog.database`.

    Empty in a claim that an older knnstore wrote for keys inside a home.
    """
    shown: str = ""
    """Place of the database, for messages."""

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """Return the owner that a store with this catalog is."""
        return cls(catalog.store_id, *catalog.database())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a claim that `str` wrote."""
        store_id, _, rest = text.partition(" ")
        database, _, shown = rest.partition(" ")
        return cls(store_id, database, shown)

    def __str__(self) -> str:
        return f"{self.store_id} {self.database} {self.shown}".rstrip()

    def wrote(self, claim: Self) -> bool:
        """Check whether this very catalog wrote a claim; a copy of the catalog did not.

        File systems number files independently. So a catalog that is where the claim says, with the claim's
        numbers but on another device, is the one that wrote it.
        """
        if (claim.store_id, claim.database) != (self.store_id, self.database) or not self.database:
            return False
        if "://" in claim.shown or claim.shown == self.shown:
            return True
        try:
            theirs, ours = Path(claim.shown), Path(self.shown)
            return theirs.samefile(ours) or identify_file(theirs) != claim.database
        except (OSError, ValueError):  # moved, or not ours to look at
            return True
