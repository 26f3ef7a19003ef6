"""Damaged keys and their documents: parts that an engine sets aside, and keys that differ from checksums."""

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
