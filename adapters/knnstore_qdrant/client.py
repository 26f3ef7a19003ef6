"""Points reached through qdrant-client, over REST or in its memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from qdrant_client import QdrantClient, models

from knnstore.datastore import Groups, Ids, Keys, Metric, Neighbors, positions_of
from knnstore_qdrant.conditions import GROUP, POSITION, Condition
from knnstore_qdrant.options import Options
from knnstore_qdrant.points import distances_of

Result = TypeVar("Result")

DISTANCES = {Metric.L2: models.Distance.EUCLID, Metric.IP: models.Distance.DOT}
"""What Qdrant calls the metrics."""


class ClientPoints(ABC):
    """The points of one collection, as qdrant-client's own calls give them.

    A subclass says how a call is made: beside others, and again after a failure.

    Args:
        client: where the collection is.
        dim: number of components of a vector.
        metric: how distances are measured.
        options: the adapter's parameters.
    """

    exact_search = False
    exact_keys = True
    persistent = True
    shared_writers = True

    def __init__(self, client: QdrantClient, dim: int, metric: Metric, options: Options) -> None:
        self._client, self._dim, self._metric, self._options = client, dim, metric, options
        self._name = options.collection

    @abstractmethod
    def read(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes nothing."""

    @abstractmethod
    def change(self, call: Callable[[], models.UpdateResult]) -> None:
        """Make a call that changes points."""

    def upsert(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points, replacing those whose id is present."""
        batch = models.Batch(
            ids=ids.tolist(),
            vectors=keys.tolist(),
            payloads=[
                {GROUP: group, POSITION: position}
                for group, position in zip(groups.tolist(), positions_of(ids).tolist(), strict=True)
            ],
        )
        self.change(lambda: self._client.upsert(self._name, batch, wait=True))

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query."""
        chosen, params = self._filter(condition), self._params(k, exact)
        requests = [
            models.QueryRequest(query=query, limit=k, filter=chosen, params=params)
            for query in queries.tolist()
        ]
        answers = self.read(lambda: self._client.query_batch_points(self._name, requests))
        found = Neighbors.nothing(len(queries), k)
        for row, answer in enumerate(answers):
            hits = answer.points
            found.ids[row, : len(hits)] = [hit.id for hit in hits]
            found.distances[row, : len(hits)] = [hit.score for hit in hits]
        return distances_of(found, self._metric)

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        selector = models.FilterSelector(filter=filter_of(condition))
        self.change(lambda: self._client.delete(self._name, selector, wait=True))

    def count(self, condition: Condition | None) -> int:
        """How many points there are."""
        chosen = self._filter(condition)
        return self.read(lambda: self._client.count(self._name, count_filter=chosen, exact=True)).count

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`."""
        chosen = self._filter(condition)
        records, _ = self.read(
            lambda: self._client.scroll(
                self._name, chosen, limit, offset=first, with_payload=keys, with_vectors=keys
            )
        )
        known: list[Any] = records if keys else []
        return (
            np.array([record.id for record in records], np.int64),
            np.array([record.vector for record in known], np.float32).reshape(len(known), self._dim),
            np.array([record.payload[GROUP] for record in known], np.int32),
        )

    def flush(self) -> None:  # noqa: B027 - a default that a subclass may keep
        """Do nothing: each change was completed when it returned."""

    def optimize(self) -> None:  # noqa: B027 - likewise
        """Do nothing."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _params(self, k: int, exact: bool) -> models.SearchParams | None:
        return models.SearchParams(hnsw_ef=max(k, self._options.ef), exact=exact)

    def _filter(self, condition: Condition | None) -> models.Filter | None:
        return None if condition is None else filter_of(condition)


def filter_of(condition: Condition) -> models.Filter:
    """Translate a condition."""
    if condition.groups:
        match = models.MatchAny(any=list(condition.groups))
        return models.Filter(must=[models.FieldCondition(key=GROUP, match=match)])
    should: list[models.Condition] = [
        models.FieldCondition(key=POSITION, range=models.Range(gte=start, lt=stop))
        for start, stop in condition.positions
    ]
    if condition.ids:
        should.append(models.HasIdCondition(has_id=list(condition.ids)))
    return models.Filter(should=should)
