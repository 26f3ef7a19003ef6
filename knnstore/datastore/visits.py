"""Visits: distances between queries and all records of the cells that they probe."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids


class Visit(NamedTuple):
    """Distances between queries and the records of one or several cells: every query with every record."""

    queries: NDArray[np.int64]
    """Row numbers of the queries, shape (m,), without duplicates."""

    ids: Ids
    """Ids of the records, shape (r,), without duplicates."""

    distances: Distances
    """Distances as `Metric` measures them, float32, shape (m, r)."""

    ranks: NDArray[np.int64] | None = None
    """For each query the number of its cells that are nearer than this cell, shape (m,); None if unknown."""


class Visits(NamedTuple):
    """A stack of b visits of equal shape. An accelerator makes many at once, a processor often one."""

    queries: NDArray[np.int64]
    """Row numbers of the queries of each visit, shape (b, m); padded with -1. Visits may share queries."""

    ids: Ids
    """Record ids of each visit, shape (b, r); padded with -1."""

    distances: Any
    """Distances as `Metric` measures them, float32, shape (b, m, r); +inf for padded queries or records. A
    numpy array, or a torch tensor on the engine's device."""

    ranks: NDArray[np.int64] | None = None
    """For each query the number of its cells that are nearer, shape (b, m); None if unknown. With ranks, sums
    over fewer cells can be computed from the same visits."""

    @classmethod
    def of(cls, visit: Visit) -> Self:
        """Return a stack of one visit."""
        queries, ids, distances, ranks = visit
        return cls(queries[None], ids[None], distances[None], None if ranks is None else ranks[None])

    def apart(self) -> Iterator[Visit]:
        """Yield each visit separately, as numpy arrays without padding. Empty visits are skipped."""
        distances = self.distances
        distances = distances if isinstance(distances, np.ndarray) else distances.cpu().numpy()
        for at, (queries, ids, of_each) in enumerate(zip(self.queries, self.ids, distances, strict=True)):
            asked, there = queries >= 0, ids >= 0
            if asked.all() and there.all():
                visit = Visit(queries, ids, of_each)
            else:
                visit = Visit(queries[asked], ids[there], of_each[np.ix_(asked, there)])
            if self.ranks is not None:
                visit = visit._replace(ranks=self.ranks[at, asked])
            if visit.distances.size:
                yield visit

    def is_by_row(self, queries: int) -> bool:
        """Check that each of `queries` queries has exactly one visit, in order, in a numpy array."""
        in_order = self.queries.shape == (queries, 1) and bool((self.queries[:, 0] == range(queries)).all())
        return in_order and self.ids.shape[1] > 0 and isinstance(self.distances, np.ndarray)

    def only(self, records: NDArray[np.bool_]) -> "Visits":
        """Return a copy with only the records of a mask, shape (b, r); the other records become padding."""
        distances = self.distances
        distances = distances.copy() if isinstance(distances, np.ndarray) else distances.clone()
        distances.swapaxes(1, 2)[~records] = np.inf
        return self._replace(ids=np.where(records, self.ids, -1), distances=distances)

    def meeting(self) -> NDArray[np.int64]:
        """Return the row numbers of queries with at least one record, unsorted, maybe with duplicates."""
        queries = self.queries[(self.ids >= 0).any(axis=1)].ravel()
        return queries[queries >= 0]


def apart(visits: Iterable[Visits]) -> list[Visit]:
    """Return all visits of several stacks as separate visits."""
    return [visit for some in visits for visit in some.apart()]
