"""Approximate search: an hnswlib graph over the rows of one segment."""

import errno
import math
from pathlib import Path

import hnswlib
import numpy as np

from knnstore.datastore import (
    Distances,
    IdRanges,
    Keys,
    MappedColumns,
    MappedFile,
    Metric,
    Neighbors,
    Segment,
    compare_rows,
)
from knnstore.errors import CorruptDatastoreError, DatastoreError
from knnstore_hnswlib.nodes import Members, first_of_equal
from knnstore_hnswlib.policy import Policy

_CHUNK = 1 << 16  # rows at a time

# Measured: comparing a query with so many rows takes as long as one candidate of a search in a graph;
# reading the rows takes as long again as comparing them with so many queries.
_ROWS_PER_CANDIDATE = 160
_QUERIES_PER_READING = 14

# With a filter so many times the nodes are fetched that hold k matching rows on average, and these more.
_OVER_FETCHED = 1.05
_LEAST_OVER_FETCHED = 32


def build(segment: Segment, policy: Policy, dim: int, metric: Metric, path: Path) -> None:
    """Write a graph over a segment's distinct keys, dead or not, to a file.

    Raises:
        OSError: the disk is full or broken.
        DatastoreError: hnswlib cannot build it.
    """
    keys = segment.columns.keys
    nodes = np.unique(first_of_equal(keys))
    chunks = [nodes[start : start + _CHUNK] for start in range(0, len(nodes), _CHUNK)]
    graph = hnswlib.Index("l2", dim + (metric is Metric.IP))
    # With one more component sqrt(c - |x|²) all keys have the same norm: then the nearest in L2 are those
    # with the greatest inner product (Bachrach et al., 2014). Linked by inner products themselves, keys of
    # different norms are hard to reach: 0.65 instead of 0.96 of 200 neighbors were found among 50 clusters.
    norms = [_norms(keys[some].astype(np.float32)) for some in chunks] if metric is Metric.IP else []
    largest = max((part.max() for part in norms), default=0)
    try:
        graph.init_index(len(nodes), M=policy.M, ef_construction=policy.ef_construction)
        for number, some in enumerate(chunks):
            vectors = keys[some].astype(np.float32)
            if metric is Metric.IP:
                vectors = np.column_stack([vectors, np.sqrt(largest - norms[number])])
            graph.add_items(vectors, some)
    except RuntimeError as error:
        raise DatastoreError(f"hnswlib cannot build a graph over {len(nodes)} keys: {error}") from error
    graph.save_index(str(path))
    # hnswlib notices no error while it writes; after one it writes nothing more.
    written, wanted = path.stat().st_size, graph.index_file_size()
    if written != wanted:
        raise OSError(errno.ENOSPC, f"only {written} of {wanted} bytes were written", str(path))


class GraphIndex:
    """Searches one segment through the graph that its entry names.

    Raises:
        FileNotFoundError: the file is gone; a newer manifest may have replaced it.
        CorruptDatastoreError: the file is damaged.
    """

    def __init__(self, root: Path, segment: Segment, dim: int, metric: Metric, policy: Policy) -> None:
        assert segment.index is not None
        assert isinstance(segment.columns, MappedColumns)
        self.file = segment.index.file
        self._columns = segment.columns
        self._metric = metric
        self._ef = policy.ef
        mapped = MappedFile(root, self.file)
        mapped.check()  # a damaged file kills the process that parses it
        self._graph = hnswlib.Index("ip" if metric is Metric.IP else "l2", dim + (metric is Metric.IP))
        try:
            self._graph.load_index(str(mapped.path))
        except RuntimeError as error:
            raise CorruptDatastoreError(f"{mapped.path} cannot be read: {error}") from error
        self._graph.set_ef(policy.ef)  # the file does not keep it
        self._nodes = np.sort(np.array(self._graph.get_ids_list(), np.int64))
        self._first = np.arange(segment.rows)
        if len(self._nodes) < segment.rows:
            self._first = first_of_equal(segment.columns.keys)
        if not np.array_equal(self._nodes, np.unique(self._first)):
            raise CorruptDatastoreError(f"{mapped.path} belongs to other keys")
        self._deleted = np.zeros(segment.rows, bool)
        self.update(segment)

    def update(self, segment: Segment) -> None:
        """Search the rows that are live in this version of the segment; must not run beside a search."""
        self.segment = segment
        self._live = Members(segment.live_rows(), self._first)
        self._last_filter: tuple[IdRanges | None, Members] = None, self._live
        died = self._nodes[(self._live.counts[self._nodes] == 0) & ~self._deleted[self._nodes]]
        for node in died.tolist():
            self._graph.mark_deleted(node)
        self._deleted[died] = True

    def matching(self, ids: IdRanges | None) -> Members:
        """The live rows of the segment, of all records or of those with some ids."""
        if ids is None:
            return self._live
        last, matching = self._last_filter
        if last != ids:  # generating text, each token is searched for with the same filter
            matching = Members(self.segment.live_rows(ids), self._first)
            self._last_filter = ids, matching
        return matching

    def search(self, queries: Keys, k: int, matching: Members) -> Neighbors:
        """Find about the k nearest of some rows, and k always where there are k; see `SegmentIndex`."""
        reachable = min(k, matching.size)
        wanted = k
        if matching.nodes < self._live.nodes:
            wanted = math.ceil(_OVER_FETCHED * k * self._live.nodes / matching.nodes) + _LEAST_OVER_FETCHED
        # On many cores graphs gain more than this reckons with: no reason to leave one where most rows match.
        found = self._attempt(queries, k, matching, wanted, compare=2 * matching.size <= self.segment.rows)
        # Where too few of the nodes found match, or too few can be reached, the next attempt goes further.
        while wanted < self._live.nodes:
            short = np.flatnonzero(found.ids[:, reachable - 1] < 0)
            if len(short) == 0:
                break
            wanted *= 2
            found.put(short, self._attempt(queries[short], k, matching, wanted, compare=True))
        return found

    def _attempt(self, queries: Keys, k: int, matching: Members, wanted: int, *, compare: bool) -> Neighbors:
        """Search the graph for some number of nodes, or all rows that match, if allowed and faster."""
        # hnswlib raises its `ef` to what is wanted; deleted nodes are visited, too.
        visited = max(wanted, self._ef) * len(self._nodes) / max(1, self._live.nodes)
        rows = (1 + _QUERIES_PER_READING / len(queries)) * matching.size
        if wanted >= self._live.nodes or (compare and rows < _ROWS_PER_CANDIDATE * visited):
            return compare_rows(self.segment, matching.rows, queries, k, self._metric)
        return self._search_graph(queries, k, matching, wanted).named(self._columns.ids)

    def _search_graph(self, queries: Keys, k: int, matching: Members, wanted: int) -> Neighbors:
        """Search the graph; found.ids are rows. A query that reaches too few nodes finds none."""
        asked = queries
        if self._metric is Metric.IP:
            asked = np.column_stack([queries, np.zeros(len(queries), np.float32)])
        try:
            nodes, distances = self._graph.knn_query(asked, wanted)
        except RuntimeError:  # for one such query hnswlib refuses the answers of all
            if len(queries) == 1:
                return Neighbors.nothing(1, k)
            halves = [self._search_graph(half, k, matching, wanted) for half in np.array_split(queries, 2)]
            return Neighbors.joined(halves, axis=0)
        if self._metric is Metric.IP:
            distances -= 1  # hnswlib's is 1 - qx
        return matching.nearest(nodes.view(np.int64), distances, k)


def _norms(keys: Keys) -> Distances:
    """Squared norms, shape (n,)."""
    norms: Distances = np.einsum("nd,nd->n", keys, keys)
    return norms
