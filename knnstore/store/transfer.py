"""Moving the keys to another engine, without the model."""

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
    pairs = zip_longest(source.iterate(batch_size=_BATCH), target.iterate(batch_size=_BATCH))
    for ours, theirs in pairs:
        if ours is None or theirs is None or not _same(ours, theirs):
            raise DatastoreError("the copy differs from its source; the store stays where it is")
        progress.advance(len(ours[0]))
    progress.finish()
    failpoint("move.compared")


def _same(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    (ids, keys, groups), (their_ids, their_keys, their_groups) = ours, theirs
    return (
        np.array_equal(ids, their_ids)
        and np.array_equal(groups, their_groups)
        and np.allclose(keys, their_keys, rtol=_HALF_PRECISION, atol=1e-6)
    )
