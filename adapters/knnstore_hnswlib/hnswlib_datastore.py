"""The hnswlib adapter: durable key segments; large segments are searched with graphs.

`Policy` has the parameters, `Members` maps the nodes of a graph to rows, `GraphIndex` searches one segment,
and `HnswlibDatastore` is the adapter.
"""

import errno
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import hnswlib
import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import (
    Datastore,
    Distances,
    EmbeddedDatastore,
    IdRanges,
    Keys,
    KeySegments,
    MappedColumns,
    MappedFile,
    Metric,
    Mode,
    Neighbors,
    Segment,
    StoredKeys,
    checked_params,
    compare_rows,
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
"""A segment has a graph if it has more than `exact_up_to` / `_SMALL_SHARE` rows."""
_ROWS_AT_ONCE = 1 << 16
"""Number of rows that are converted at once."""
_ROWS_PER_CANDIDATE = 160
"""Number of rows that are compared with a query in the time of one candidate of a graph search (measured)."""
_QUERIES_PER_READING = 14
"""Number of queries that are compared with rows in the time in which the rows are read (measured)."""
_OVER_FETCHED = 1.05
"""With a filter, number of fetched nodes, as a multiple of the nodes with k matching rows on average."""
_MIN_OVER_FETCHED = 32
"""With a filter, number of nodes that are fetched in addition."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, and the choices that follow from them.

    Args:
        M: number of links of a row, twice that in the lowest layer; more links find more neighbors and take
            more memory.
        ef_construction: number of candidates for the links of a row; more make a better graph, more slowly.
        ef: smallest number of candidates of a search; at least k are used.
        exact_up_to: number of rows of a group up to which it is searched exactly, without a graph.
    """

    M: int = 16
    ef_construction: int = 200
    ef: int = 200
    exact_up_to: int = 1 << 16

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> "Policy":
        """Return the policy for the parameters that a user gave; omitted parameters have their defaults.

        Raises:
            ConfigError: a parameter is unknown or has a bad value.
        """
        accepted = {field.name: field.default for field in fields(cls)}
        minima = {"M": 2, "ef_construction": 1, "ef": 1, "exact_up_to": 0}
        policy = cls(**checked_params("hnswlib", params, accepted, minima=minima))
        if policy.M > _LARGEST_M:
            raise ConfigError(f"hnswlib: M must be at most {_LARGEST_M}, got {policy.M}")
        return policy

    @property
    def graph_parameters(self) -> dict[str, Any]:
        """Parameters with which a graph is built, in the form that the manifest keeps."""
        return {"hnswlib": {"M": self.M, "ef_construction": self.ef_construction}}

    def is_group_indexed(self, group_rows: int) -> bool:
        """Check whether a group with `group_rows` live rows is searched with graphs."""
        return group_rows > self.exact_up_to

    def has_graph(self, rows: int, group_rows: int) -> bool:
        """Check whether a segment with `rows` rows in a group with `group_rows` live rows has a graph."""
        return self.is_group_indexed(group_rows) and rows >= self.exact_up_to // _SMALL_SHARE


def find_first_equal(keys: StoredKeys) -> NDArray[np.int64]:
    """Return for each row the number of the first row with the same key, int64, shape (n,).

    Equal keys share one node of a graph. Of 300 equal keys, hnswlib would link each key to 32 others and to
    nothing else. A search that reaches these keys would not leave them, and a search that starts elsewhere
    would not find them: with 50 equal keys among 20 000 of a language model, recall@64 was 0.83. Text that
    repeats itself has hundreds of equal keys.
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
    """Map from each node of a graph to the rows of a segment that have the node's key.

    Args:
        rows: the rows to map to, for example the live rows.
        first: result of `find_first_equal` for all rows; the number of a node is its first row.
    """

    def __init__(self, rows: IdRanges, first: NDArray[np.int64]) -> None:
        self.rows = rows
        numbers = rows.ids()
        nodes = first[numbers]
        self._rows = numbers[np.argsort(nodes, kind="stable")]
        self.size = len(numbers)
        """Number of rows."""
        self.counts: NDArray[np.int64] = np.bincount(nodes, minlength=len(first))
        """Number of rows of each node, shape (n,); 0 for a number that is not a node."""
        self._starts = np.cumsum(self.counts) - self.counts
        self._any_row = np.append(self._rows, -1)[self._starts]
        self.nodes = int(np.count_nonzero(self.counts))
        """Number of nodes with at least one row."""
        self._every_node_once = self.nodes == len(numbers) == len(first)

    def nearest(self, nodes: NDArray[np.int64], distances: Distances, k: int) -> Neighbors:
        """Convert the nodes that a search found to the k nearest rows, shape (q, k).

        A node without rows is skipped, and a node with several rows gives all of them. The ids of the result
        are row numbers; rows are padded if there are fewer than k.

        Args:
            nodes: nodes found for each query, nearest first, shape (q, f).
            distances: distances of the nodes, shape (q, f).
            k: number of rows, >= 1.
        """
        if self._every_node_once:
            return Neighbors(nodes[:, :k], distances[:, :k]).padded(k)
        counts = self.counts[nodes]
        neighbors = Neighbors(self._any_row[nodes[:, :k]], distances[:, :k].copy()).padded(k)
        # Queries whose first k nodes have one row each are done.
        rest = np.flatnonzero((counts[:, :k] != 1).any(axis=1) | (nodes.shape[1] < k))
        if len(rest):
            neighbors.put(rest, self._expand_nodes(nodes[rest], distances[rest], counts[rest], k))
        return neighbors

    def _expand_nodes(
        self, nodes: NDArray[np.int64], distances: Distances, counts: NDArray[np.int64], k: int
    ) -> Neighbors:
        """Return the first k rows of nodes of which some have no row or several rows; see `nearest`.

        Args:
            nodes: nodes found for each query, nearest first, shape (q, f).
            distances: distances of the nodes, shape (q, f).
            counts: number of rows of each node, shape (q, f).
            k: number of rows.
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
        neighbors = Neighbors.nothing(len(nodes), k)
        neighbors.ids[target] = self._rows[starts + offset][is_used]
        neighbors.distances[target] = np.repeat(distances[query, position], counts)[is_used]
        return neighbors


def build_graph(segment: Segment, policy: Policy, dim: int, metric: Metric, path: Path) -> None:
    """Build a graph over the distinct keys of a segment, deleted rows included, and write it to a file.

    Args:
        segment: the segment.
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
        [_squared_norms(keys[batch].astype(np.float32)) for batch in batches] if metric is Metric.IP else []
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
    """Searches one segment with the graph file that the segment's entry in the manifest names.

    Raises:
        FileNotFoundError: the file does not exist; a newer manifest may have replaced it.
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
        """Replace the segment by a newer version, with other live rows; no search may run meanwhile."""
        self.segment = segment
        self._live = Members(segment.live_rows(), self._first)
        self._last_filter: tuple[IdRanges | None, Members] = None, self._live
        dead = self._nodes[(self._live.counts[self._nodes] == 0) & ~self._deleted[self._nodes]]
        for node in dead.tolist():
            self._graph.mark_deleted(node)
        self._deleted[dead] = True

    def matching(self, ids: IdRanges | None) -> Members:
        """Return the live rows of the segment by node; with `ids` only the rows of these records.

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
        """Find approximately the k nearest of the matching rows for each query; see `SegmentIndex.search`.

        Rows are padded only if fewer than k rows match.
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
            neighbors.put(short, repeated)
        return neighbors

    def _search_nodes(
        self, queries: Keys, k: int, matching: Members, fetched: int, *, is_exact_allowed: bool
    ) -> Neighbors:
        """Find the k nearest matching rows among the `fetched` nearest nodes of the graph.

        If all nodes would be fetched, or if exact search is allowed and faster, all matching rows are
        compared with the queries instead.

        Args:
            queries: float32, shape (q, dim), q >= 1.
            k: number of neighbors.
            matching: rows that may be returned.
            fetched: number of nodes to fetch from the graph for each query.
            is_exact_allowed: compare all matching rows if that is faster.

        Returns:
            Neighbors with record ids; padded if too few of the fetched nodes have a matching row.
        """
        # hnswlib visits at least `fetched` nodes that are not deleted, and deleted nodes on the way.
        visited = max(fetched, self._ef) * len(self._nodes) / max(1, self._live.nodes)
        rows = (1 + _QUERIES_PER_READING / len(queries)) * matching.size
        if fetched >= self._live.nodes or (is_exact_allowed and rows < _ROWS_PER_CANDIDATE * visited):
            return compare_rows(self.segment, matching.rows, queries, k, self._metric)
        return self._search_graph(queries, k, matching, fetched).named(self._columns.ids)

    def _search_graph(self, queries: Keys, k: int, matching: Members, fetched: int) -> Neighbors:
        """Find the k nearest matching rows among the `fetched` nearest nodes of the graph.

        The ids of the returned neighbors are row numbers of the segment. A query that reaches fewer than
        `fetched` nodes has only missing neighbors.
        """
        vectors = queries
        if self._metric is Metric.IP:
            vectors = np.column_stack([queries, np.zeros(len(queries), np.float32)])
        try:
            nodes, distances = self._graph.knn_query(vectors, fetched)
        except RuntimeError:  # one query that reaches too few nodes makes hnswlib refuse the whole batch
            if len(queries) == 1:
                return Neighbors.nothing(1, k)
            halves = [self._search_graph(half, k, matching, fetched) for half in np.array_split(queries, 2)]
            return Neighbors.joined(halves, axis=0)
        if self._metric is Metric.IP:
            distances -= 1  # hnswlib's distance is 1 - qx
        return matching.nearest(nodes.view(np.int64), distances, k)


def _squared_norms(keys: Keys) -> Distances:
    """Return the squared norm of each key, float32, shape (n,)."""
    norms: Distances = np.einsum("nd,nd->n", keys, keys)
    return norms


class HnswlibDatastore(EmbeddedDatastore):
    """Vectors in a local folder, searched with hnswlib; approximate in large groups.

    Args:
        segments: the open folder.
        dim: number of components of a vector.
        metric: metric of the distances.
        policy: chooses the graphs to build and how much of them to search.
    """

    merge_ratio = 2

    def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: Policy) -> None:
        super().__init__(segments, dim, metric)
        self._policy = policy

    @classmethod
    def open(
        cls, location: str | Path, *, dim: int, metric: Metric = Metric.L2, mode: Mode = "a", **params: Any
    ) -> Self:
        """Open or create a datastore in a folder; see `Datastore.open`.

        The parameters are `M`, `ef_construction`, `ef` and `exact_up_to`; see `Policy`.
        """
        metric, policy = Metric(metric), Policy.from_params(params)
        return cls(KeySegments(Path(location), dim, metric, mode), dim, metric, policy)

    @classmethod
    def record_size(cls, dim: int, **params: Any) -> int:
        """Return the largest size of a record in bytes, with its node; see `SupportsSize.record_size`."""
        return 2 * dim + 16 + 4 * (dim + 1) + 12 * Policy.from_params(params).M + 32

    def _is_indexed(self, group_rows: int) -> bool:
        """Check whether a group with `group_rows` live rows is searched with graphs."""
        return self._policy.is_group_indexed(group_rows)

    def _index_parameters(self, rows: int, group_rows: int) -> dict[str, Any] | None:
        """Return the parameters of a segment's graph; None if the segment is searched exactly."""
        return self._policy.graph_parameters if self._policy.has_graph(rows, group_rows) else None

    def _build_index(self, segment: Segment, parameters: dict[str, Any], path: Path) -> None:
        """Build the graph of a segment and write it to a file; see `build_graph`."""
        build_graph(segment, self._policy, self._dim, self._metric, path)

    def _open_index(self, segment: Segment, parameters: dict[str, Any]) -> GraphIndex | None:
        """Open the graph of a segment; returns None if another engine built the index."""
        if "hnswlib" not in parameters:
            return None
        return GraphIndex(self._segments.root, segment, self._dim, self._metric, self._policy)


_conforms: type[Datastore] = HnswlibDatastore  # a type checker compares every signature here
