"""The index of one group."""

import logging
from collections.abc import Sequence
from pathlib import Path

from knnstore.datastore import IdRanges, Keys, Metric
from knnstore.datastore.files import StoredFile
from knnstore.datastore.rows import Segment
from knnstore.errors import CorruptDatastoreError
from knnstore_faiss.exact import ExactIndex
from knnstore_faiss.inverted import InvertedIndex
from knnstore_faiss.policy import Policy
from knnstore_faiss.results import Found, merge

_log = logging.getLogger(__name__)


class GroupIndex:
    """Searches the records of one group: large segments by their indexes, the rest exactly.

    Args:
        root: the datastore's directory.
        dim: number of components of a key.
        metric: how distances are measured.
        policy: how far to search.
    """

    def __init__(self, root: Path, dim: int, metric: Metric, policy: Policy) -> None:
        self._root = root
        self._dim = dim
        self._metric = metric
        self._policy = policy
        self._exact = ExactIndex(dim, metric)
        self._inverted: list[InvertedIndex] = []
        self._damaged: set[StoredFile] = set()
        self._segments: Sequence[Segment] = ()
        self._live = 0

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search.

        A segment whose index is damaged is searched exactly until `optimize` builds it again.

        Raises:
            FileNotFoundError: an index file is gone.
        """
        self._segments = ()
        known = {index.file: index for index in self._inverted}
        inverted, rest = [], []
        for segment in segments:
            index = self._index_of(segment, known)
            if index is None:
                rest.append(segment)
            else:
                inverted.append(index)
        self._exact.update(rest)
        self._inverted = inverted
        self._live = sum(segment.live for segment in segments)
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Found:
        """Find the k nearest records of each query, of all or of those with some ids."""
        parts = [
            index.search(queries, k, ids, share=index.segment.live / self._live) for index in self._inverted
        ]
        parts.append(self._exact.search(queries, k, ids))
        return merge(parts, len(queries), k)

    def _index_of(self, segment: Segment, known: dict[StoredFile, InvertedIndex]) -> InvertedIndex | None:
        entry = segment.entry
        if self._policy.index == "exact" or entry is None or entry.index is None:
            return None
        if entry.index.file in self._damaged:
            return None
        index = known.get(entry.index.file)
        if index is not None:
            index.update(segment)
            return index
        try:
            return InvertedIndex(self._root, segment, self._dim, self._metric, self._policy)
        except CorruptDatastoreError as error:
            self._damaged.add(entry.index.file)
            _log.warning("%s (its keys are searched exactly until optimize builds it again)", error)
            return None
