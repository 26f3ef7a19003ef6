"""Damaged parts of a datastore, for example files: find the documents that lost records with them."""

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
    """Return the known damaged parts of a datastore; empty if the adapter does not report damage."""
    return datastore.damaged() if isinstance(datastore, SupportsDamage) else []


def retry_past_damage(datastore: Datastore, read: Callable[[], T]) -> T:
    """Call `read` until it finds no new damage, and return its result.

    A part that is found damaged is skipped at the next call. Raises CorruptDatastoreError if `read` fails
    without reporting a new damaged part.
    """
    while True:
        damage_count = len(list_damaged_parts(datastore))
        try:
            return read()
        except CorruptDatastoreError:
            if len(list_damaged_parts(datastore)) == damage_count:
                raise


def abandon_unneeded(catalog: Catalog, datastore: Datastore) -> None:
    """Delete each damaged part of a datastore that holds no record of a live document."""
    parts = list_damaged_parts(datastore)
    if parts and isinstance(datastore, SupportsDamage):
        snapshot = catalog.snapshot()
        for part in parts:
            if not len(find_documents_of_part(part, snapshot, datastore)):
                datastore.abandon(part)


def check_undamaged(catalog: Catalog, datastore: Datastore, undone: str) -> None:
    """Check that no live document lost records with a known damaged part.

    Args:
        catalog: catalog of the store.
        datastore: datastore to check.
        undone: the operation that was not done, as the beginning of the message.

    Raises:
        CorruptDatastoreError: documents lost records; the error names the documents.
    """
    parts, snapshot = list_damaged_parts(datastore), catalog.snapshot()
    lost = [find_documents_of_part(part, snapshot, datastore) for part in parts]
    lost_documents = np.unique(np.concatenate([np.zeros(0, np.int64), *lost]))
    if len(lost_documents):
        names = format_document_names(catalog, snapshot.rows[lost_documents].tolist())
        raise CorruptDatastoreError(
            f"{undone}: records of {names} are lost "
            f"({parts[0].problem.partition(': ')[0]}); remove and add again what `knnstore verify` names, or "
            "restore a backup"
        )


@contextmanager
def name_damaged_documents(catalog: Catalog, datastore: Datastore, undone: str) -> Iterator[None]:
    """Replace a CorruptDatastoreError of the context by one that names the documents, if any lost records."""
    try:
        yield
    except CorruptDatastoreError:
        check_undamaged(catalog, datastore, undone)
        raise


def find_documents_of_part(part: DamagedPart, snapshot: Snapshot, datastore: Datastore) -> NDArray[np.int64]:
    """Return the live documents that lost records with a damaged part, as indices into the snapshot."""
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
    """Return ids and domains of documents as one phrase: the first `_MAX_NAMED`, and how many more."""
    labels = sorted(catalog.labels(rows).values())
    names = ", ".join(f"{id!r} of domain {domain!r}" for id, domain in labels[:_MAX_NAMED])
    more = f" and {len(labels) - _MAX_NAMED:,} more" if len(labels) > _MAX_NAMED else ""
    return f"{names}{more}"
