"""Damage of keys: damaged parts (files) of an engine, and keys that differ from their checksums.

`Checksums` computes a checksum of the keys of each document, for engines that do not check their data
themselves: the SHA-256 of the CRC-32 values of its keys, by position. An engine may round keys to half
precision. Then keys are rounded before the CRC-32, so that the keys given to the engine and the keys read
from it have the same checksum. The functions behind it find the documents whose records are lost with a
damaged part.

A document is live if it is completely stored and not removed.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import (
    Capabilities,
    DamagedPart,
    Datastore,
    Ids,
    Keys,
    SupportsDamage,
    id_ranges_from_positions,
    positions_from_ids,
)
from knnstore.errors import CorruptDatastoreError

_PRECISIONS = ("float16", "float32")
_MAX_NAMED = 5  # documents named in one message
T = TypeVar("T")

Sums = NDArray[np.uint32]
"""CRC-32 of the key of each token of a document, uint32, shape (n,); 0 for a token without a record."""

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


def format_checksum(sums: Sums, precision: str) -> str:
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

    def add_records(self, ids: Ids, keys: Keys) -> None:
        """Process the next batch of records.

        Args:
            ids: record ids, int64, shape (n,), ascending, larger than the ids of earlier batches.
            keys: keys of the records, float32, shape (n, dim).
        """
        if not self._precisions:
            return
        positions = positions_from_ids(ids)
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
            self._checksums[row] = format_checksum(self._sums, self._precisions[row])
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


def list_damaged_parts(datastore: Datastore) -> list[DamagedPart]:
    """Return the parts (such as files) of a datastore that are known to be damaged.

    Empty if no damage is known, or if the adapter cannot report damage.
    """
    return datastore.list_damaged_parts() if isinstance(datastore, SupportsDamage) else []


def retry_past_damage(datastore: Datastore, read: Callable[[], T]) -> T:
    """Call a function that reads a datastore, and call it again if it discovers a damaged part.

    The engine leaves a discovered part out of the next call.

    Args:
        datastore: the datastore that `read` reads.
        read: the function, called without arguments.

    Returns:
        The result of the first call that raises no CorruptDatastoreError.

    Raises:
        CorruptDatastoreError: if `read` raises it and no new damaged part is reported.
    """
    while True:
        damage_count = len(list_damaged_parts(datastore))
        try:
            return read()
        except CorruptDatastoreError:
            if len(list_damaged_parts(datastore)) == damage_count:
                raise


def abandon_unneeded(catalog: Catalog, datastore: Datastore) -> None:
    """Delete damaged parts of a datastore that hold no record of a live document.

    A part is, for example, a file. A live document is completely stored and not removed. Only parts that are
    known to be damaged are deleted. If a live document has lost records in a damaged part, the part stays.

    Args:
        catalog: catalog of the store.
        datastore: datastore of the store, open for writing.
    """
    parts = list_damaged_parts(datastore)
    if parts and isinstance(datastore, SupportsDamage):
        snapshot = catalog.snapshot()
        for part in parts:
            if not len(find_documents_of_part(part, snapshot, datastore)):
                datastore.remove_damaged_part(part)


def check_undamaged(catalog: Catalog, datastore: Datastore, message_start: str) -> None:
    """Check that no live document has lost records because a part of the datastore is known to be damaged.

    A part is, for example, a file. A live document is completely stored and not removed.

    Args:
        catalog: catalog of the store.
        datastore: datastore to check.
        message_start: beginning of the error message, which says what was not done because of the damage.

    Raises:
        CorruptDatastoreError: documents have lost records; the message names the documents.
    """
    parts, snapshot = list_damaged_parts(datastore), catalog.snapshot()
    lost = [find_documents_of_part(part, snapshot, datastore) for part in parts]
    lost_documents = np.unique(np.concatenate([np.zeros(0, np.int64), *lost]))
    if len(lost_documents):
        names = format_document_names(catalog, snapshot.rows[lost_documents].tolist())
        raise CorruptDatastoreError(
            f"{message_start}: records of {names} are lost "
            f"({parts[0].problem.partition(': ')[0]}); remove the documents that `knnstore verify` names, "
            "and add them again, or restore a backup"
        )


@contextmanager
def name_damaged_documents(catalog: Catalog, datastore: Datastore, message_start: str) -> Iterator[None]:
    """Replace a CorruptDatastoreError of the ``with`` block by one that names documents with lost records.

    Only live documents count. A live document is completely stored and not removed. If no live document has
    lost records, the error passes unchanged.

    Args:
        catalog: catalog of the store.
        datastore: datastore that the block reads.
        message_start: beginning of the error message, which says what was not done because of the damage.
    """
    try:
        yield
    except CorruptDatastoreError:
        check_undamaged(catalog, datastore, message_start)
        raise


def find_documents_of_part(part: DamagedPart, snapshot: Snapshot, datastore: Datastore) -> NDArray[np.int64]:
    """Find the live documents that have lost records because a part of the datastore is damaged.

    A part is, for example, a file. A live document is completely stored and not removed.

    Args:
        part: the damaged part, a result of `list_damaged_parts`.
        snapshot: the live documents of the store.
        datastore: the datastore; its readable records are counted.

    Returns:
        Indices of the documents in the snapshot's arrays, int64, shape (n,); empty if no document has lost
        records.
    """
    first, last = positions_from_ids(np.array([part.ids.starts[0], part.ids.stops[-1] - 1]))
    may_overlap = (snapshot.groups == part.group) & (snapshot.starts <= last) & (snapshot.stops > first)
    candidates = np.flatnonzero(may_overlap)
    if not len(candidates):
        return candidates

    def count() -> NDArray[np.int64]:
        """Return the number of readable records of each document in the snapshot."""
        # Other parts may hold documents whose positions lie in the same range.
        record_counts = np.zeros(len(snapshot.rows), np.int64)
        for ids, _, _ in datastore.iterate(
            ids=id_ranges_from_positions(snapshot.starts[candidates], snapshot.stops[candidates])
        ):
            record_counts += np.bincount(
                snapshot.documents_at(positions_from_ids(ids)), minlength=len(record_counts)
            )
        return record_counts

    return candidates[retry_past_damage(datastore, count)[candidates] < snapshot.records[candidates]]


def format_document_names(catalog: Catalog, rows: Sequence[int]) -> str:
    """Return the ids and domains of documents as one phrase for a message.

    The phrase names at most `_MAX_NAMED` documents, and then says how many more there are.

    Args:
        catalog: catalog of the store.
        rows: primary keys of the documents; removed documents are left out.
    """
    labels = sorted(catalog.ids_and_domains(rows).values())
    names = ", ".join(f"{id!r} of domain {domain!r}" for id, domain in labels[:_MAX_NAMED])
    more = f" and {len(labels) - _MAX_NAMED:,} more" if len(labels) > _MAX_NAMED else ""
    return f"{names}{more}"
