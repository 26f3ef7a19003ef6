"""Visits: distances between queries and all records of a cell that these queries search.

A cell is a cluster of nearby records; see `SupportsCells`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids


class Visit(NamedTuple):
    """Distances of every one of m queries to every one of r records, which come from one or several cells."""

    queries: NDArray[np.int64]
    """Row numbers of the queries, shape (m,), without duplicates."""

    ids: Ids
    """Ids of the records, shape (r,), without duplicates."""

    distances: Distances
    """Distances as `Metric` measures them, float32, shape (m, r)."""

    ranks: NDArray[np.int64] | None = None
    """Rank of this cell among the cells that each query searched, shape (m,): 0 is the nearest.

    None if unknown.
    """


class Visits(NamedTuple):
    """A stack of b visits in arrays of equal shape. A GPU computes many visits at once, a CPU often one."""

    queries: NDArray[np.int64]
    """Row numbers of the queries of each visit, shape (b, m); padded with -1. Visits may share queries."""

    ids: Ids
    """Record ids of each visit, shape (b, r); padded with -1."""

    distances: Any
    """Distances as `Metric` measures them, float32, shape (b, m, r); +inf for padded queries or records. A
    numpy array, or a torch tensor on the engine's device."""

    ranks: NDArray[np.int64] | None = None
    """Rank of each visit's cell among the cells that each query searched, shape (b, m): 0 is the nearest.

    None if unknown. With ranks, sums over fewer cells can be computed from the same visits.
    """

    @classmethod
    def of(cls, visit: Visit) -> Self:
        """Return a stack that consists of one `Visit`, without copying the arrays of the visit."""
        queries, ids, distances, ranks = visit
        return cls(queries[None], ids[None], distances[None], None if ranks is None else ranks[None])

    def apart(self) -> Iterator[Visit]:
        """Yield each visit of the stack separately, as numpy arrays without padding.

        Visits without a query or without a record are skipped. Distances on a device are copied from there.
        """
        distances = self.distances
        distances = distances if isinstance(distances, np.ndarray) else distances.cpu().numpy()
        for index, (queries, ids, visit_distances) in enumerate(
            zip(self.queries, self.ids, distances, strict=True)
        ):
            is_query, is_record = queries >= 0, ids >= 0
            if is_query.all() and is_record.all():
                visit = Visit(queries, ids, visit_distances)
            else:
                visit = Visit(queries[is_query], ids[is_record], visit_distances[np.ix_(is_query, is_record)])
            if self.ranks is not None:
                visit = visit._replace(ranks=self.ranks[index, is_query])
            if visit.distances.size:
                yield visit

    def is_by_row(self, queries: int) -> bool:
        """Check whether the stack has exactly one visit for each query, in the order of the queries.

        Also returns False if the visits have no record, or if the distances are not in a numpy array.

        Args:
            queries: number of queries.
        """
        in_order = self.queries.shape == (queries, 1) and bool((self.queries[:, 0] == range(queries)).all())
        return in_order and self.ids.shape[1] > 0 and isinstance(self.distances, np.ndarray)

    def only(self, records: NDArray[np.bool_]) -> "Visits":
        """Return a copy in which only the records selected by a mask remain; the others become padding.

        Args:
            records: mask of the records of each visit, shape (b, r).
        """
        distances = self.distances
        distances = distances.copy() if isinstance(distances, np.ndarray) else distances.clone()
        distances.swapaxes(1, 2)[~records] = np.inf
        return self._replace(ids=np.where(records, self.ids, -1), distances=distances)

    def meeting(self) -> NDArray[np.int64]:
        """Return the row numbers of the queries that were compared with at least one record, shape (n,).

        The result is unsorted. A query with several visits occurs several times.
        """
        queries = self.queries[(self.ids >= 0).any(axis=1)].ravel()
        return queries[queries >= 0]


def apart(visits: Iterable[Visits]) -> list[Visit]:
    """Divide stacks of visits into single `Visit` objects without padding; see `Visits.apart`."""
    return [visit for stack in visits for visit in stack.apart()]
