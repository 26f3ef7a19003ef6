"""The index of one group."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from knnstore.datastore import IdRanges, Keys, Metric
from knnstore.datastore.exact import ExactIndex
from knnstore.datastore.files import StoredFile
from knnstore.datastore.results import Found, merge
from knnstore.datastore.rows import Segment
from knnstore.errors import CorruptDatastoreError
from knnstore_hnswlib.graph import GraphIndex
from knnstore_hnswlib.policy import Policy

_log = logging.getLogger(__name__)

_SHARE_MARGIN = 1.25  # what a graph is asked for beside its share of the rows


class GroupIndex:
    """Searches the records of one group: large segments by their graphs, the rest exactly.

    Args:
        root: the datastore's directory.
        dim: number of components of a key.
        metric: how distances are measured.
        policy: how far to search.
        damaged: grows by each file that turns out to be damaged or lost.
    """

    def __init__(
        self, root: Path, dim: int, metric: Metric, policy: Policy, damaged: set[StoredFile]
    ) -> None:
        self._root = root
        self._dim = dim
        self._metric = metric
        self._policy = policy
        self._exact = ExactIndex(dim, metric)
        self._graphs: list[GraphIndex] = []
        self._missing: set[StoredFile] = set()
        self._damaged = damaged
        self._segments: Sequence[Segment] = ()

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments of the last `update`."""
        return self._segments is segments

    def update(self, segments: Sequence[Segment]) -> None:
        """Search exactly these segments from now on; must not run beside a search.

        A segment whose graph is damaged or lost is searched exactly until `optimize` builds it again.

        Raises:
            FileNotFoundError: the file of a graph is gone, the first time.
        """
        self._segments = ()
        known = {graph.file: graph for graph in self._graphs}
        indexed = self._policy.indexes(sum(segment.live for segment in segments))
        graphs, rest = [], []
        for segment in segments:
            graph = self._graph_of(segment, known) if indexed else None
            if graph is None:
                rest.append(segment)
            else:
                graphs.append(graph)
        self._exact.update(rest)
        self._graphs = graphs
        self._segments = segments

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Found:
        """Find the k nearest records of each query, of all or of those with some ids."""
        searched = [(graph, graph.matching(ids)) for graph in self._graphs]
        searched = [(graph, matching) for graph, matching in searched if matching.size]
        if not searched or len(queries) == 0:
            return self._exact.search(queries, k, ids)
        exact = self._exact.count(ids)
        total = exact + sum(matching.size for _, matching in searched)
        parts = [self._exact.search(queries, k, ids)] if exact else []
        # Each graph is asked for its share of the neighbours, and for all k only where it may hold more.
        shares = [
            min(k, math.ceil(_SHARE_MARGIN * k * matching.size / total) + self._policy.ef)
            for _, matching in searched
        ]
        parts += [
            graph.search(queries, share, matching)
            for (graph, matching), share in zip(searched, shares, strict=True)
        ]
        found = merge(parts, len(queries), k)
        unsure = np.zeros(len(queries), bool)
        for (_, matching), share, part in zip(searched, shares, parts[-len(searched) :], strict=True):
            if share < min(k, matching.size):
                unsure |= part.distances[:, -1] < found.distances[:, -1]
        again = np.flatnonzero(unsure)
        if len(again):
            rest = [Found(part.ids[again], part.distances[again]) for part in parts[: -len(searched)]]
            rest += [graph.search(queries[again], k, matching) for graph, matching in searched]
            more = merge(rest, len(again), k)
            found.ids[again], found.distances[again] = more.ids, more.distances
        return found

    def _graph_of(self, segment: Segment, known: dict[StoredFile, GraphIndex]) -> GraphIndex | None:
        entry = segment.entry
        if entry is None or entry.index is None or "hnswlib" not in entry.index.parameters:
            return None
        file = entry.index.file
        if file in self._damaged:
            return None
        if file in known:
            known[file].update(segment)
            return known[file]
        try:
            return GraphIndex(self._root, segment, self._dim, self._metric, self._policy)
        except FileNotFoundError as error:
            if file not in self._missing:  # a writer may have replaced it: the caller looks again
                self._missing.add(file)
                raise
            problem = f"{error.filename} is missing"
        except CorruptDatastoreError as error:
            problem = str(error)
        self._damaged.add(file)
        _log.warning("%s (its keys are searched exactly until optimize builds it again)", problem)
        return None
