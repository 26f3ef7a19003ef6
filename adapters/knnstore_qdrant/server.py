"""The points of a collection on a server, over REST."""

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from qdrant_client import models

from knnstore.datastore import Groups, Ids, Keys, Metric, Neighbors, positions_of
from knnstore_qdrant.collection import Collection
from knnstore_qdrant.conditions import GROUP, POSITION, Condition
from knnstore_qdrant.points import batch_of, neighbors_of

_BATCH_BYTES = 1 << 20  # of vectors in a request; as text they are up to five times longer
_BATCH_POINTS = 1000


class ServerPoints:
    """The points of an open collection on a server, as qdrant-client's own calls give them."""

    shared_writers = True

    def __init__(self, collection: Collection, dim: int, metric: Metric) -> None:
        self._collection, self._dim, self._metric = collection, dim, metric
        self._client, self._options, self._name = collection.client, collection.options, collection.name
        self.attempts = collection.attempts
        self.exact_search = collection.options.exact
        self.exact_keys = collection.exact_keys
        self._senders = ThreadPoolExecutor(collection.options.parallel, thread_name_prefix="qdrant")

    def upsert(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points, in batches beside each other."""
        self._collection.will_add(len(ids))
        size = min(_BATCH_POINTS, max(1, _BATCH_BYTES // (4 * self._dim)))
        batches = [slice(start, start + size) for start in range(0, len(ids), size)]
        sent = [self._senders.submit(self.send, ids[rows], keys[rows], groups[rows]) for rows in batches]
        wait(sent, return_when=FIRST_EXCEPTION)
        for future in sent:  # after a failure the rest is not begun; what is under way is waited for
            future.cancel()
        wait(sent)
        for future in sent:
            if not future.cancelled():
                future.result()

    def send(self, ids: Ids, keys: Keys, groups: Groups) -> None:
        """Store points with one request."""
        batch = models.Batch(
            ids=ids.tolist(),
            vectors=keys.tolist(),
            payloads=[
                {GROUP: group, POSITION: position}
                for group, position in zip(groups.tolist(), positions_of(ids).tolist(), strict=True)
            ],
        )
        self.attempts.change(lambda: self._client.upsert(self._name, batch, wait=True).status.value)

    def query(self, queries: Keys, k: int, condition: Condition | None, *, exact: bool) -> Neighbors:
        """The k points nearest to each query."""
        chosen = None if condition is None else filter_of(condition)
        params = self._params(k, exact)
        requests = [
            models.QueryRequest(query=query, limit=k, filter=chosen, params=params)
            for query in queries.tolist()
        ]
        answers = self.attempts.read(lambda: self._client.query_batch_points(self._name, requests))
        return neighbors_of([answer.points for answer in answers], k, self._metric)

    def delete(self, condition: Condition) -> None:
        """Remove points."""
        selector = models.FilterSelector(filter=filter_of(condition))
        self.attempts.change(lambda: self._client.delete(self._name, selector, wait=True).status.value)

    def count(self) -> int:
        """How many points there are."""
        return self.attempts.read(lambda: self._client.count(self._name, exact=True)).count

    def scroll(
        self, first: int, limit: int, condition: Condition | None, *, keys: bool
    ) -> tuple[Ids, Keys, Groups]:
        """The points with the least ids >= `first`."""
        chosen = None if condition is None else filter_of(condition)
        records, _ = self.attempts.read(
            lambda: self._client.scroll(
                self._name, chosen, limit, offset=first, with_payload=keys, with_vectors=keys
            )
        )
        return batch_of(records, self._dim, keys=keys)

    def flush(self) -> None:
        """Do nothing: each change was completed when it returned."""

    def optimize(self) -> None:
        """Wait until the server has indexed everything."""
        self._collection.index()

    def verify(self) -> list[str]:
        """Find nothing: a server checks its own."""
        return []

    def close(self) -> None:
        """Let indexing go on, if it was put off, and close the connections."""
        self._senders.shutdown()
        try:
            self._collection.let_index()
        finally:
            self._client.close()

    def _params(self, k: int, exact: bool) -> models.SearchParams:
        rescored = models.QuantizationSearchParams(rescore=True, oversampling=self._options.oversampling)
        return models.SearchParams(
            hnsw_ef=max(k, self._options.ef),
            exact=exact,
            quantization=rescored if self._collection.quantized and not exact else None,
        )


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
