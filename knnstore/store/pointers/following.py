"""Following records into their documents: the record that comes after one, and how far a query is from it.

The next position of a document holds the next record, so these pointers need no space and none can lead
into another document or to anything that was removed. Nor do clusters: what they hold is looked up again.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import BLOCK_VALUES, Ids, Keys, Neighbors, paired, positions_of, ranges_of
from knnstore.store.pointers.clusters import Clusters
from knnstore.store.selection import Selection
from knnstore.store.view import View


def follow(
    view: View, queries: Keys, ids: Ids, selection: Selection, clusters: Clusters | None = None
) -> Neighbors:
    """Measure each query against the records that come after some of others; see `StoreReader.follow`.

    The ids may be of any revision. With clusters, all records of those that the records are in are measured.
    With log weights as `View.search`.
    """
    positions = positions_of(ids) + 1
    documents = view.snapshot.documents_at(positions)
    # What comes before a document's first position is another document, or one that was removed.
    follows = (ids >= 0) & (documents >= 0)
    follows &= positions > np.append(view.snapshot.starts, -1)[documents]
    if clusters is not None:
        positions = clusters.around(view, positions, follows)
        follows = positions >= 0
    return _measure(view, queries, positions, follows, selection)


def _measure(
    view: View,
    queries: Keys,
    positions: NDArray[np.int64],
    wanted: NDArray[np.bool_],
    selection: Selection,
) -> Neighbors:
    """Measure queries against the selected records at some positions; all shapes (q, m)."""
    found = Neighbors.nothing(*positions.shape)
    distinct = np.unique(positions[wanted])
    live = ranges_of(distinct, distinct + 1) & view.scope(selection).live
    stored = list(view.datastore.iterate(ids=live)) if live else []
    if stored:
        known, keys = (np.concatenate(column) for column in list(zip(*stored, strict=True))[:2])
        at = np.minimum(np.searchsorted(positions_of(known), positions), len(known) - 1)
        rows, columns = np.nonzero(wanted & (positions_of(known)[at] == positions))
        step = max(1, BLOCK_VALUES // queries.shape[1])
        for start in range(0, len(rows), step):
            some = rows[start : start + step], columns[start : start + step]
            found.ids[some] = known[at[some]]
            found.distances[some] = paired(queries[some[0]], keys[at[some]], view.datastore.metric)
    return replace(found, log_weights=view.snapshot.log_weights_at(positions_of(found.ids)))
