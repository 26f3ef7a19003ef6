"""Exact distances between vectors: each with each, row by row, and the nearest rows of a matrix."""

from typing import Any, TypeVar

import numpy as np

from knnstore.datastore.arrays import Distances, Keys, Metric
from knnstore.datastore.neighbors import Neighbors

BLOCK_VALUES = 1 << 22
"""How many components of vectors to compare row by row at once: 16 MiB of float32."""

_PRODUCT_SIZE = 1 << 23  # numbers of a product of queries and keys that are in memory at once

Array = TypeVar("Array", bound=Any)
"""A numpy array or a torch tensor."""


def pairwise(queries: Array, keys: Array, metric: Metric | str) -> Array:
    """Measure each query against each key by multiplication; errors are about 1e-6 of q² + x².

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim), n >= 1; on the same device.
        metric: how distances are measured.

    Returns:
        float32, shape (q, n).
    """
    distances: Array
    if metric == Metric.IP:
        distances = -(queries @ keys.T)
    else:  # the same from any origin; from one amid the keys, rounding loses least in q² - 2qx + x²
        middle = keys.mean(0)
        queries, keys = queries - middle, keys - middle
        distances = (-2 * queries) @ keys.T
        distances += (keys * keys).sum(1)
        distances += (queries * queries).sum(1)[:, None]
        distances = distances.clip(min=0)
    return distances


def paired(queries: Keys, keys: Keys, metric: Metric) -> Distances:
    """Measure queries against keys row by row, by their differences: exact however near they are.

    Args:
        queries: float32, shape (n, dim), or (dim,) for one query against all.
        keys: float32, shape (n, dim).
        metric: how distances are measured.

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
    """Find the k nearest rows of a matrix, as exactly as `pairwise`, in blocks.

    Args:
        queries: float32, shape (q, dim).
        keys: float32, shape (n, dim).
        k: how many, >= 1.
        metric: how distances are measured.
        norms: squared norms of the keys, shape (n,), where the origin is amid them already.

    Returns:
        Row numbers and distances, shape (q, k), padded where there are fewer rows.
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
        if metric is Metric.L2:  # the same for all keys of a query, so only now
            distances += np.einsum("qd,qd->q", some, some)[:, None]
            np.maximum(distances, 0, out=distances)  # the sum rounds below zero
        found.ids[start : start + step, :k] = np.take_along_axis(nearest, order, axis=1)
        found.distances[start : start + step, :k] = distances
    return found
