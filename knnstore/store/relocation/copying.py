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
    pairwise_distances,
)
from knnstore.errors import DatastoreError
from knnstore.failpoints import failpoint
from knnstore.progress import Progress

SECONDS_AT_RISK = 10.0
"""Seconds between two flushes of the copy. An interruption loses at most the work of this time."""

GIVE_UP = "the store stays where it is; drop the copy with `knnstore move --abandon`"

_QUERIES = 32
_NEIGHBORS = 1024
_MAX_LOST_SHARE = 0.5  # by codes, of the keys' squared distance to their mean; a tenth is usual
_MAX_LOST_OF_SIZE = 0.01  # and of their squares, where keys are all but equal

Batch = tuple[Ids, Keys, Groups]
OnBatch = Callable[[Ids, Keys], None]


class Transferred(NamedTuple):
    """Report on a copy of all records from one datastore to another, made by `copy_all_records`."""

    records: int
    """Number of records in the source, and now in the target."""
    copied: int
    """Number of records that were copied now; the target had the other records already."""
    recall: float | None
    """Share of the true nearest neighbors of some sampled keys that the target finds, 0 to 1; None if there
    are no records."""
    neighbors: int
    """Number of neighbors of each sampled key from which the recall was computed."""
    codes: str | None
    """Name of the codes (short numbers that stand for a key), such as "pq32", to which the target compresses
    the keys of domains with many records; None if it compresses no key."""


def copy_all_records(
    source: Datastore,
    target: Datastore,
    progress: Progress,
    *,
    on_source_batch: OnBatch = lambda ids, keys: None,
    on_target_batch: OnBatch = lambda ids, keys: None,
) -> Transferred:
    """Copy all records of one datastore to another, build the target's indexes, and check the target.

    Records that the target already has, from an interrupted transfer, are not copied again. Records that only
    the target has are deleted. Afterwards every record of the target is compared with the source. Finally the
    recall is measured: the target is searched for some sampled keys, and the result is compared with an exact
    search in numpy.

    Args:
        source: the datastore to copy.
        target: the datastore to fill, open for writing.
        progress: object that shows the progress to the user.
        on_source_batch: function that is called with the ids and keys of each batch of the source, by
            ascending id.
        on_target_batch: function that is called with the ids and keys of each batch of the complete target,
            by ascending id.

    Raises:
        DatastoreError: if the target has other records than the source, or does not find the nearest records
            although it claims an exact search.
    """
    total = source.count()
    queries, copied = _copy_missing(_read_ahead(source, on_source_batch), total, target, progress)
    if isinstance(target, SupportsOptimize):
        progress.start("indexing")
        target.optimize()
        progress.finish()
    failpoint("move.indexed")
    held = _read_ahead(target, on_target_batch)
    nearest = _compare_records(_read_ahead(source), held, total, target, queries, progress)
    records = target.count()
    failpoint("move.compared")
    if not records:
        return Transferred(0, copied, None, 0, target.capabilities.codes)
    found_distances = target.search(queries, nearest.k).distances
    recall = float((found_distances <= nearest.upper_bounds()[:, None]).mean())
    if target.capabilities.exact_search and recall < 1:
        raise DatastoreError(f"a search in the copy does not find the nearest records: {GIVE_UP}")
    return Transferred(records, copied, recall, nearest.k, target.capabilities.codes)


def _copy_missing(
    batches: Iterable[Batch], total: int, target: Datastore, progress: Progress
) -> tuple[Keys, int]:
    """Add missing records to the target, delete its records that the source lacks, and flush the target.

    Args:
        batches: all records of the source in batches (ids, keys, groups), by ascending id.
        total: number of records of the source.
        target: the datastore to fill.
        progress: object that shows the progress to the user.

    Returns:
        A sample of at most `_QUERIES` evenly spaced keys of the source, float32, shape (n, dim); and the
        number of records that were copied.
    """
    present = target.count()
    if present:
        progress.say(f"{min(present, total):,} of {total:,} records are already copied")
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
    """Delete the records of a datastore whose ids are in a range, except records with wanted ids.

    Args:
        target: the datastore, open for writing.
        start: first id of the range.
        stop: last id of the range plus one.
        wanted: ids of records that stay.

    Returns:
        All ids that the datastore had in the range before the call, including the deleted ids, ascending.
    """
    id_batches = [batch[0] for batch in target.iterate(ids=IdRanges([(start, stop)]))]
    ids = np.concatenate(id_batches) if id_batches else np.empty(0, np.int64)
    target.delete(IdRanges.from_ids(ids[~np.isin(ids, wanted)]))
    return ids


def _read_ahead(datastore: Datastore, on_batch: OnBatch = lambda ids, keys: None) -> Iterator[Batch]:
    """Yield all records of a datastore in batches (ids, keys, groups), by ascending id.

    A thread reads the next batch while the caller uses the current batch.

    Args:
        datastore: the datastore to read.
        on_batch: function that is called with the ids and keys of each batch before it is yielded.
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
    """Compare all records of a copy with their source, and find the nearest records of queries exactly.

    Args:
        batches: records of the source in batches (ids, keys, groups), by ascending id.
        held: records of the copy in batches, by ascending id.
        total: number of records of the source.
        target: the datastore with the copy; its metric and capabilities are used.
        queries: query vectors, float32, shape (q, dim).
        progress: object that shows the progress to the user.

    Returns:
        The smallest distances of each query to the records. If the copy has codes, these are distances to the
        decoded keys of the copy, else to the keys of the source.

    Raises:
        DatastoreError: if the copy has other records than the source.
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
    """Read two streams of batches in parallel, and yield pairs of batches with equal numbers of records.

    If the batches of the two streams have different sizes, the larger batch is cut. If one stream has fewer
    records than the other, the last pair has None in place of its batch.

    Args:
        one: batches (ids, keys, groups) of the first stream.
        other: batches of the second stream.
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
    """Return a batch (ids, keys, groups) with some records of another batch.

    Args:
        batch: ids, keys and groups.
        rows: the records to return, as a slice or a mask.
    """
    ids, keys, groups = batch
    return ids[rows], keys[rows], groups[rows]


def _are_equal(ours: Batch, theirs: Batch, capabilities: Capabilities) -> bool:
    """Check whether the records of a copy equal their source, as far as the copy's precision allows.

    Ids and groups must be equal. Keys of the copy may be rounded to half precision or compressed to codes, if
    the engine's capabilities say so.

    Args:
        ours: batch (ids, keys, groups) of the source.
        theirs: batch of the copy.
        capabilities: features of the engine of the copy.
    """
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
        capabilities.codes is not None and _are_codes_plausible(keys, their_keys)
    )


def _are_codes_plausible(keys: Keys, coded: Keys) -> bool:
    """Check whether keys that were compressed and decoded are near enough to the original keys.

    The summed squared distance to the original keys may be at most half of the original keys' summed squared
    distance to their mean, plus a hundredth of their summed squares. Keys of other records would be farther
    away.

    Args:
        keys: original keys, float32, shape (n, dim).
        coded: decoded keys, float32, shape (n, dim).
    """
    lost_distance, spread_distance, size = (
        ((keys - others) ** 2).sum(dtype=np.float64) for others in (coded, keys.mean(0), np.float32(0))
    )
    return bool(lost_distance <= _MAX_LOST_SHARE * spread_distance + _MAX_LOST_OF_SIZE * size)


class _NearestDistances:
    """Finds the k smallest distances of each query to keys that are added in batches.

    Args:
        queries: query vectors, float32, shape (q, dim).
        k: number of distances for each query; 0 finds none.
        metric: metric of the distances.
    """

    def __init__(self, queries: Keys, k: int, metric: Metric) -> None:
        self.k, self._queries, self._metric = k, queries, metric
        self._distances: Distances = np.full((len(queries), k), np.inf, np.float32)

    def add(self, keys: Keys) -> None:
        """Compare the queries with further keys, float32, shape (n, dim)."""
        if self.k:
            both = np.concatenate(
                [self._distances, pairwise_distances(self._queries, keys, self._metric)], axis=1
            )
            self._distances = np.partition(both, self.k - 1, axis=1)[:, : self.k]

    def upper_bounds(self) -> Distances:
        """Return for each query the distance of its k-th nearest key plus a rounding margin, shape (q,)."""
        furthest = self._distances.max(axis=1)
        origin = self._queries.mean(axis=0) if self._metric is Metric.L2 else 0
        scale = ((self._queries - origin) ** 2).sum(axis=1)
        bounds: Distances = furthest + 1e-3 * np.abs(furthest) + 1e-5 * scale
        return bounds
