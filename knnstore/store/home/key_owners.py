"""Owner of the keys at a place: the claim that a store writes next to its keys, and its comparison.

A claim names a store and the catalog that wrote the claim. A copy of a home has the same store id, so the
store id alone proves nothing. The catalog's numbers do: a copied file has another inode, a restored database
other numbers.
"""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Self

from knnstore.catalog import Catalog, identify_file


class KeyOwner(Enum):
    """Owner of the keys that a store finds at a place."""

    THIS_STORE = auto()
    """This store. It may write the keys. It may also claim keys that were copied together with its folder."""
    NOBODY = auto()
    """No store has claimed the keys, and this store may claim them: they are in its folder, there are no
    records, or the adapter cannot save claims."""
    OTHER_COPY = auto()
    """Another copy of this store, for example its original. Also used if the owner cannot be determined."""
    OTHER_STORE = auto()
    """A store with another id."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A store as the owner of keys. This is also the content of a claim."""

    store_id: str
    database: str = ""
    """Numbers that distinguish the catalog's database from a copy; see `Catalog.database`.

    Empty in a claim that an older knnstore wrote for keys inside a home.
    """
    shown: str = ""
    """Place of the database, for messages."""

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """Return the owner that represents the store with this catalog."""
        return cls(catalog.store_id, *catalog.database())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a claim, as `str` of an owner returns. Missing parts are empty."""
        store_id, _, rest = text.partition(" ")
        database, _, shown = rest.partition(" ")
        return cls(store_id, database, shown)

    def __str__(self) -> str:
        return f"{self.store_id} {self.database} {self.shown}".rstrip()

    def has_written(self, claim: Self) -> bool:
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
