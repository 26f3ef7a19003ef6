"""qdrant-client's memory, for tests: exact, slow, and gone with the handle."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from qdrant_client import QdrantClient, models

from knnstore.datastore import Metric, Mode
from knnstore.errors import DatastoreNotFoundError
from knnstore_qdrant.client import DISTANCES, ClientPoints, Result
from knnstore_qdrant.options import Options


class MemoryPoints(ClientPoints):
    """The points of a collection that nobody else sees."""

    exact_search = True
    persistent = False
    shared_writers = False

    def __init__(self, dim: int, metric: Metric, options: Options) -> None:
        super().__init__(QdrantClient(":memory:"), dim, metric, options)
        self._thread = ThreadPoolExecutor(1)  # it is not made for several, and so each has its turn
        vectors = models.VectorParams(size=dim, distance=DISTANCES[metric])
        self._client.create_collection(self._name, vectors)

    def read(self, call: Callable[[], Result]) -> Result:
        """Make a call after those that came before."""
        return self._thread.submit(call).result()

    def change(self, call: Callable[[], models.UpdateResult]) -> None:
        """Make a call after those that came before."""
        self.read(call)

    def close(self) -> None:
        """Forget everything."""
        self._thread.shutdown()
        super().close()

    def _params(self, k: int, exact: bool) -> None:
        """None, for others would only be warned of."""


def open_memory(dim: int, metric: Metric, mode: Mode, options: Options) -> MemoryPoints:
    """Make a new, empty collection; there is never one to read."""
    if mode == "r":
        raise DatastoreNotFoundError(":memory: keeps nothing to read; use mode 'a'")
    return MemoryPoints(dim, metric, options)
