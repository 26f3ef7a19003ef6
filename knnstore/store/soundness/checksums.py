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
"""CRC-32 of the key of each token of a document, uint32, shape (n,); 0 for a token without a record."""

_PRECISIONS = ("float16", "float32")
_NO_CRCS: Sums = np.zeros(0, np.uint32)


def get_checksum_precision(engine: Capabilities) -> str | None:
    """Return the precision to which keys are rounded before checksums are computed.

    Args:
        engine: features of the vector engine that stores the keys.

    Returns:
        "float32" if the engine returns keys exactly, else "float16"; None if the engine checks its keys
        itself, so that the store needs no checksums.
    """
    if engine.checks_keys:
        return None
    return "float32" if engine.exact_keys else "float16"


def compute_key_crcs(keys: Keys, precision: str) -> Sums:
    """Round keys, and compute the CRC-32 of each rounded key.

    Args:
        keys: float32, shape (n, dim).
        precision: "float16" or "float32".

    Returns:
        uint32, shape (n,).
    """
    with np.errstate(over="ignore"):  # what is too large for half precision is infinite, given and read
        rounded = np.ascontiguousarray(keys, np.dtype(precision).newbyteorder("<"))
    return np.fromiter(map(zlib.crc32, rounded + rounded.dtype.type(0)), np.uint32, len(rounded))  # no -0


def checksum(sums: Sums, precision: str) -> str:
    """Return the checksum of a document's keys as text: the precision, a colon and a SHA-256.

    Args:
        sums: CRC-32 of the key of each token of the document; 0 for a token without a record.
        precision: precision to which the keys were rounded, "float16" or "float32".
    """
    return f"{precision}:{hashlib.sha256(sums.astype('<u4').tobytes()).hexdigest()}"


class Checksums:
    """Computes the checksums of the keys of several documents, from batches of records by ascending id.

    Call `add` with all records, then `get_checksums` or `find_differing`.

    Args:
        snapshot: the documents of the store at one revision.
        precisions: precision to which the keys of each document are rounded ("float16" or "float32"), by
            primary key of the document. Documents without an entry are skipped.
    """

    def __init__(self, snapshot: Snapshot, precisions: Mapping[int, str]) -> None:
        self._snapshot = snapshot
        self._precisions = precisions
        self._checksums: dict[int, str] = {}
        self._document = -1
        self._sums = _NO_CRCS

    def add(self, ids: Ids, keys: Keys) -> None:
        """Process the next batch of records.

        Args:
            ids: record ids, int64, shape (n,), ascending, larger than the ids of earlier batches.
            keys: keys of the records, float32, shape (n, dim).
        """
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
        """Return a dict from primary key to checksum, for each document whose records were added."""
        self._finish_document()
        return self._checksums

    def find_differing(self, stored: Mapping[int, str]) -> list[int]:
        """Return the primary keys of the documents whose stored checksum differs from the computed checksum.

        A document is left out if none of its records was added to this object, or if it has no stored
        checksum.

        Args:
            stored: stored checksums by primary key of the document.
        """
        return [
            row for row, computed in self.get_checksums().items() if stored.get(row, computed) != computed
        ]

    def _finish_document(self) -> None:
        """Compute the checksum of the document whose records were added last; do nothing without records."""
        if self._document >= 0:
            row = int(self._snapshot.rows[self._document])
            self._checksums[row] = checksum(self._sums, self._precisions[row])
        self._document = -1


def make_checksum_checker(snapshot: Snapshot, stored: Mapping[int, str]) -> Checksums:
    """Create an object that computes the checksums of documents again, to compare them with stored checksums.

    Each checksum is computed in the precision that the stored checksum names.

    Args:
        snapshot: the documents of the store at one revision.
        stored: stored checksums by primary key of the document; documents without one are skipped.
    """
    return Checksums(
        snapshot, {row: _parse_precision(checksum_text) for row, checksum_text in stored.items()}
    )


def make_checksum_computer(snapshot: Snapshot, engine: Capabilities) -> Checksums:
    """Create an object that computes the checksums of all documents, to store them.

    If the vector engine checks its keys itself, the object computes no checksums.

    Args:
        snapshot: the documents of the store at one revision.
        engine: features of the vector engine that stores the keys.
    """
    precision = get_checksum_precision(engine)
    return Checksums(snapshot, {} if precision is None else dict.fromkeys(snapshot.rows.tolist(), precision))


def _parse_precision(stored: str) -> str:
    """Return the precision of a checksum: the part of its text before the colon.

    Returns "float16" if this part is neither "float16" nor "float32", because the text is damaged.

    Args:
        stored: text of the checksum, such as "float32:9f86d0...".
    """
    precision = str(stored).partition(":")[0]
    return precision if precision in _PRECISIONS else _PRECISIONS[0]
