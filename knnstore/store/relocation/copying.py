"""Copying the records of one datastore to another, and checking the copy against its source."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import (
    BATCH_SIZE,
    ID_LIMIT,
    Capabilities,
    Datastore,
    Distances,
    Groups,
    IdRanges,
    Ids,
    Keys,
    Metric,
    SupportsOptimize,
    pairwise,
)
from knnstore.errors import DatastoreError
from knnstore.failpoints import failpoint
from knnstore.progress import Progress

SECONDS_AT_RISK = 10.0
"""The copy is made durable so often: the work that an interruption can cost."""

GIVE_UP = "the store stays where it is; drop the copy with `knnstore move --abandon`"

_QUERIES = 32
_NEIGHBORS = 1024
_MOST_LOST = 0.5  # by codes, of the keys' squared distance to their mean; a tenth is usual
_MOST_OF_SIZE = 0.01  # and of their squares, where keys are all but equal

Batch = tuple[Ids, Keys, Groups]
Seen = Callable[[Ids, Keys], None]


class Transferred(NamedTuple):
    """The result of `transfer`."""

    records: int
    """Records of the source, each of which the target holds."""
    copied: int
    """Number of these records that the target did not have before."""
    recall: float | None
    """Share of the true nearest neighbors of some keys that the target finds; None without records."""
    neighbors: int
    """Number of neighbors of each key in the recall."""
    codes: str | None
    """Codes that the target uses for many keys; see `Capabilities`."""


def transfer(
    source: Datastore,
    target: Datastore,
    progress: Progress,
    *,
    reads: Seen = lambda ids, keys: None,
    holds: Seen = lambda ids, keys: None,
) -> Transferred:
    """Copy the records of the source to the target, build its indexes, and check the result.

    Records that the target has from an interrupted transfer are not copied again. Every record is compared,
    and the neighbors of a sample are compared with those that numpy finds.

    Args:
        source: the datastore to copy.
        target: the datastore to fill.
        progress: receives each batch.
        reads: called with all records of the source, by ascending id.
        holds: called with all records of the complete target, by ascending id.

    Raises:
        DatastoreError: the target gives back other records than it was given, or does not find
            the nearest ones although it says that its search is exact.
    """
    total = source.count()
    queries, copied = _copy(_read_ahead(source, reads), total, target, progress)
    if isinstance(target, SupportsOptimize):
        progress.start("indexing")
        target.optimize()
        progress.finish()
    failpoint("move.indexed")
    held = _read_ahead(target, holds)
    nearest = _compare(_read_ahead(source), held, total, target, queries, progress)
    records = target.count()
    failpoint("move.compared")
    if not records:
        return Transferred(0, copied, None, 0, target.capabilities.codes)
    found = target.search(queries, nearest.k).distances
    recall = float((found <= nearest.bounds()[:, None]).mean())
    if target.capabilities.exact_search and recall < 1:
        raise DatastoreError(f"the copy does not find the nearest records: {GIVE_UP}")
    return Transferred(records, copied, recall, nearest.k, target.capabilities.codes)


def _copy(batches: Iterable[Batch], total: int, target: Datastore, progress: Progress) -> tuple[Keys, int]:
    """Copy what is missing of some batches and delete what is left over, durably.

    Returns:
        Some keys of the source, evenly spread, shape (at most _QUERIES, dim); how many were copied.
    """
    present = target.count()
    if present:
        progress.say(f"{min(present, total):,} of {total:,} records are there already")
    progress.start("copying", total=max(0, total - present), unit="rec")
    wanted = np.unique(np.linspace(0, total - 1, min(_QUERIES, total)).astype(np.int64))
    sample: list[Keys] = [np.empty((0, target.dim), np.float32)]
    row = seen = copied = 0
    first = 0  # the lowest id that was not looked at yet
    flushed = time.monotonic()
    for batch in batches:
        ids, keys, _ = batch
        sample.append(keys[wanted[(wanted >= row) & (wanted < row + len(ids))] - row])
        row += len(ids)
        lacking = batch
        if seen < present:
            held = _settle(target, first, int(ids[-1]) + 1, ids)
            seen += len(held)
            lacking = _rows(batch, ~np.isin(ids, held))
        first = int(ids[-1]) + 1
        target.add(*lacking)
        copied += len(lacking[0])
        progress.advance(len(lacking[0]))
        failpoint("move.copied")
        if time.monotonic() - flushed >= SECONDS_AT_RISK:
            target.flush()
            flushed = time.monotonic()
            failpoint("move.flushed")
    if seen < present:
        _settle(target, first, ID_LIMIT, np.empty(0, np.int64))
    target.flush()
    progress.finish()
    return np.concatenate(sample), copied


def _settle(target: Datastore, start: int, stop: int, wanted: Ids) -> Ids:
    """Delete what the target holds between two ids beside what is wanted; returns all that it held."""
    held = [batch[0] for batch in target.iterate(ids=IdRanges([(start, stop)]))]
    ids = np.concatenate(held) if held else np.empty(0, np.int64)
    target.delete(IdRanges.of_ids(ids[~np.isin(ids, wanted)]))
    return ids


def _read_ahead(datastore: Datastore, seen: Seen = lambda ids, keys: None) -> Iterator[Batch]:
    """Yield the records in nonempty batches. The next batch is read while the caller uses this one."""
    batches = datastore.iterate(batch_size=BATCH_SIZE)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            seen(batch[0], batch[1])
            if len(batch[0]):
                yield batch


def _compare(
    batches: Iterable[Batch],
    held: Iterable[Batch],
    total: int,
    target: Datastore,
    queries: Keys,
    progress: Progress,
) -> "_Nearest":
    """Compare what the target holds with what it shall, and find the queries' true neighbors on the way."""
    progress.start("comparing", total=total, unit="rec")
    nearest = _Nearest(queries, min(_NEIGHBORS, total), target.metric)
    able = target.capabilities
    for ours, theirs in _aligned(batches, held):
        if theirs is None or ours is None or not _same(ours, theirs, able):
            raise DatastoreError(f"the copy differs from its source: {GIVE_UP}")
        # Codes shrink distances: what is found is compared with what the target holds.
        nearest.add(ours[1] if able.codes is None else theirs[1])
        progress.advance(len(ours[0]))
    progress.finish()
    return nearest


def _aligned(one: Iterable[Batch], other: Iterable[Batch]) -> Generator[tuple[Batch | None, Batch | None]]:
    """Two streams of batches, cut at the same rows wherever each was cut; None where one has ended."""
    streams = iter(one), iter(other)
    ours, theirs = (next(stream, None) for stream in streams)
    while ours is not None and theirs is not None:
        rows = min(len(ours[0]), len(theirs[0]))
        yield _rows(ours, slice(rows)), _rows(theirs, slice(rows))
        ours, theirs = (
            _rows(batch, slice(rows, None)) if len(batch[0]) > rows else next(stream, None)
            for batch, stream in zip((ours, theirs), streams, strict=True)
        )
    if ours is not None or theirs is not None:
        yield ours, theirs


def _rows(batch: Batch, rows: slice | NDArray[np.bool_]) -> Batch:
    ids, keys, groups = batch
    return ids[rows], keys[rows], groups[rows]


def _same(ours: Batch, theirs: Batch, able: Capabilities) -> bool:
    """Check whether records are equal; keys are compared in the precision of the engine."""
    (ids, keys, groups), (their_ids, their_keys, their_groups) = ours, theirs
    if not (np.array_equal(ids, their_ids) and np.array_equal(groups, their_groups)):
        return False
    if np.array_equal(keys, their_keys):
        return True
    with np.errstate(over="ignore"):  # what exceeds the range of half precision is kept as it is
        rounded = keys.astype(np.float16).astype(np.float32)
    if able.exact_keys:
        return False
    return bool(((their_keys == rounded) | (their_keys == keys)).all()) or (
        able.codes is not None and _are_near(keys, their_keys)
    )


def _are_near(keys: Keys, coded: Keys) -> bool:
    """Check whether codes can belong to these keys: other keys of the same text would be farther away."""
    lost, spread, size = (
        ((keys - others) ** 2).sum(dtype=np.float64) for others in (coded, keys.mean(0), np.float32(0))
    )
    return bool(lost <= _MOST_LOST * spread + _MOST_OF_SIZE * size)


class _Nearest:
    """The distances of the k nearest of all keys that were added, for each query."""

    def __init__(self, queries: Keys, k: int, metric: Metric) -> None:
        self.k, self._queries, self._metric = k, queries, metric
        self._distances: Distances = np.full((len(queries), k), np.inf, np.float32)

    def add(self, keys: Keys) -> None:
        """Count in some keys, shape (n, dim)."""
        if self.k:
            both = np.concatenate([self._distances, pairwise(self._queries, keys, self._metric)], axis=1)
            self._distances = np.partition(both, self.k - 1, axis=1)[:, : self.k]

    def bounds(self) -> Distances:
        """Return the distance of each query's k-th nearest record, plus a margin for rounding."""
        furthest = self._distances.max(axis=1)
        origin = self._queries.mean(axis=0) if self._metric is Metric.L2 else 0
        scale = ((self._queries - origin) ** 2).sum(axis=1)
        bounds: Distances = furthest + 1e-3 * np.abs(furthest) + 1e-5 * scale
        return bounds
