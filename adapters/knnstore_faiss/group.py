"""The index of one group."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
        indexed = self._policy.indexes(sum(segment.live for segment in segments))
        inverted, rest = [], []
        for segment in segments:
            index = self._index_of(segment, known) if indexed else None
            if index is None:
                rest.append(segment)
            else:
                inverted.append(index)
        self._exact.update(rest)
        self._inverted = inverted
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Found:
        """Find the k nearest records of each query, of all or of those with some ids."""
        exact = self._exact.search(queries, k, ids)
        searched = [(index, index.matching(ids)) for index in self._inverted]
        total = self._exact.count(ids) + sum(rows.size for _, rows in searched)
        if not searched or total == 0 or len(queries) == 0:
            return exact
        parts = [index.search(queries, k, rows, share=rows.size / total) for index, rows in searched]
        found = merge([*parts, exact], len(queries), k)
        short = np.flatnonzero(found.ids[:, min(k, total) - 1] < 0)
        if len(short):  # the lists visited did not hold enough matching rows: visit all of them
            rest = queries[short]
            parts = [index.search(rest, k, rows, share=1.0, every_list=True) for index, rows in searched]
            more = merge([*parts, Found(exact.ids[short], exact.distances[short])], len(rest), k)
            found.ids[short], found.distances[short] = more.ids, more.distances
        return found

    def _index_of(self, segment: Segment, known: dict[StoredFile, InvertedIndex]) -> InvertedIndex | None:
        entry = segment.entry
        if entry is None or entry.index is None:
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
