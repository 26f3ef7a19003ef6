"""What of the keys is damaged, and whose: parts that an engine gives up, keys unlike their checksum."""

from knnstore.store.soundness.checksums import Checksums, checking, checksum, precision_of, sums_of, taking
from knnstore.store.soundness.damage import (
    abandon_unneeded,
    check_undamaged,
    damaged_parts,
    named,
    naming_damage,
    reading_on,
)

__all__ = [
    "Checksums",
    "abandon_unneeded",
    "check_undamaged",
    "checking",
    "checksum",
    "damaged_parts",
    "named",
    "naming_damage",
    "precision_of",
    "reading_on",
    "sums_of",
    "taking",
]
