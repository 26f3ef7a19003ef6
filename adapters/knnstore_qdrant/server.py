"""The points of a collection on a server, over REST."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from qdrant_client import models

from knnstore.datastore import Groups, Ids, Keys, Metric
from knnstore_qdrant.client import ClientPoints, Result
from knnstore_qdrant.collection import Collection

_BATCH_BYTES = 1 << 20  # of vectors in a request; as text they are up to five times longer
_BATCH_POINTS = 1000


class ServerPoints(ClientPoints):
    """The points of a collection on a server.

    Args:
        collection: open.
        dim: number of components of a vector.
        metric: how distances are measured.
    """

    def __init__(self, collection: Collection, dim: int, metric: Metric) -> None:
        super().__init__(collection.client, dim, metric, collection.options)
        self._collection = collection
        self.attempts = collection.attempts
        self.exact_search = collection.options.exact
        self.exact_keys = collection.exact_keys
        self._senders = ThreadPoolExecutor(collection.options.parallel, thread_name_prefix="qdrant")

    def read(self, call: Callable[[], Result]) -> Result:
        """Make a call that changes nothing, again if it fails."""
        return self.attempts.read(call)

    def change(self, call: Callable[[], models.UpdateResult]) -> None:
        """Make a call that changes points, again until the server says that it is done."""
        self.attempts.change(lambda: call().status.value)

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
        super().upsert(ids, keys, groups)

    def optimize(self) -> None:
        """Wait until the server has indexed everything."""
        self._collection.index()

    def close(self) -> None:
        """Let indexing go on, if it was put off, and close the connections."""
        self._senders.shutdown()
        try:
            self._collection.let_index()
        finally:
            super().close()

    def _params(self, k: int, exact: bool) -> models.SearchParams:
        rescored = models.QuantizationSearchParams(rescore=True, oversampling=self._options.oversampling)
        return models.SearchParams(
            hnsw_ef=max(k, self._options.ef),
            exact=exact,
            quantization=rescored if self._collection.quantized and not exact else None,
        )
