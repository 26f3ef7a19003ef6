"""The records of a store as arrays, for methods that look at all of them."""

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Ids, Keys, Metric, positions_from_ids, tokens_from_ids
from knnstore.store import EVERYTHING, Reader, Selection


class StoredRecords:
    """All records of the selected documents as arrays in memory, in the order of the documents and tokens.

    Args:
        reader: the store.
        selection: the documents; they must have at least one record.
    """

    def __init__(self, reader: Reader, selection: Selection = EVERYTHING) -> None:
        batches = list(reader.records(selection))
        self.metric = Metric(reader.identity.metric)
        self.ids: Ids = np.concatenate([batch.ids for batch in batches])
        """Record ids, ascending, int64, shape (n,)."""
        self.keys: Keys = np.concatenate([batch.keys for batch in batches])
        """Keys, float32, shape (n, d)."""
        self.tokens = tokens_from_ids(self.ids)
        """The token that each record predicts, shape (n,)."""
        has_successor = (np.diff(reader.document_numbers(self.ids)) == 0) & (
            np.diff(positions_from_ids(self.ids)) == 1
        )
        rows = np.arange(1, len(self.ids))
        self.successors: NDArray[np.int64] = np.append(np.where(has_successor, rows, -1), -1)
        """Row number of the next record of the same document; -1 for the last record. Int64, shape (n,)."""

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the row number of each record id in these arrays, in the shape of `ids`.

        All ids must be among these records.
        """
        return np.searchsorted(self.ids, ids)
