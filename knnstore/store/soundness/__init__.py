"""Damage of keys: damaged parts (files) of an engine, and keys that differ from their checksums.

The functions find the documents to which lost records and altered keys belong.
"""

from knnstore.store.soundness.checksums import (
    Checksums,
    checksum,
    compute_key_crcs,
    get_checksum_precision,
    make_checksum_checker,
    make_checksum_computer,
)
from knnstore.store.soundness.damage import (
    abandon_unneeded,
    check_undamaged,
    format_document_names,
    list_damaged_parts,
    name_damaged_documents,
    retry_past_damage,
)

__all__ = [
    "Checksums",
    "abandon_unneeded",
    "check_undamaged",
    "checksum",
    "compute_key_crcs",
    "format_document_names",
    "get_checksum_precision",
    "list_damaged_parts",
    "make_checksum_checker",
    "make_checksum_computer",
    "name_damaged_documents",
    "retry_past_damage",
]
