"""The index of one group."""

from collections.abc import Sequence

from knnstore.datastore import IdRanges, Keys, Metric
from knnstore.datastore.rows import Segment
from knnstore_faiss.exact import ExactIndex
from knnstore_faiss.results import Found


class GroupIndex:
    """Searches the records of one group.

    Args:
        dim: number of components of a key.
        metric: how distances are measured.
    """

    def __init__(self, dim: int, metric: Metric) -> None:
        self._exact = ExactIndex(dim, metric)
        self._segments: Sequence[Segment] = ()

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search."""
        self._exact.update(segments)
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Found:
        """Find the k nearest records of each query, of all or of those with some ids."""
        return self._exact.search(queries, k, ids)
