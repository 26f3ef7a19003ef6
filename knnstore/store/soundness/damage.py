"""Which documents a damaged part of the keys costs, and giving it up when they are gone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import Catalog, Snapshot
from knnstore.datastore import DamagedPart, Datastore, SupportsDamage, positions_of, ranges_of
from knnstore.errors import CorruptDatastoreError

_NAMED = 5  # documents in one line

T = TypeVar("T")


def damaged_parts(datastore: Datastore) -> list[DamagedPart]:
    """The damage that is known of a datastore."""
    return datastore.damaged() if isinstance(datastore, SupportsDamage) else []


def reading_on(datastore: Datastore, read: Callable[[], T]) -> T:
    """Read, and again whenever damage is found that was not known: it is left out then."""
    while True:
        known = len(damaged_parts(datastore))
        try:
            return read()
        except CorruptDatastoreError:
            if len(damaged_parts(datastore)) == known:
                raise


def abandon_unneeded(catalog: Catalog, datastore: Datastore) -> None:
    """Give up the damaged parts of which no live document has a record."""
    parts = damaged_parts(datastore)
    if parts and isinstance(datastore, SupportsDamage):
        snapshot = catalog.snapshot()
        for part in parts:
            if not len(documents_of(part, snapshot, datastore)):
                datastore.abandon(part)


def check_undamaged(catalog: Catalog, datastore: Datastore, undone: str) -> None:
    """Refuse a datastore with damage that is known.

    Raises:
        CorruptDatastoreError: there is some; names the documents.
    """
    parts, snapshot = damaged_parts(datastore), catalog.snapshot()
    lost = [documents_of(part, snapshot, datastore) for part in parts]
    at = np.unique(np.concatenate([np.zeros(0, np.int64), *lost]))
    if len(at):
        raise CorruptDatastoreError(
            f"{undone}: records of {named(catalog, snapshot.rows[at].tolist())} are lost "
            f"({parts[0].problem.partition(': ')[0]}); remove and add again what `knnstore verify` names, or "
            "restore a backup"
        )


@contextmanager
def naming_damage(catalog: Catalog, datastore: Datastore, undone: str) -> Iterator[None]:
    """Name the documents where damage is found in between; see `check_undamaged`."""
    try:
        yield
    except CorruptDatastoreError:
        check_undamaged(catalog, datastore, undone)
        raise


def documents_of(part: DamagedPart, snapshot: Snapshot, datastore: Datastore) -> NDArray[np.int64]:
    """The live documents that lost records with a damaged part, as indices into the snapshot."""
    first, last = positions_of(np.array([part.ids.starts[0], part.ids.stops[-1] - 1]))
    near = (snapshot.groups == part.group) & (snapshot.starts <= last) & (snapshot.stops > first)
    at = np.flatnonzero(near)
    if not len(at):
        return at

    def count() -> NDArray[np.int64]:
        # Other parts may hold documents in between.
        there = np.zeros(len(snapshot.rows), np.int64)
        for ids, _, _ in datastore.iterate(ids=ranges_of(snapshot.starts[at], snapshot.stops[at])):
            there += np.bincount(snapshot.documents_at(positions_of(ids)), minlength=len(there))
        return there

    return at[reading_on(datastore, count)[at] < snapshot.records[at]]


def named(catalog: Catalog, rows: Sequence[int]) -> str:
    """Some documents by name, the first few where they are many."""
    labels = sorted(catalog.labels(rows).values())
    names = ", ".join(f"{id!r} of domain {domain!r}" for id, domain in labels[:_NAMED])
    more = f" and {len(labels) - _NAMED:,} more" if len(labels) > _NAMED else ""
    return f"{names}{more}"
