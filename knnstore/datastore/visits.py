"""What queries meet in the cells that they visit."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.arrays import Distances, Ids


class Visit(NamedTuple):
    """Some queries and the records of a cell, or of several: each is measured against each."""

    queries: NDArray[np.int64]
    """Numbers of the queries, shape (m,), each once."""

    ids: Ids
    """The records, shape (r,), each once."""

    distances: Distances
    """As `Metric` measures them, float32, shape (m, r)."""

    ranks: NDArray[np.int64] | None = None
    """How many of a query's cells are nearer than this one, shape (m,); None where that is not known."""


class Visits(NamedTuple):
    """Visits of one shape beside each other, as an accelerator makes them; on a processor often one alone."""

    queries: NDArray[np.int64]
    """Of each visit, shape (b, m); -1 where one has fewer. Several visits may be by the same query."""

    ids: Ids
    """Of each visit, shape (b, r); -1 where one has fewer."""

    distances: Any
    """As `Metric` measures them, float32, shape (b, m, r): +inf where a query or a record is missing. An
    array, or a tensor of torch on the device where the engine computes."""

    ranks: NDArray[np.int64] | None = None
    """How many of a query's cells are nearer, shape (b, m); None where that is not known. With it sums over
    fewer cells come out of the same pass."""

    @classmethod
    def of(cls, visit: Visit) -> Self:
        """One alone."""
        queries, ids, distances, ranks = visit
        return cls(queries[None], ids[None], distances[None], None if ranks is None else ranks[None])

    def apart(self) -> Iterator[Visit]:
        """Each that met something alone, in the processor's memory, without what is missing."""
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
        """Whether these are a visit of each of so many queries, in their order, in the processor's memory."""
        in_order = self.queries.shape == (queries, 1) and bool((self.queries[:, 0] == range(queries)).all())
        return in_order and self.ids.shape[1] > 0 and isinstance(self.distances, np.ndarray)

    def only(self, records: NDArray[np.bool_]) -> "Visits":
        """The same with some of the records, given by a mask of shape (b, r); the others are missing."""
        distances = self.distances
        distances = distances.copy() if isinstance(distances, np.ndarray) else distances.clone()
        distances.swapaxes(1, 2)[~records] = np.inf
        return self._replace(ids=np.where(records, self.ids, -1), distances=distances)

    def meeting(self) -> NDArray[np.int64]:
        """The queries that meet a record, in any order, some perhaps several times."""
        queries = self.queries[(self.ids >= 0).any(axis=1)].ravel()
        return queries[queries >= 0]


def apart(visits: Iterable[Visits]) -> list[Visit]:
    """All visits, each alone."""
    return [visit for some in visits for visit in some.apart()]
