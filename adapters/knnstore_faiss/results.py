"""What one search of one part returns, and how parts become one."""

from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Distances, Ids, Metric

# FAISS multiplies matrices only from a number of queries on, 20 by default, and compares row by row
# below: 4 to 6 times slower even for the 16 to 256 queries of a small batch.
faiss.cvar.distance_compute_blas_threshold = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Neighbours of each query, nearest first; missing ones are -1 at +inf, at the end of the row."""

    ids: NDArray[np.int64]
    """Record ids or row numbers, shape (q, k)."""

    distances: Distances
    """As the protocol measures them, shape (q, k)."""

    @classmethod
    def nothing(cls, queries: int, k: int) -> "Found":
        """All missing."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), np.inf, np.float32))

    @classmethod
    def of_faiss(cls, ids: Ids, distances: Distances, metric: Metric) -> "Found":
        """Take over the arrays of a FAISS search, which pads with -1 at the largest float."""
        if metric is Metric.IP:
            np.negative(distances, out=distances)
        else:
            np.maximum(distances, 0, out=distances)  # x² + y² - 2xy rounds below zero
        if len(ids) and ids[:, -1].min() < 0:
            distances[ids < 0] = np.inf
        return cls(ids, distances)

    def named(self, ids: Ids) -> "Found":
        """The same with row r called ids[r]."""
        named = ids.take(self.ids, mode="clip")
        if len(named) and self.ids[:, -1].min() < 0:
            named[self.ids < 0] = -1
        return Found(named, self.distances)

    def padded(self, k: int) -> "Found":
        """The same with k columns, at least as many as there are."""
        short = k - self.ids.shape[1]
        if short == 0:
            return self
        wide = Found.nothing(len(self.ids), k)
        wide.ids[:, :-short] = self.ids
        wide.distances[:, :-short] = self.distances
        return wide

    def sort_rows(self, rows: NDArray[np.int64]) -> None:
        """Put some rows in order again, in place, after distances in them changed."""
        order = np.argsort(self.distances[rows], axis=1, kind="stable")
        self.ids[rows] = np.take_along_axis(self.ids[rows], order, axis=1)
        self.distances[rows] = np.take_along_axis(self.distances[rows], order, axis=1)


def merge(parts: Sequence[Found], queries: int, k: int) -> Found:
    """The k nearest of several parts that have no record in common."""
    if not parts:
        return Found.nothing(queries, k)
    if len(parts) == 1 or queries == 0:
        return parts[0].padded(k)
    wide = [part.padded(k) for part in parts]
    distances, ids = faiss.merge_knn_results(
        np.stack([part.distances for part in wide]), np.stack([part.ids for part in wide])
    )
    distances[ids < 0] = np.inf
    return Found(ids, distances)
