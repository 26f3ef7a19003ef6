"""The owner of keys: the claim that a store writes beside its keys, and how a store recognizes its claim.

A claim is a line of text that names a store and the database of its catalog. A copy of a store's folder has
the same store id, so the store id alone does not identify the owner. The claim also has an identifier of the
catalog's database, which differs in a copy: a copied file has another inode number, and a restored database
has other numbers.
"""

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Self

from knnstore.catalog import Catalog, identify_file


class KeyOwner(Enum):
    """Owner of the keys at a location: this store, nobody, another copy of this store, or another store."""

    THIS_STORE = auto()
    """The keys belong to this store, which may write them. This includes keys that were copied together with
    the store's folder."""
    NOBODY = auto()
    """No store has claimed the keys, and this store may claim them. They are in this store's folder or at a
    URL, or there are no records, or the adapter cannot save claims."""
    OTHER_COPY = auto()
    """The keys belong to another copy of this store, for example to the original from which this store's
    folder was copied. Also the result if the owner cannot be determined."""
    OTHER_STORE = auto()
    """The keys belong to a store with another id."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A store as the owner of keys. ``str(owner)`` is the claim that the store writes beside its keys."""

    store_id: str
    """Id of the store, which copies of the store share."""
    database: str = ""
    """Identifier of the catalog's database, which a copy of the database does not share.

    Empty in a claim that an older knnstore wrote for keys inside the store's folder.
    """
    shown: str = ""
    """Location of the catalog's database: the absolute path of a SQLite file, or a URL without password."""

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        """Return the owner that stands for the store of a catalog."""
        return cls(catalog.store_id, *catalog.database())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a claim, which `str(owner)` has made. Missing parts become empty strings."""
        store_id, _, rest = text.partition(" ")
        database, _, shown = rest.partition(" ")
        return cls(store_id, database, shown)

    def __str__(self) -> str:
        return f"{self.store_id} {self.database} {self.shown}".rstrip()

    def has_written(self, claim: Self) -> bool:
        """Check whether this store has written a claim (a text beside keys that names their owner).

        The claim must have the store id and the database identifier of this store. Inode numbers of two file
        systems may be equal by chance. So the result is also False if the claim names another SQLite file
        that exists and has the same identifier: that file's store has written the claim.

        Args:
            claim: the claim that was found beside the keys.
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
