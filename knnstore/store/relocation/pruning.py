"""Pruning: which records of each domain go, and what the catalog says of them afterwards."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from knnstore.catalog import DROPPED, Catalog, Engine, PrunedDocument, Representatives, Snapshot
from knnstore.datastore import Datastore, IdRanges, Ids, Keys, positions_of, record_ids, tokens_of
from knnstore.errors import CatalogError, ConfigError, DatastoreError
from knnstore.progress import Progress
from knnstore.store.provenance import Tokens
from knnstore.store.relocation.choices import Choice, drop_at_random, merge_nearest
from knnstore.store.view import View


@dataclass(frozen=True)
class DomainRecords:
    """The records of a domain that is to be pruned; others are not merged with them."""

    name: str
    ids: Ids
    """Shape (n,), ascending."""
    weights: NDArray[np.float64]
    """How many each stands for, shape (n,)."""
    documents: Sequence[tuple[int, Tokens]]
    """The first position of each document, ascending, and its tokens."""
    datastore: Datastore

    @cached_property
    def keys(self) -> Keys:
        """Read from the datastore into memory, float32, shape (n, dim).

        Raises:
            DatastoreError: the datastore has other records than the catalog says.
        """
        bounds = np.array([[self.ids[0], self.ids[-1] + 1]])
        batches = list(self.datastore.iterate(ids=IdRanges(bounds)))
        ids = np.concatenate([ids for ids, _, _ in batches])
        mine = np.isin(ids, self.ids)
        if mine.sum() != len(self.ids):
            raise DatastoreError(f"records of {self.name} are missing: see `knnstore verify`")
        return np.concatenate([keys for _, keys, _ in batches])[mine]


Chooser = Callable[[DomainRecords, int, Progress], Choice]
"""Chooses which records of a domain stay, given how many shall; see `Choice`."""


def random_chooser(seed: int = 0) -> Chooser:
    """Each record stays with the same probability; those that do weigh more accordingly."""
    return lambda records, left, _: drop_at_random(len(records.ids), left, seed)


def merge_chooser() -> Chooser:
    """Records are merged with the nearest ones of the same token; see `merge_nearest`."""
    return lambda records, left, progress: merge_nearest(
        tokens_of(records.ids), records.keys, records.weights, left, progress
    )


@dataclass(frozen=True, slots=True)
class PrunedDomain:
    """What pruning did to one domain."""

    name: str
    tokens: int
    """Of its documents, those that can have a record."""
    before: int
    """Records that it had."""
    after: int
    """Records that it has."""
    merged: int
    """Records that another one stands for now."""
    dropped: int
    """Records that none stands for, but for the weight of the others where they went at random."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `KNNStore.prune` did."""

    domains: tuple[PrunedDomain, ...]
    before: Engine
    """Where the keys were."""
    after: Engine
    """Where they are; the same when every domain had no more records than were to be kept."""
    records: int
    """Of the whole store."""
    seconds: float
    left: str | None = None
    """Why the old keys are still where they were; None when they are gone."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """A pruning that was decided on."""

    domains: tuple[PrunedDomain, ...]
    gone: IdRanges
    """The records that go; empty when there is nothing to do."""
    documents: Mapping[int, PrunedDocument]
    """What the catalog is to say, by primary key."""
    snapshot: Snapshot
    """What is live, as it will be."""


def plan_pruning(
    catalog: Catalog,
    view: View,
    keep: float,
    choose: Chooser,
    domains: Sequence[str],
    progress: Progress,
) -> Pruning:
    """Decide which records of these domains go; see `KNNStore.prune`."""
    if not (0 < keep <= 1 and math.isfinite(keep)):
        raise ConfigError(f"the share to keep must be above 0 and at most 1, got {keep}")
    snapshot = view.snapshot
    known = catalog.pruned(snapshot.rows.tolist())
    first = 0 if catalog.identity.has_prefix else 1
    gone = IdRanges()
    changed: dict[int, PrunedDocument] = {}
    reports = []
    for name in domains:
        at = np.flatnonzero(snapshot.groups == snapshot.domains[name])
        at = at[snapshot.stops[at] > snapshot.starts[at]]
        documents = {}
        places = (snapshot.rows, snapshot.starts, snapshot.stops)
        for row, start, stop in zip(*(column[at].tolist() for column in places), strict=True):
            documents[row] = known.get(row) or _unpruned(start, stop, first)
        texts = _texts(catalog, snapshot, at)
        ids = _record_ids(texts, documents.values())
        tokens = int(np.maximum(snapshot.stops[at] - snapshot.starts[at] - first, 0).sum())
        left = max(1, round(keep * tokens))
        if len(ids) <= left:
            reports.append(PrunedDomain(name, tokens, len(ids), len(ids), 0, 0))
            continue
        positions = positions_of(ids)
        logs = snapshot.log_weights_at(positions)
        weights = np.ones(len(ids)) if logs is None else np.exp(logs.astype(np.float64))
        records = DomainRecords(name, ids, weights, texts, view.datastore)
        representatives, scale = choose(records, left, progress)
        stays, dropped = representatives == np.arange(len(ids)), int((representatives == DROPPED).sum())
        after = int(stays.sum())
        reports.append(PrunedDomain(name, tokens, len(ids), after, len(ids) - after - dropped, dropped))
        gone |= IdRanges.of_ids(ids[~stays])
        moved_to = np.where(representatives == DROPPED, DROPPED, positions[representatives])
        for row, document in documents.items():
            representatives = _look_up(document.representatives, positions, moved_to)
            changed[row] = PrunedDocument(representatives, document.scale * scale)
    return Pruning(tuple(reports), gone, changed, _as_it_will_be(snapshot, {**known, **changed}))


def _unpruned(start: int, stop: int, first: int) -> PrunedDocument:
    """A document with all its records; the first `first` tokens have none."""
    representatives = np.arange(start, stop)
    representatives[:first] = DROPPED
    return PrunedDocument(representatives)


def _texts(catalog: Catalog, snapshot: Snapshot, at: NDArray[np.int64]) -> list[tuple[int, Tokens]]:
    """The first position and the tokens of some documents of a snapshot."""
    texts = []
    for row, start in zip(snapshot.rows[at].tolist(), snapshot.starts[at].tolist(), strict=True):
        tokens = catalog.tokens(row)
        if tokens is None:
            raise CatalogError("a document was removed while its domain was pruned; try again")
        texts.append((start, tokens))
    return texts


def _record_ids(texts: Sequence[tuple[int, Tokens]], documents: Iterable[PrunedDocument]) -> Ids:
    """The records that some documents have, ascending."""
    parts = [np.empty(0, np.int64)]
    for (start, tokens), document in zip(texts, documents, strict=True):
        offsets = np.flatnonzero(document.kept(start))
        parts.append(record_ids(start + offsets, tokens[offsets]))
    return np.concatenate(parts)


def _look_up(
    values: NDArray[np.int64], positions: NDArray[np.int64], moved_to: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Replace each position by what it moved to, `DROPPED` where no record is at it any more."""
    at = np.minimum(np.searchsorted(positions, values), len(positions) - 1)
    return np.where(positions[at] == values, moved_to[at], DROPPED)


def _as_it_will_be(snapshot: Snapshot, pruned: Mapping[int, PrunedDocument]) -> Snapshot:
    """The snapshot once the catalog says what was pruned, by primary key."""
    if not pruned:
        return snapshot
    starts = dict(zip(snapshot.rows.tolist(), snapshot.starts.tolist(), strict=True))
    records = snapshot.records.copy()
    for index, row in enumerate(snapshot.rows.tolist()):
        if row in pruned:
            records[index] = pruned[row].kept(starts[row]).sum()
    representatives = Representatives.of({starts[row]: document for row, document in pruned.items()})
    return replace(snapshot, records=records, representatives=representatives)
