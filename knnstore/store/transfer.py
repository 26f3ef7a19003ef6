"""Moving the keys to another engine, without the model."""

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from knnstore.datastore import Datastore
from knnstore.errors import DatastoreError
from knnstore.failpoints import failpoint
from knnstore.progress import Progress

_BATCH = 8192
_HALF_PRECISION = 2**-10  # relative step of the coarser of two engines


def copy_records(source: Datastore, target: Datastore, progress: Progress) -> None:
    """Copy every record with its group, durably, and compare the two datastores record by record.

    Args:
        source: only read.
        target: empty, opened for writing.
        progress: hears of each batch.

    Raises:
        DatastoreError: the target gives back something else than was put in.
    """
    progress.start("copying", total=source.count(), unit="rec")
    for ids, keys, groups in source.iterate(batch_size=_BATCH):
        target.add(ids, keys, groups)
        progress.advance(len(ids))
        failpoint("move.copied")
    target.flush()
    progress.finish()
    progress.start("comparing", total=source.count(), unit="rec")
    for ours, theirs in zip_longest(_rebatched(source), _rebatched(target)):
        if ours is None or theirs is None or not _same(ours, theirs):
            raise DatastoreError("the copy differs from its source; the store stays where it is")
        progress.advance(len(ours[0]))
    progress.finish()
    failpoint("move.compared")


def _rebatched(datastore: Datastore) -> Iterator[tuple[np.ndarray, ...]]:
    """Every record in batches of one size: where an engine's own batches end is its own affair."""
    waiting: list[tuple[np.ndarray, ...]] = []
    rows = 0
    for batch in datastore.iterate(batch_size=_BATCH):
        waiting.append(batch)
        rows += len(batch[0])
        if rows >= _BATCH:
            whole = tuple(np.concatenate(columns) for columns in zip(*waiting, strict=True))
            yield tuple(column[:_BATCH] for column in whole)
            waiting, rows = [tuple(column[_BATCH:] for column in whole)], rows - _BATCH
    if rows:
        yield tuple(np.concatenate(columns) for columns in zip(*waiting, strict=True))


def _same(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    (ids, keys, groups), (their_ids, their_keys, their_groups) = ours, theirs
    return (
        np.array_equal(ids, their_ids)
        and np.array_equal(groups, their_groups)
        and np.allclose(keys, their_keys, rtol=_HALF_PRECISION, atol=1e-6)
    )
