"""Damaged parts of a datastore: finding the documents whose records are lost with a damaged part (a file).

A document is live if it is completely stored and not removed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import DamagedPart, Datastore, SupportsDamage, positions_of, ranges_of
from knnstore.errors import CorruptDatastoreError

_MAX_NAMED = 5  # documents named in one message

T = TypeVar("T")


def list_damaged_parts(datastore: Datastore) -> list[DamagedPart]:
    """Return the parts (such as files) of a datastore that are known to be damaged.

    Empty if no damage is known, or if the adapter cannot report damage.
    """
    return datastore.damaged() if isinstance(datastore, SupportsDamage) else []


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
                datastore.abandon(part)


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
    first, last = positions_of(np.array([part.ids.starts[0], part.ids.stops[-1] - 1]))
    may_overlap = (snapshot.groups == part.group) & (snapshot.starts <= last) & (snapshot.stops > first)
    candidates = np.flatnonzero(may_overlap)
    if not len(candidates):
        return candidates

    def count() -> NDArray[np.int64]:
        """Return the number of readable records of each document in the snapshot."""
        # Other parts may hold documents whose positions lie in the same range.
        record_counts = np.zeros(len(snapshot.rows), np.int64)
        for ids, _, _ in datastore.iterate(
            ids=ranges_of(snapshot.starts[candidates], snapshot.stops[candidates])
        ):
            record_counts += np.bincount(
                snapshot.documents_at(positions_of(ids)), minlength=len(record_counts)
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
    labels = sorted(catalog.labels(rows).values())
    names = ", ".join(f"{id!r} of domain {domain!r}" for id, domain in labels[:_MAX_NAMED])
    more = f" and {len(labels) - _MAX_NAMED:,} more" if len(labels) > _MAX_NAMED else ""
    return f"{names}{more}"
