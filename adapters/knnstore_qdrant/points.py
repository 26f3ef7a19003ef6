"""What the datastore asks of Qdrant, whichever way it is reached."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from knnstore.datastore import Groups, Ids, Keys, Metric, Neighbors
from knnstore.errors import InvalidVectorError
from knnstore_qdrant.conditions import GROUP, Condition

_ANSWER_BYTES = 8 << 20  # of vectors
_IDS_AT_ONCE = 10_000
_LARGEST = 65504.0  # number in half precision; Qdrant makes infinities of larger ones, which nothing is near


class Points(Protocol):
    """The points of one collection. A condition of None means all of them, and none is ever empty.

    A writing method returns when its change can be seen, or raises when that is not certain.
    """

    exact_search: bool
    """Every search compares with all points."""

    exact_keys: bool
    """Vectors are kept as float32."""

    shared_writers: bool
    """Several processes may write."""

    def upsert(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points, replacing those whose id is present."""
        ...

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query, as `Datastore.search` gives them.

        Args:
            queries: shape (q, dim), q >= 1.
            k: how many.
            condition: among which points.
            exact: compare with all of them instead of walking a graph.
        """
        ...

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        ...

    def count(self) -> int:
        """How many points there are, exactly."""
        ...

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`, ascending; fewer than `limit` only at the end.

        Args:
            first: the least id wanted.
            limit: how many, >= 1.
            condition: among which points.
            keys: whether vectors and groups are wanted; they have no rows otherwise.
        """
        ...

    def flush(self) -> None:
        """Return when all changes so far survive a power loss."""
        ...

    def optimize(self) -> None:
        """Return when all points are indexed."""
        ...

    def verify(self) -> list[str]:
        """What is wrong with what is stored, one line each; a server checks its own."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


def rows_at_once(dim: int) -> int:
    """Points of one answer at most, with vectors."""
    return max(1, _ANSWER_BYTES // (4 * dim))


def scrolled(
    points: Callable[[], Points], limit: int, condition: Condition | None, *, keys: bool = True
) -> Iterator[tuple[Ids, Keys, Groups]]:
    """Yield all points that a condition is true of, so many at once; see `Points.scroll`.

    Args:
        points: gives the points, or raises once they are closed.
        limit: how many, >= 1.
        condition: among which points.
        keys: whether vectors and groups are wanted.
    """
    first, found = 0, limit
    while found >= limit:
        batch = points().scroll(first, limit, condition, keys=keys)
        found = len(batch[0])
        if found:
            first = int(batch[0][-1]) + 1  # now, for what is yielded is the caller's
            yield batch


def ids_where(points: Callable[[], Points], condition: Condition) -> Ids:
    """The ids of all points that a condition is true of."""
    batches = scrolled(points, _IDS_AT_ONCE, condition, keys=False)
    return np.concatenate([np.empty(0, np.int64), *(ids for ids, _, _ in batches)])


def check_range(points: Points, keys: Keys) -> None:
    """Refuse keys that the vectors' datatype cannot hold.

    Raises:
        InvalidVectorError: there is one; names its largest component.
    """
    largest = float(np.abs(keys).max(initial=0))
    if largest > _LARGEST and not points.exact_keys:
        raise InvalidVectorError(
            f"a key has a component of {largest:,.0f}, and datatype float16 ends at {_LARGEST:,.0f}: keep "
            "the keys as float32"
        )


def in_range(points: Points, queries: Keys) -> Keys:
    """Queries cut to what the vectors' datatype can hold: Qdrant converts them to it."""
    return queries if points.exact_keys else np.clip(queries, -_LARGEST, _LARGEST)


def neighbors_of(answers: Sequence[Sequence[Any]], k: int, metric: Metric, *, id_at: str = "id") -> Neighbors:
    """Take over the answers to some queries: hits with an id and Qdrant's score.

    The score is the root of the L2 distance, or the inner product itself.
    """
    found = Neighbors.nothing(len(answers), k)
    for row, hits in enumerate(answers):
        found.ids[row, : len(hits)] = [*map(attrgetter(id_at), hits)]
        found.distances[row, : len(hits)] = [hit.score for hit in hits]
    if metric is Metric.L2:
        np.square(found.distances, out=found.distances)
    else:
        np.negative(found.distances, out=found.distances, where=found.ids >= 0)
    return found


def batch_of(records: Sequence[Any], dim: int, *, keys: bool) -> tuple[Ids, Keys, Groups]:
    """Take over points with an id, a vector and a payload; see `Points.scroll`."""
    known = records if keys else []
    return (
        np.array([record.id for record in records], np.int64),
        np.array([record.vector for record in known], np.float32).reshape(len(known), dim),
        np.array([record.payload[GROUP] for record in known], np.int32),
    )
