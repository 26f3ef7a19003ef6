"""Which rows of a segment a node of its graph stands for.

Equal keys share a node. Of 300 equal keys hnswlib links each to 32 others and to nothing else: a search
that comes among them does not leave, and one that starts elsewhere does not find them (with 50 such
keys among 20 000 of a language model recall@64 was 0.83). Text that repeats itself has them by the hundred.
"""

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Distances, IdRanges, Neighbors, StoredKeys

_CHUNK = 1 << 16  # rows at a time


def first_of_equal(keys: StoredKeys) -> NDArray[np.int64]:
    """Find the first row that has the same key, for every row of keys; row numbers, shape (n,)."""
    words = keys.view(f"u{keys.dtype.itemsize}")
    factors = np.random.default_rng(0).integers(0, 2**64, keys.shape[1], np.uint64)
    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint64)
        hashes[start : start + len(part)] = part @ factors  # modulo 2**64
    _, at, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first: NDArray[np.int64] = at[inverse]
    later = np.flatnonzero(first != np.arange(len(keys)))
    for start in range(0, len(later), _CHUNK):
        some = later[start : start + _CHUNK]
        other = some[(words[some] != words[first[some]]).any(axis=1)]
        first[other] = other  # equal hashes only
    return first


class Members:
    """Some rows of a segment by the nodes that stand for them.

    Args:
        rows: the rows.
        first: from `first_of_equal`; a node is numbered by its first row.

    Attributes:
        size: how many rows there are.
        counts: how many of them each node stands for, shape (n,); 0 also for what is no node.
        nodes: how many nodes stand for any.
    """

    def __init__(self, rows: IdRanges, first: NDArray[np.int64]) -> None:
        self.rows = rows
        numbers = rows.ids()
        nodes = first[numbers]
        self._rows = numbers[np.argsort(nodes, kind="stable")]
        self.size = len(numbers)
        self.counts: NDArray[np.int64] = np.bincount(nodes, minlength=len(first))
        self._starts = np.cumsum(self.counts) - self.counts
        self._any_row = np.append(self._rows, -1)[self._starts]
        self.nodes = int(np.count_nonzero(self.counts))
        self._every_node_once = self.nodes == len(numbers) == len(first)

    def nearest(self, nodes: NDArray[np.int64], distances: Distances, k: int) -> Neighbors:
        """The first k rows that the nodes found stand for.

        Args:
            nodes: of each query, nearest first, shape (q, f).
            distances: theirs.
            k: how many rows, at least 1.
        """
        if self._every_node_once:
            return Neighbors(nodes[:, :k], distances[:, :k]).padded(k)
        counts = self.counts[nodes]
        found = Neighbors(self._any_row[nodes[:, :k]], distances[:, :k].copy()).padded(k)
        # Only queries that found other nodes than those of one row need more than that.
        others = np.flatnonzero((counts[:, :k] != 1).any(axis=1) | (nodes.shape[1] < k))
        if len(others):
            found.put(others, self._expanded(nodes[others], distances[others], counts[others], k))
        return found

    def _expanded(
        self, nodes: NDArray[np.int64], distances: Distances, counts: NDArray[np.int64], k: int
    ) -> Neighbors:
        # The flat list of all rows: each node's rows follow each other, and so do the nodes of a query.
        before = np.cumsum(counts, axis=1) - counts
        of_query, of_node = np.nonzero((counts > 0) & (before < k))
        counts, before = counts[of_query, of_node], before[of_query, of_node]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        column = np.repeat(before, counts) + within
        kept = column < k
        query = np.repeat(of_query, counts)[kept], column[kept]
        starts = np.repeat(self._starts[nodes[of_query, of_node]], counts)
        found = Neighbors.nothing(len(nodes), k)
        found.ids[query] = self._rows[starts + within][kept]
        found.distances[query] = np.repeat(distances[of_query, of_node], counts)[kept]
        return found
