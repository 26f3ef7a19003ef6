"""Reading the keys of records by id, for engines that only iterate."""

import numpy as np

from knnstore.datastore.arrays import Ids, Keys
from knnstore.datastore.protocol import Datastore
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import RecordNotFoundError


def read_keys(store: Datastore, ids: Ids) -> Keys:
    """Return the keys of records; implements `SupportsGet.get` by iterating over exactly these ids.

    Raises:
        RecordNotFoundError: an id has no record; the message names the smallest such id.
    """
    wanted = np.unique(ids)
    known, keys = np.empty(0, np.int64), np.empty((0, store.dim), np.float32)
    batches = list(store.iterate(ids=IdRanges.of_ids(wanted[wanted >= 0])))
    if batches:
        known, keys = (np.concatenate(column) for column in list(zip(*batches, strict=True))[:2])
    lacking = np.setdiff1d(wanted, known)
    if len(lacking):
        raise RecordNotFoundError(f"the datastore has no record {lacking[0]}")
    return keys[np.searchsorted(known, ids)]
