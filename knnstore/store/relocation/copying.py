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
"""Seconds between two flushes of the copy: the work that an interruption can cost at most."""

GIVE_UP = "the store stays where it is; drop the copy with `knnstore move --abandon`"

_QUERIES = 32
_NEIGHBORS = 1024
_MAX_LOST_SHARE = 0.5  # by codes, of the keys' squared distance to their mean; a tenth is usual
_MAX_LOST_OF_SIZE = 0.01  # and of their squares, where keys are all but equal

Batch = tuple[Ids, Keys, Groups]
OnBatch = Callable[[Ids, Keys], None]


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
    reads: OnBatch = lambda ids, keys: None,
    holds: OnBatch = lambda ids, keys: None,
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
        DatastoreError: if the target returns other records than it was given, or does not find the nearest
            records although its search claims to be exact.
    """
    total = source.count()
    queries, copied = _copy_missing(_read_ahead(source, reads), total, target, progress)
    if isinstance(target, SupportsOptimize):
        progress.start("indexing")
        target.optimize()
        progress.finish()
    failpoint("move.indexed")
    held = _read_ahead(target, holds)
    nearest = _compare_records(_read_ahead(source), held, total, target, queries, progress)
    records = target.count()
    failpoint("move.compared")
    if not records:
        return Transferred(0, copied, None, 0, target.capabilities.codes)
    found_distances = target.search(queries, nearest.k).distances
    recall = float((found_distances <= nearest.bounds()[:, None]).mean())
    if target.capabilities.exact_search and recall < 1:
        raise DatastoreError(f"the copy does not find the nearest records: {GIVE_UP}")
    return Transferred(records, copied, recall, nearest.k, target.capabilities.codes)


def _copy_missing(
    batches: Iterable[Batch], total: int, target: Datastore, progress: Progress
) -> tuple[Keys, int]:
    """Copy the records that the target lacks, delete records that the source lacks, and flush the target.

    Args:
        batches: all records of the source, by ascending id.
        total: number of records of the source.
        target: the datastore to fill.
        progress: receives each batch.

    Returns:
        A sample of the source's keys, evenly spaced, shape (at most `_QUERIES`, dim), and the number of
        copied records.
    """
    present = target.count()
    if present:
        progress.say(f"{min(present, total):,} of {total:,} records are there already")
    progress.start("copying", total=max(0, total - present), unit="rec")
    sample_rows = np.unique(np.linspace(0, total - 1, min(_QUERIES, total)).astype(np.int64))
    sample: list[Keys] = [np.empty((0, target.dim), np.float32)]
    row = held_count = copied = 0
    first = 0  # the lowest id that was not looked at yet
    flushed = time.monotonic()
    for batch in batches:
        ids, keys, _ = batch
        sample.append(keys[sample_rows[(sample_rows >= row) & (sample_rows < row + len(ids))] - row])
        row += len(ids)
        missing = batch
        if held_count < present:
            held = _delete_unwanted(target, first, int(ids[-1]) + 1, ids)
            held_count += len(held)
            missing = _select_rows(batch, ~np.isin(ids, held))
        first = int(ids[-1]) + 1
        target.add(*missing)
        copied += len(missing[0])
        progress.advance(len(missing[0]))
        failpoint("move.copied")
        if time.monotonic() - flushed >= SECONDS_AT_RISK:
            target.flush()
            flushed = time.monotonic()
            failpoint("move.flushed")
    if held_count < present:
        _delete_unwanted(target, first, ID_LIMIT, np.empty(0, np.int64))
    target.flush()
    progress.finish()
    return np.concatenate(sample), copied


def _delete_unwanted(target: Datastore, start: int, stop: int, wanted: Ids) -> Ids:
    """Delete the target's records with ids from `start` to below `stop`, except the ids in `wanted`.

    Returns all ids that the target had in this range, the deleted ones included.
    """
    id_batches = [batch[0] for batch in target.iterate(ids=IdRanges([(start, stop)]))]
    ids = np.concatenate(id_batches) if id_batches else np.empty(0, np.int64)
    target.delete(IdRanges.of_ids(ids[~np.isin(ids, wanted)]))
    return ids


def _read_ahead(datastore: Datastore, on_batch: OnBatch = lambda ids, keys: None) -> Iterator[Batch]:
    """Yield all records in nonempty batches, and call `on_batch` with the ids and keys of each batch.

    A thread reads the next batch while the caller uses the current one.
    """
    batches = datastore.iterate(batch_size=BATCH_SIZE)
    with ThreadPoolExecutor(1) as reader:
        next_batch = reader.submit(next, batches, None)
        while (batch := next_batch.result()) is not None:
            next_batch = reader.submit(next, batches, None)
            on_batch(batch[0], batch[1])
            if len(batch[0]):
                yield batch


def _compare_records(
    batches: Iterable[Batch],
    held: Iterable[Batch],
    total: int,
    target: Datastore,
    queries: Keys,
    progress: Progress,
) -> "_NearestDistances":
    """Compare all records of source and target, and compute the distances of the queries' true neighbors.

    Args:
        batches: records of the source, by ascending id.
        held: records of the target, by ascending id.
        total: number of records of the source.
        target: the target.
        queries: query vectors, shape (q, dim).
        progress: receives each batch.

    Raises:
        DatastoreError: if the records differ.
    """
    progress.start("comparing", total=total, unit="rec")
    nearest = _NearestDistances(queries, min(_NEIGHBORS, total), target.metric)
    capabilities = target.capabilities
    for ours, theirs in _align_batches(batches, held):
        if theirs is None or ours is None or not _are_equal(ours, theirs, capabilities):
            raise DatastoreError(f"the copy differs from its source: {GIVE_UP}")
        # Codes shrink distances: what is found is compared with what the target holds.
        nearest.add(ours[1] if capabilities.codes is None else theirs[1])
        progress.advance(len(ours[0]))
    progress.finish()
    return nearest


def _align_batches(
    one: Iterable[Batch], other: Iterable[Batch]
) -> Generator[tuple[Batch | None, Batch | None]]:
    """Yield pairs of batches with equal numbers of rows from two streams whose batches differ in size.

    If one stream ends earlier, the last pair has None in its place.
    """
    streams = iter(one), iter(other)
    ours, theirs = (next(stream, None) for stream in streams)
    while ours is not None and theirs is not None:
        rows = min(len(ours[0]), len(theirs[0]))
        yield _select_rows(ours, slice(rows)), _select_rows(theirs, slice(rows))
        ours, theirs = (
            _select_rows(batch, slice(rows, None)) if len(batch[0]) > rows else next(stream, None)
            for batch, stream in zip((ours, theirs), streams, strict=True)
        )
    if ours is not None or theirs is not None:
        yield ours, theirs


def _select_rows(batch: Batch, rows: slice | NDArray[np.bool_]) -> Batch:
    """Return ids, keys and groups of some rows of a batch."""
    ids, keys, groups = batch
    return ids[rows], keys[rows], groups[rows]


def _are_equal(ours: Batch, theirs: Batch, capabilities: Capabilities) -> bool:
    """Check whether the records of two batches are equal. Keys are compared in the engine's precision."""
    (ids, keys, groups), (their_ids, their_keys, their_groups) = ours, theirs
    if not (np.array_equal(ids, their_ids) and np.array_equal(groups, their_groups)):
        return False
    if np.array_equal(keys, their_keys):
        return True
    with np.errstate(over="ignore"):  # what exceeds the range of half precision is kept as it is
        rounded = keys.astype(np.float16).astype(np.float32)
    if capabilities.exact_keys:
        return False
    return bool(((their_keys == rounded) | (their_keys == keys)).all()) or (
        capabilities.codes is not None and _codes_fit(keys, their_keys)
    )


def _codes_fit(keys: Keys, coded: Keys) -> bool:
    """Check whether decoded keys can be codes of `keys`: codes lose at most half of the squared spread.

    Keys of other records of the same text would be farther away.
    """
    lost_distance, spread_distance, size = (
        ((keys - others) ** 2).sum(dtype=np.float64) for others in (coded, keys.mean(0), np.float32(0))
    )
    return bool(lost_distance <= _MAX_LOST_SHARE * spread_distance + _MAX_LOST_OF_SIZE * size)


class _NearestDistances:
    """Distances of the k nearest added keys of each query."""

    def __init__(self, queries: Keys, k: int, metric: Metric) -> None:
        self.k, self._queries, self._metric = k, queries, metric
        self._distances: Distances = np.full((len(queries), k), np.inf, np.float32)

    def add(self, keys: Keys) -> None:
        """Process further keys, shape (n, dim)."""
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
