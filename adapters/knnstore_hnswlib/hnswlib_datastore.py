"""The hnswlib adapter: records in files (segments). Large segments are searched with graphs.

A segment is an immutable set of files with records of one group, which is a numbered set of records such as a
domain. Row i of a segment is its i-th record. A graph (HNSW) links each key to near keys; equal keys share
one node. `Policy` has the parameters, `Members` maps the nodes of a graph to rows, `GraphIndex` searches one
segment, and `HnswlibDatastore` is the adapter.
"""

import errno
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hnswlib
import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import (
    Datastore,
    Distances,
    EmbeddedDatastore,
    IdRanges,
    Keys,
    MappedColumns,
    MappedFile,
    Metric,
    Neighbors,
    Segment,
    StoredKeys,
    compare_rows,
    validate_params,
)
from knnstore.errors import ConfigError, CorruptDatastoreError, DatastoreError

# Measured with keys of a language model (the last FFN's input of a 4-layer GPT-2, dim 256) over technical
# prose, 256 queries of other documents a batch, by hnswlib 0.8 with ef=128 on two busy cores.
# Time is relative to exact search over the same rows; recall is against exact search.
#
#      rows    k=1024: time  recall    k=64: time  recall
#    16 384             4.5    .996           .69    .997
#    32 768             2.3    .995           .44    .989
#    65 536              .8    .994           .16    .995
#   100 000              .9    .993           .17    .997
#   200 000              .36   .992           .08    .993
#
# With ef=200 time at k=64 is 1.4 times as long and recall .999. Graphs differ from run to run, because
# several threads build them. In most graphs every query finds neighbors; in some, one query in 256 finds none
# of its 64.
_LARGEST_M = 512
_SMALL_SHARE = 8
"""A segment of a large group has a graph if it has at least `exact_up_to` / `_SMALL_SHARE` records."""
_ROWS_AT_ONCE = 1 << 16
"""Number of keys that are converted in one step."""
_ROWS_PER_CANDIDATE = 160
"""Measured time of a graph search for one candidate: as long as comparing a query with this number of
keys."""
_QUERIES_PER_READING = 14
"""Measured time of reading a key from its file: as long as comparing the key with this number of queries."""
_OVER_FETCHED = 1.05
"""With a filter, the number of fetched nodes is this factor times the number of nodes that have k matching
records on average, plus `_MIN_OVER_FETCHED`."""
_MIN_OVER_FETCHED = 32
"""Number of nodes that a search with a filter fetches in addition; see `_OVER_FETCHED`."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The parameters of the hnswlib adapter, and the choices that follow from them.

    Args:
        M: number of links of a key in the graph, twice as many in the lowest layer. More links find more
            neighbors and take more memory.
        ef_construction: number of candidates for the links of a key. More candidates make a better graph, and
            building it slower.
        ef: smallest number of candidates of a search; at least k candidates are used.
        exact_up_to: largest number of records of a group that is searched exactly, without a graph.
    """

    M: int = 16
    ef_construction: int = 200
    ef: int = 200
    exact_up_to: int = 1 << 16

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> "Policy":
        """Check the parameters that a user gave, and return the policy.

        Args:
            params: parameters by name; omitted parameters have their defaults.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        accepted = {field.name: field.default for field in fields(cls)}
        minima = {"M": 2, "ef_construction": 1, "ef": 1, "exact_up_to": 0}
        policy = cls(**validate_params("hnswlib", params, accepted, minima=minima))
        if policy.M > _LARGEST_M:
            raise ConfigError(f"hnswlib: M must be at most {_LARGEST_M}, got {policy.M}")
        return policy


def find_first_equal(keys: StoredKeys) -> NDArray[np.int64]:
    """Return for each key the index of the first key that equals it, int64, shape (n,).

    The result for a key without an earlier equal key is the key's own index.

    Equal keys share one node of a graph. With a node for each key, hnswlib would link each of 300 equal keys
    to 32 of the others and to nothing else. A search that reaches these keys would not leave them, and a
    search that starts elsewhere would not find them. With 50 equal keys among 20 000 keys of a language
    model, recall@64 was 0.83. Text that repeats itself has hundreds of equal keys.

    Args:
        keys: float16 or float32, shape (n, dim).
    """
    words = keys.view(f"u{keys.dtype.itemsize}")
    factors = np.random.default_rng(0).integers(0, 2**64, keys.shape[1], np.uint64)
    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        block = words[start : start + _ROWS_AT_ONCE].astype(np.uint64)
        hashes[start : start + len(block)] = block @ factors  # modulo 2**64
    _, first_rows, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first: NDArray[np.int64] = first_rows[inverse]
    later = np.flatnonzero(first != np.arange(len(keys)))
    for start in range(0, len(later), _ROWS_AT_ONCE):
        rows = later[start : start + _ROWS_AT_ONCE]
        different = rows[(words[rows] != words[first[rows]]).any(axis=1)]
        first[different] = different  # other keys with the same hash
    return first


class Members:
    """Map from each node of a graph to the rows (record numbers in a segment) that have the node's key.

    A segment is a set of files with records; row i is its i-th record. A node stands for one or more records
    with equal keys. The number of a node is the first row with its key.

    Args:
        rows: row numbers, as ranges, that may be returned, for example without deleted records.
        first: number of the node of each row of the segment, a result of `find_first_equal`, shape (n,).
    """

    def __init__(self, rows: IdRanges, first: NDArray[np.int64]) -> None:
        self.rows = rows
        numbers = rows.ids()
        nodes = first[numbers]
        self._rows = numbers[np.argsort(nodes, kind="stable")]
        self.size = len(numbers)
        """Number of rows that may be returned."""
        self.counts: NDArray[np.int64] = np.bincount(nodes, minlength=len(first))
        """Number of these rows of each node, by the node's number, shape (n,); 0 for a number that is no
        node."""
        self._starts = np.cumsum(self.counts) - self.counts
        self._any_row = np.append(self._rows, -1)[self._starts]
        self.nodes = int(np.count_nonzero(self.counts))
        """Number of nodes with at least one of these rows."""
        self._every_node_once = self.nodes == len(numbers) == len(first)

    def convert_nodes_to_neighbors(self, nodes: NDArray[np.int64], distances: Distances, k: int) -> Neighbors:
        """Convert the nodes that a graph search has found to the k nearest rows of the segment.

        A node without allowed rows is skipped, and a node with several rows gives all its rows.

        Args:
            nodes: numbers of the nodes found for each query, nearest first, shape (q, f).
            distances: distances of the nodes, shape (q, f).
            k: number of rows to return for each query, >= 1.

        Returns:
            Row numbers (in `ids`) and distances, each of shape (q, k), nearest first. If the nodes of a query
            have fewer than k allowed rows, each missing neighbor has row number -1 and distance +inf.
        """
        if self._every_node_once:
            return Neighbors(nodes[:, :k], distances[:, :k]).pad_columns(k)
        counts = self.counts[nodes]
        neighbors = Neighbors(self._any_row[nodes[:, :k]], distances[:, :k].copy()).pad_columns(k)
        # Queries whose first k nodes have one row each are done.
        rest = np.flatnonzero((counts[:, :k] != 1).any(axis=1) | (nodes.shape[1] < k))
        if len(rest):
            neighbors.replace_rows(rest, self._expand_nodes(nodes[rest], distances[rest], counts[rest], k))
        return neighbors

    def _expand_nodes(
        self, nodes: NDArray[np.int64], distances: Distances, counts: NDArray[np.int64], k: int
    ) -> Neighbors:
        """Replace each found node by its allowed rows, and return the first k rows of each query.

        This is the slow path of `convert_nodes_to_neighbors`, for nodes that have no allowed row or several
        rows.

        Args:
            nodes: numbers of the nodes found for each query, nearest first, shape (q, f).
            distances: distances of the nodes, shape (q, f).
            counts: number of allowed rows of each node, shape (q, f).
            k: number of rows to return for each query.

        Returns:
            Row numbers (in `ids`) and distances, each of shape (q, k), nearest first. Each missing neighbor
            has row number -1 and distance +inf.
        """
        # A flat list of all rows, ordered by query and by node.
        first_column = np.cumsum(counts, axis=1) - counts  # column of the first row of each node
        query, position = np.nonzero((counts > 0) & (first_column < k))
        counts, first_column = counts[query, position], first_column[query, position]
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        column = np.repeat(first_column, counts) + offset
        is_used = column < k
        target = np.repeat(query, counts)[is_used], column[is_used]
        starts = np.repeat(self._starts[nodes[query, position]], counts)
        neighbors = Neighbors.all_missing(len(nodes), k)
        neighbors.ids[target] = self._rows[starts + offset][is_used]
        neighbors.distances[target] = np.repeat(distances[query, position], counts)[is_used]
        return neighbors


def build_graph(segment: Segment, policy: Policy, dim: int, metric: Metric, path: Path) -> None:
    """Build a graph of the distinct keys of a segment, and write the graph to a file.

    Keys of deleted records are included.

    Args:
        segment: the segment, which is a set of files with records of one group.
        policy: parameters of the graph.
        dim: number of components of a key.
        metric: metric of the distances.
        path: file to create.

    Raises:
        OSError: the disk is full or broken.
        DatastoreError: hnswlib cannot build the graph.
    """
    keys = segment.columns.keys
    nodes = np.unique(find_first_equal(keys))
    batches = [nodes[start : start + _ROWS_AT_ONCE] for start in range(0, len(nodes), _ROWS_AT_ONCE)]
    graph = hnswlib.Index("l2", dim + (metric is Metric.IP))
    # For inner products, an additional component sqrt(c - |x|²) gives all keys the same norm. Then the
    # nearest keys in L2 have the largest inner products (Bachrach et al., 2014). In a graph that is linked by
    # inner products, keys of different norms are hard to reach: 0.65 instead of 0.96 of 200 neighbors among
    # 50 clusters.
    norms = (
        [_compute_squared_norms(keys[batch].astype(np.float32)) for batch in batches]
        if metric is Metric.IP
        else []
    )
    largest = max((values.max() for values in norms), default=0)
    try:
        graph.init_index(len(nodes), M=policy.M, ef_construction=policy.ef_construction)
        for number, batch in enumerate(batches):
            vectors = keys[batch].astype(np.float32)
            if metric is Metric.IP:
                vectors = np.column_stack([vectors, np.sqrt(largest - norms[number])])
            graph.add_items(vectors, batch)
    except RuntimeError as error:
        raise DatastoreError(f"hnswlib cannot build a graph over {len(nodes)} keys: {error}") from error
    graph.save_index(str(path))
    # hnswlib does not report a failed write; it only stops writing.
    written, expected = path.stat().st_size, graph.index_file_size()
    if written != expected:
        raise OSError(errno.ENOSPC, f"only {written} of {expected} bytes were written", str(path))


class GraphIndex:
    """Searches one segment (a set of files with records of one group) with its index, a graph.

    Args:
        root: the datastore's directory.
        segment: the segment, which has a graph file.
        dim: number of components of a key.
        metric: metric of the distances.
        policy: parameters of the adapter.

    Raises:
        FileNotFoundError: the graph file does not exist; a writer may have replaced it.
        CorruptDatastoreError: the graph file is damaged.
    """

    def __init__(self, root: Path, segment: Segment, dim: int, metric: Metric, policy: Policy) -> None:
        assert segment.index is not None
        assert isinstance(segment.columns, MappedColumns)
        self.file = segment.index.file
        self._columns = segment.columns
        self._metric = metric
        self._ef = policy.ef
        mapped = MappedFile(root, self.file)
        mapped.check()  # hnswlib crashes on a damaged file
        self._graph = hnswlib.Index("ip" if metric is Metric.IP else "l2", dim + (metric is Metric.IP))
        try:
            self._graph.load_index(str(mapped.path))
        except RuntimeError as error:
            raise CorruptDatastoreError(f"{mapped.path} cannot be read: {error}") from error
        self._graph.set_ef(policy.ef)  # `ef` is not in the file
        self._nodes = np.sort(np.array(self._graph.get_ids_list(), np.int64))
        self._first = np.arange(segment.rows)
        if len(self._nodes) < segment.rows:
            self._first = find_first_equal(segment.columns.keys)
        if not np.array_equal(self._nodes, np.unique(self._first)):
            raise CorruptDatastoreError(f"{mapped.path} belongs to other keys")
        self._deleted = np.zeros(segment.rows, bool)
        self.update(segment)

    def update(self, segment: Segment) -> None:
        """Set a newer version of the segment. No search may run during the call."""
        self.segment = segment
        self._live = Members(segment.live_rows(), self._first)
        self._last_filter: tuple[IdRanges | None, Members] = None, self._live
        dead = self._nodes[(self._live.counts[self._nodes] == 0) & ~self._deleted[self._nodes]]
        for node in dead.tolist():
            self._graph.mark_deleted(node)
        self._deleted[dead] = True

    def select_records(self, ids: IdRanges | None) -> Members:
        """Select live records by id (None: all), and return them as a map from nodes to rows.

        The result for the last `ids` is cached.
        """
        if ids is None:
            return self._live
        last_ids, matching = self._last_filter
        if last_ids != ids:  # cached, because decoding searches with the same filter for each token
            matching = Members(self.segment.live_rows(ids), self._first)
            self._last_filter = ids, matching
        return matching

    def search(self, queries: Keys, k: int, matching: Members) -> Neighbors:
        """Find approximately the k nearest of the selected records for each query; see `SegmentIndex.search`.

        If at least k records are selected, no neighbor is missing: a query that finds too few is repeated
        with more nodes.
        """
        available = min(k, matching.size)
        fetched = k
        if matching.nodes < self._live.nodes:
            fetched = math.ceil(_OVER_FETCHED * k * self._live.nodes / matching.nodes) + _MIN_OVER_FETCHED
        # If most rows match, the first attempt always uses the graph: on many cores it is faster than
        # estimated.
        is_exact_allowed = 2 * matching.size <= self.segment.rows
        neighbors = self._search_nodes(queries, k, matching, fetched, is_exact_allowed=is_exact_allowed)
        # Queries for which too few of the fetched nodes match or can be reached are repeated with more nodes.
        while fetched < self._live.nodes:
            short = np.flatnonzero(neighbors.ids[:, available - 1] < 0)
            if len(short) == 0:
                break
            fetched *= 2
            repeated = self._search_nodes(queries[short], k, matching, fetched, is_exact_allowed=True)
            neighbors.replace_rows(short, repeated)
        return neighbors

    def _search_nodes(
        self, queries: Keys, k: int, matching: Members, fetched: int, *, is_exact_allowed: bool
    ) -> Neighbors:
        """Find the k nearest of the selected records for each query, with the graph or by exact search.

        With the graph, the neighbors are chosen among the nodes that are nearest to the query. Exact search
        compares all selected records with the queries. Exact search is used in two cases: the graph would
        return all its nodes, or exact search is allowed and faster.

        Args:
            queries: query vectors, float32, shape (q, dim), q >= 1.
            k: number of neighbors.
            matching: the selected records.
            fetched: number of nearest nodes to fetch from the graph for each query.
            is_exact_allowed: True allows exact search if it is faster.

        Returns:
            Record ids and distances, each of shape (q, k), nearest first. If the fetched nodes have fewer
            than k selected records, each missing neighbor has id -1 and distance +inf.
        """
        # hnswlib visits at least `fetched` nodes that are not deleted, and deleted nodes on the way.
        visited = max(fetched, self._ef) * len(self._nodes) / max(1, self._live.nodes)
        rows = (1 + _QUERIES_PER_READING / len(queries)) * matching.size
        if fetched >= self._live.nodes or (is_exact_allowed and rows < _ROWS_PER_CANDIDATE * visited):
            return compare_rows(self.segment, matching.rows, queries, k, self._metric)
        return self._search_graph(queries, k, matching, fetched).map_rows_to_ids(self._columns.ids)

    def _search_graph(self, queries: Keys, k: int, matching: Members, fetched: int) -> Neighbors:
        """Find the k nearest selected records among the nearest nodes of the graph.

        Args:
            queries: query vectors, float32, shape (q, dim), q >= 1.
            k: number of neighbors.
            matching: the selected records.
            fetched: number of nearest nodes to fetch from the graph for each query.

        Returns:
            Neighbors with distances and with row numbers of the segment as `ids`, each of shape (q, k),
            nearest first. Each missing neighbor has row number -1 and distance +inf. hnswlib refuses a query
            that reaches fewer than `fetched` nodes of the graph; all its neighbors are missing.
        """
        vectors = queries
        if self._metric is Metric.IP:
            vectors = np.column_stack([queries, np.zeros(len(queries), np.float32)])
        try:
            nodes, distances = self._graph.knn_query(vectors, fetched)
        except RuntimeError:  # one query that reaches too few nodes makes hnswlib refuse the whole batch
            if len(queries) == 1:
                return Neighbors.all_missing(1, k)
            halves = [self._search_graph(half, k, matching, fetched) for half in np.array_split(queries, 2)]
            return Neighbors.concatenate(halves, axis=0)
        if self._metric is Metric.IP:
            distances -= 1  # hnswlib's distance is 1 - qx
        return matching.convert_nodes_to_neighbors(nodes.view(np.int64), distances, k)


def _compute_squared_norms(keys: Keys) -> Distances:
    """Return the squared norm of each key, float32, shape (n,)."""
    norms: Distances = np.einsum("nd,nd->n", keys, keys)
    return norms


class HnswlibDatastore(EmbeddedDatastore):
    """A datastore in a local folder that is searched with hnswlib, approximately in large groups of records.

    The parameters of `open` are those of `Policy`.
    """

    merge_ratio = 2
    _policy: Policy

    @classmethod
    def _make_policy(cls, params: dict[str, Any], dim: int, metric: Metric) -> Policy:
        """Check the parameters that a user gave, and return the policy. Raises ConfigError for bad ones."""
        return Policy.from_params(params)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return the largest number of bytes that a record takes on disk, including its node in a graph.

        Args:
            dim: number of components of a vector.
            **params: parameters of the adapter; `M` decides the size of a node.
        """
        return 2 * dim + 16 + 4 * (dim + 1) + 12 * Policy.from_params(params).M + 32

    def _is_indexed(self, group_rows: int) -> bool:
        """Return True if a group has more records than `exact_up_to`."""
        return group_rows > self._policy.exact_up_to

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return ``{"hnswlib": {"M": ..., "ef_construction": ...}}``; None if the segment needs no graph.

        A segment of a large group has a graph if it has at least 1/8 of `exact_up_to` records.
        """
        if not self._is_indexed(group_rows) or rows < self._policy.exact_up_to // _SMALL_SHARE:
            return None
        return {"hnswlib": {"M": self._policy.M, "ef_construction": self._policy.ef_construction}}

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the graph of a segment, and write it to a file. `parameters` equal those of the policy."""
        build_graph(segment, self._policy, self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> GraphIndex | None:
        """Open the graph file of a segment; None if another engine than hnswlib built the index file."""
        if "hnswlib" not in parameters:
            return None
        return GraphIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = HnswlibDatastore  # a type checker compares every signature here
