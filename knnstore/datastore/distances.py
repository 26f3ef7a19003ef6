"""Exact distances between vectors: all pairs, row by row, and the nearest rows of a matrix.

`pairwise_distances` and `find_nearest_rows` multiply matrices, `paired_distances` subtracts row by row.
"""

from typing import Any, TypeVar

import numpy as np

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.neighbors import Neighbors

BLOCK_VALUES = 1 << 22
"""Largest number of float32 components that callers of `paired_distances` pass in one call: 16 MiB."""

_PRODUCT_SIZE = 1 << 23  # largest number of entries of a (queries, keys) product in memory

Array = TypeVar("Array", bound=Any)
"""A numpy array or a torch tensor."""


def pairwise_distances(queries: Array, keys: Array, metric: Metric | str) -> Array:
    """Compute the distance of every query to every key by matrix multiplication.

    Rounding errors are up to about 1e-6 of |query|² + |key|²; use `paired_distances` for more accurate
    distances.

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim), n >= 1; on the device of the queries.
        metric: squared Euclidean distance ("l2") or negated inner product ("ip").

    Returns:
        Distance of query i to key j at [i, j], float32, shape (q, n); L2 distances are at least 0.
    """
    distances: Array
    if metric == Metric.IP:
        distances = -(queries @ keys.T)
    # Distances do not depend on the origin. With the mean key as origin, q² - 2qx + x² loses least to
    # rounding.
    else:
        middle = keys.mean(0)
        queries, keys = queries - middle, keys - middle
        distances = (-2 * queries) @ keys.T
        distances += (keys * keys).sum(1)
        distances += (queries * queries).sum(1)[:, None]
        distances = distances.clip(min=0)
    return distances


def paired_distances(queries: Keys, keys: Keys, metric: Metric) -> Distances:
    """Compute the distance between row i of `queries` and row i of `keys`, for each i.

    L2 distances are computed from the differences of the vectors, so they are accurate even for nearly equal
    vectors.

    Args:
        queries: float32, shape (n, dim), or (dim,) to compare one query with all keys.
        keys: float32, shape (n, dim).
        metric: squared Euclidean distance or negated inner product.

    Returns:
        Distances, float32, shape (n,).
    """
    distances: Distances
    if metric is Metric.IP:
        distances = -np.einsum("...d,...d->...", keys, queries)
    else:
        difference = keys - queries
        distances = np.einsum("nd,nd->n", difference, difference)
    return distances


def find_nearest_rows(
    queries: Keys, keys: Keys, k: int, metric: Metric, norms: Distances | None = None
) -> Neighbors:
    """Find the k nearest rows of a matrix of keys for each query by comparing with every row.

    Rounding errors of the distances are up to about 1e-6 of |query|² + |key|².

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim); n may be 0.
        k: number of rows to find for each query, >= 1.
        metric: squared Euclidean distance (L2) or negated inner product.
        norms: squared norm of each key, shape (n,). The caller must already have subtracted the mean key from
            queries and keys. None computes the norms, and for L2 first subtracts the mean key. This makes
            rounding errors smaller.

    Returns:
        Row numbers (in `ids`) and distances, each of shape (q, k), nearest first. If n < k, each missing
        neighbor has row number -1 and distance +inf.
    """
    neighbors = Neighbors.all_missing(len(queries), k)
    k = min(k, len(keys))
    if not k:
        return neighbors
    origin: Keys | np.float32 = np.float32(0)
    if norms is None:
        origin = keys.mean(axis=0) if metric is Metric.L2 else origin
        keys = keys - origin
        norms = np.einsum("nd,nd->n", keys, keys)
    step = max(1, _PRODUCT_SIZE // len(keys))
    for start in range(0, len(queries), step):
        block = queries[start : start + step] - origin
        distances = (-2 * block if metric is Metric.L2 else -block) @ keys.T
        if metric is Metric.L2:
            distances += norms
        nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
        distances = np.take_along_axis(distances, nearest, axis=1)
        order = np.argsort(distances, axis=1)
        distances = np.take_along_axis(distances, order, axis=1)
        if metric is Metric.L2:  # equal for all keys of a query, so added after the selection
            distances += np.einsum("qd,qd->q", block, block)[:, None]
            np.maximum(distances, 0, out=distances)  # rounding can make the sum negative
        neighbors.ids[start : start + step, :k] = np.take_along_axis(nearest, order, axis=1)
        neighbors.distances[start : start + step, :k] = distances
    return neighbors
