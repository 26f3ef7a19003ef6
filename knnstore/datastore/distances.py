"""Exact distances between vectors: all pairs, row by row, and the nearest rows of a matrix.

`pairwise` and `nearest_rows` multiply matrices, `paired` subtracts row by row.
"""

from typing import Any, TypeVar

import numpy as np

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.neighbors import Neighbors

BLOCK_VALUES = 1 << 22
"""Number of vector components that are compared row by row in one step: 16 MiB of float32."""

_PRODUCT_SIZE = 1 << 23  # largest number of entries of a (queries, keys) product in memory

Array = TypeVar("Array", bound=Any)
"""A numpy array or a torch tensor."""


def pairwise(queries: Array, keys: Array, metric: Metric | str) -> Array:
    """Compute the distance of every query to every key by multiplication; errors are about 1e-6 of q² + x².

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim), n >= 1; on the same device.
        metric: the distance.

    Returns:
        float32, shape (q, n); L2 distances are at least 0.
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


def paired(queries: Keys, keys: Keys, metric: Metric) -> Distances:
    """Compute distances row by row from the differences, which is exact even for nearly equal vectors.

    Args:
        queries: float32, shape (n, dim), or (dim,) to compare one query with all keys.
        keys: float32, shape (n, dim).
        metric: the distance.

    Returns:
        float32, shape (n,).
    """
    distances: Distances
    if metric is Metric.IP:
        distances = -np.einsum("...d,...d->...", keys, queries)
    else:
        difference = keys - queries
        distances = np.einsum("nd,nd->n", difference, difference)
    return distances


def nearest_rows(
    queries: Keys, keys: Keys, k: int, metric: Metric, norms: Distances | None = None
) -> Neighbors:
    """Find the k nearest rows of a matrix in blocks, as exactly as `pairwise`.

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim).
        k: number of rows to find for each query, >= 1.
        metric: the distance.
        norms: squared norms of the keys, shape (n,). Given only if the keys are already centered; with None
            the function centers them for L2 and computes the norms.

    Returns:
        Row numbers and distances, shape (q, k), nearest first; padded with -1 and +inf if n < k.
    """
    found = Neighbors.nothing(len(queries), k)
    k = min(k, len(keys))
    if not k:
        return found
    origin: Keys | np.float32 = np.float32(0)
    if norms is None:
        origin = keys.mean(axis=0) if metric is Metric.L2 else origin
        keys = keys - origin
        norms = np.einsum("nd,nd->n", keys, keys)
    step = max(1, _PRODUCT_SIZE // len(keys))
    for start in range(0, len(queries), step):
        some = queries[start : start + step] - origin
        distances = (-2 * some if metric is Metric.L2 else -some) @ keys.T
        if metric is Metric.L2:
            distances += norms
        nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
        distances = np.take_along_axis(distances, nearest, axis=1)
        order = np.argsort(distances, axis=1)
        distances = np.take_along_axis(distances, order, axis=1)
        if metric is Metric.L2:  # equal for all keys of a query, so added after the selection
            distances += np.einsum("qd,qd->q", some, some)[:, None]
            np.maximum(distances, 0, out=distances)  # rounding can make the sum negative
        found.ids[start : start + step, :k] = np.take_along_axis(nearest, order, axis=1)
        found.distances[start : start + step, :k] = distances
    return found
