"""Visits: distances between some queries and all records of a cell, which is a cluster of nearby records.

An engine with cells (`SupportsCells`) returns visits in place of the k nearest records.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids


class Visit(NamedTuple):
    """Distances between m queries and r records, for all pairs of a query and a record.

    The records come from one or several cells (clusters of nearby records) that all m queries search.
    """

    queries: NDArray[np.int64]
    """Row numbers of the queries in the caller's array of queries, shape (m,), without duplicates."""

    ids: Ids
    """Ids of the records, shape (r,), without duplicates."""

    distances: Distances
    """Distances as `Metric` measures them, float32, shape (m, r)."""

    ranks: NDArray[np.int64] | None = None
    """For each query the rank of this cell among the cells that the query searched, shape (m,).

    Rank 0 is the query's nearest cell. None if the engine does not report ranks.
    """


class Visits(NamedTuple):
    """A stack of b visits, padded to equal shape, so that a GPU can compute many visits at once.

    A visit holds the distances of up to m queries to all of up to r records; see `Visit`.
    """

    queries: NDArray[np.int64]
    """Row numbers of the queries of each visit, shape (b, m); padded with -1. A query may be in several
    visits."""

    ids: Ids
    """Record ids of each visit, shape (b, r); padded with -1."""

    distances: Any
    """Distances as `Metric` measures them, float32, shape (b, m, r); +inf for padded queries or records. A
    numpy array, or a torch tensor on the engine's device."""

    ranks: NDArray[np.int64] | None = None
    """For each visit and query the rank of the visit's cell among the cells of the query, shape (b, m).

    Rank 0 is the query's nearest cell. None if the engine does not report ranks. With ranks, the caller can
    compute from the same visits the result of a search of fewer cells.
    """

    @classmethod
    def from_visit(cls, visit: Visit) -> Self:
        """Return a stack that contains only one visit (b = 1). The arrays of the visit are not copied."""
        queries, ids, distances, ranks = visit
        return cls(queries[None], ids[None], distances[None], None if ranks is None else ranks[None])

    def split(self) -> Iterator[Visit]:
        """Yield each visit of the stack separately, as numpy arrays without padding.

        Visits without a query or without a record are skipped. Distances on a GPU are copied to main memory.
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

        Args:
            queries: number of queries.

        Returns:
            True if visit i has only query i, for all queries. False otherwise, and also if the visits have no
            records or the distances are not in a numpy array.
        """
        in_order = self.queries.tolist() == [[query] for query in range(queries)]
        return in_order and self.ids.shape[1] > 0 and isinstance(self.distances, np.ndarray)

    def select_records(self, records: NDArray[np.bool_]) -> "Visits":
        """Return a copy in which only the records that a mask selects remain.

        Each record that is not selected is replaced by padding: id -1 at distance +inf. The shapes of the
        arrays do not change.

        Args:
            records: mask of the records to keep in each visit, shape (b, r).
        """
        distances = self.distances
        distances = distances.copy() if isinstance(distances, np.ndarray) else distances.clone()
        distances.swapaxes(1, 2)[~records] = np.inf
        return self._replace(ids=np.where(records, self.ids, -1), distances=distances)

    def find_nonempty_queries(self) -> NDArray[np.int64]:
        """Return the row numbers of the queries that were compared with at least one record, shape (n,).

        The row numbers are not sorted, and a query in several visits occurs several times.
        """
        queries = self.queries[(self.ids >= 0).any(axis=1)].ravel()
        return queries[queries >= 0]


def split_visits(visits: Iterable[Visits]) -> list[Visit]:
    """Divide stacks of visits into single `Visit` objects, whose numpy arrays have no padding.

    A visit holds the distances between some queries and all records of a cell, which is a cluster of nearby
    records. Visits without a query or without a record are left out. Distances on a GPU are copied to main
    memory.

    Args:
        visits: stacks of visits; without stacks, the result is empty.
    """
    return [visit for stack in visits for visit in stack.split()]


class DeviceVisits(Protocol):
    """Distances of q queries to all records of their nearest cells, on the engine's device, such as a GPU.

    A cell is a cluster of nearby records. The results are matrices with a row for each query and a column for
    each of its records; rows are padded to r columns. No attribute or method waits for the device.
    """

    @property
    def distances(self) -> Any:
        """Distances of each query to its records, in any order, a tensor, float32, shape (q, r).

        Columns without a record have the distance +inf.
        """

    @property
    def tokens(self) -> Any:
        """Token id of each record in `distances`, a tensor, int32, shape (q, r).

        Columns without a record have arbitrary token ids.
        """

    @property
    def largest_token(self) -> int:
        """Upper bound of the token ids of all records."""

    def select_rows(self, rows: Any) -> Self:
        """Return an object with only some of the queries.

        Args:
            rows: the queries to keep: a slice, row numbers or a mask.
        """

    def sum_by_token(self, temperatures: Any, vocabulary: int) -> Any:
        """Compute the kNN weight of each token: the sum of exp((d₀ - d) / T) over the token's records.

        d is the distance of a record, d₀ is the query's smallest distance, and T is a temperature. The sums
        are not normalized.

        Args:
            temperatures: t temperatures of each query, a tensor, float32, shape (q, t), on the device.
            vocabulary: number of tokens, v. A record with a larger token id counts for the last token.

        Returns:
            A tensor, float32, shape (q, t, v); all 0 for a query without records.
        """
