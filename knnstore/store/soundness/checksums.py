"""Checksums of keys, kept in the catalog for engines that check none of what they store.

There is one for each document: its positions are a block that is stored, removed and named as one. It is the
SHA-256 of the CRC-32 of every key, by position. An engine may round keys to half precision. Then the
checksum is of keys so rounded: what the engine was given and what it gives back have the same.
"""

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Snapshot
from knnstore.datastore import Capabilities, Ids, Keys, positions_of

Sums = NDArray[np.uint32]
"""The CRC-32 of the key at each position, 0 where no record is."""

_PRECISIONS = ("float16", "float32")
_NONE: Sums = np.zeros(0, np.uint32)


def get_checksum_precision(engine: Capabilities) -> str | None:
    """Return the precision of the checksums of an engine's keys; None if the engine checks them itself."""
    if engine.checks_keys:
        return None
    return "float32" if engine.exact_keys else "float16"


def compute_key_crcs(keys: Keys, precision: str) -> Sums:
    """Return the CRC-32 of each key."""
    with np.errstate(over="ignore"):  # what is too large for half precision is infinite, given and read
        rounded = np.ascontiguousarray(keys, np.dtype(precision).newbyteorder("<"))
    return np.fromiter(map(zlib.crc32, rounded + rounded.dtype.type(0)), np.uint32, len(rounded))  # no -0


def checksum(sums: Sums, precision: str) -> str:
    """Return the checksum of a document."""
    return f"{precision}:{hashlib.sha256(sums.astype('<u4').tobytes()).hexdigest()}"


class Checksums:
    """Computes the checksums of documents of a snapshot from their records by ascending id.

    Args:
        snapshot: the documents.
        precisions: precision of each document's checksum, by primary key; other documents are skipped.
    """

    def __init__(self, snapshot: Snapshot, precisions: Mapping[int, str]) -> None:
        self._snapshot = snapshot
        self._precisions = precisions
        self._found: dict[int, str] = {}
        self._document = -1
        self._sums = _NONE

    def add(self, ids: Ids, keys: Keys) -> None:
        """Take in the next records, those of other documents included."""
        if not self._precisions:
            return
        positions = positions_of(ids)
        at = self._snapshot.documents_at(positions)
        bounds = np.flatnonzero(np.diff(at, prepend=-2, append=-2))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            document = int(at[first])
            precision = self._precisions.get(int(self._snapshot.rows[document])) if document >= 0 else None
            if precision is None:
                continue
            start = int(self._snapshot.starts[document])
            if document != self._document:
                self._finish()
                self._document = document
                self._sums = np.zeros(int(self._snapshot.stops[document]) - start, np.uint32)
            self._sums[positions[first:last] - start] = compute_key_crcs(keys[first:last], precision)

    def found(self) -> dict[int, str]:
        """Return the checksum of each document that had a record, by primary key."""
        self._finish()
        return self._found

    def differing(self, stored: Mapping[int, str]) -> list[int]:
        """Return the primary keys of the documents whose stored checksum differs."""
        return [row for row, found in self.found().items() if stored.get(row, found) != found]

    def _finish(self) -> None:
        if self._document >= 0:
            row = int(self._snapshot.rows[self._document])
            self._found[row] = checksum(self._sums, self._precisions[row])
        self._document = -1


def make_checksum_checker(snapshot: Snapshot, stored: Mapping[int, str]) -> Checksums:
    """Compute the checksums of documents again."""
    return Checksums(snapshot, {row: _precision_in(found) for row, found in stored.items()})


def make_checksum_computer(snapshot: Snapshot, engine: Capabilities) -> Checksums:
    """Compute the checksums of all documents of an engine."""
    precision = get_checksum_precision(engine)
    return Checksums(snapshot, {} if precision is None else dict.fromkeys(snapshot.rows.tolist(), precision))


def _precision_in(stored: str) -> str:
    """Return the precision that a checksum names; an arbitrary one if the checksum is damaged."""
    named = str(stored).partition(":")[0]
    return named if named in _PRECISIONS else _PRECISIONS[0]
