"""Checksums of keys, kept in the catalog for engines that do not check their data themselves.

Each document has one checksum: the SHA-256 of the CRC-32 values of its keys, by position. An engine may round
keys to half precision. Then keys are rounded before the CRC-32, so that the keys given to the engine and the
keys read from it have the same checksum.
"""

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Snapshot
from knnstore.datastore import Capabilities, Ids, Keys, positions_of

Sums = NDArray[np.uint32]
"""CRC-32 of the key at each position; 0 for a position without a record."""

_PRECISIONS = ("float16", "float32")
_NO_CRCS: Sums = np.zeros(0, np.uint32)


def get_checksum_precision(engine: Capabilities) -> str | None:
    """Return the precision of the checksums of an engine's keys; None if the engine checks them itself."""
    if engine.checks_keys:
        return None
    return "float32" if engine.exact_keys else "float16"


def compute_key_crcs(keys: Keys, precision: str) -> Sums:
    """Return the CRC-32 of each key, rounded to `precision`, uint32, shape (n,)."""
    with np.errstate(over="ignore"):  # what is too large for half precision is infinite, given and read
        rounded = np.ascontiguousarray(keys, np.dtype(precision).newbyteorder("<"))
    return np.fromiter(map(zlib.crc32, rounded + rounded.dtype.type(0)), np.uint32, len(rounded))  # no -0


def checksum(sums: Sums, precision: str) -> str:
    """Return the checksum of a document as text: the precision and a SHA-256.

    Args:
        sums: CRC-32 of the key at each position of the document.
        precision: precision of the rounded keys, "float16" or "float32".
    """
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
        self._checksums: dict[int, str] = {}
        self._document = -1
        self._sums = _NO_CRCS

    def add(self, ids: Ids, keys: Keys) -> None:
        """Process the next records, by ascending id. Records of other documents are skipped."""
        if not self._precisions:
            return
        positions = positions_of(ids)
        document_indices = self._snapshot.documents_at(positions)
        bounds = np.flatnonzero(np.diff(document_indices, prepend=-2, append=-2))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            document = int(document_indices[first])
            precision = self._precisions.get(int(self._snapshot.rows[document])) if document >= 0 else None
            if precision is None:
                continue
            start = int(self._snapshot.starts[document])
            if document != self._document:
                self._finish_document()
                self._document = document
                self._sums = np.zeros(int(self._snapshot.stops[document]) - start, np.uint32)
            self._sums[positions[first:last] - start] = compute_key_crcs(keys[first:last], precision)

    def get_checksums(self) -> dict[int, str]:
        """Return the checksum of each document with at least one processed record, by primary key."""
        self._finish_document()
        return self._checksums

    def find_differing(self, stored: Mapping[int, str]) -> list[int]:
        """Return the primary keys of the documents whose checksum in `stored` differs from the computed one.

        Documents without a processed record or without a stored checksum are left out.
        """
        return [
            row for row, computed in self.get_checksums().items() if stored.get(row, computed) != computed
        ]

    def _finish_document(self) -> None:
        """Save the checksum of the current document, if there is one."""
        if self._document >= 0:
            row = int(self._snapshot.rows[self._document])
            self._checksums[row] = checksum(self._sums, self._precisions[row])
        self._document = -1


def make_checksum_checker(snapshot: Snapshot, stored: Mapping[int, str]) -> Checksums:
    """Return an object that computes checksums again, in the precisions of the stored checksums."""
    return Checksums(
        snapshot, {row: _parse_precision(checksum_text) for row, checksum_text in stored.items()}
    )


def make_checksum_computer(snapshot: Snapshot, engine: Capabilities) -> Checksums:
    """Return an object that computes the checksums of all documents for an engine.

    If the engine checks its keys itself, the object computes no checksums.
    """
    precision = get_checksum_precision(engine)
    return Checksums(snapshot, {} if precision is None else dict.fromkeys(snapshot.rows.tolist(), precision))


def _parse_precision(stored: str) -> str:
    """Return the precision that a checksum names; an arbitrary one if the checksum is damaged."""
    precision = str(stored).partition(":")[0]
    return precision if precision in _PRECISIONS else _PRECISIONS[0]
