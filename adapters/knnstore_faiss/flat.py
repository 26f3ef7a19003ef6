"""Search without an index, by FAISS: it compares and chooses on all cores."""

import faiss
import numpy as np

from knnstore.datastore import Distances, Ids, Keys, Metric, Neighbors
from knnstore.datastore import nearest_rows as nearest_rows_by_numpy

# FAISS multiplies matrices only from a number of queries on, 20 by default, and compares row by row
# below: 4 to 6 times slower even for the 16 to 256 queries of a small batch.
faiss.cvar.distance_compute_blas_threshold = 1


def nearest_rows(queries: Keys, keys: Keys, k: int, metric: Metric, norms: Distances) -> Neighbors:
    """Find the k nearest rows of a matrix; see `knnstore.datastore.nearest_rows`."""
    if len(queries) == 1:  # a product with one vector, for which numpy takes half the time
        return nearest_rows_by_numpy(queries, keys, k, metric, norms)
    rows = np.empty((len(queries), k), np.int64)
    distances = np.empty((len(queries), k), np.float32)
    shape = (keys.shape[1], len(queries), len(keys), k)
    queries_at, keys_at = faiss.swig_ptr(queries), faiss.swig_ptr(keys)
    distances_at, rows_at = faiss.swig_ptr(distances), faiss.swig_ptr(rows)
    if metric is Metric.L2:  # faiss.knn would compute the norms of all keys every time
        faiss.knn_L2sqr(queries_at, keys_at, *shape, distances_at, rows_at, faiss.swig_ptr(norms))
    else:
        faiss.knn_inner_product(queries_at, keys_at, *shape, distances_at, rows_at)
    return found_by_faiss(rows, distances, metric)


def found_by_faiss(ids: Ids, distances: Distances, metric: Metric) -> Neighbors:
    """Take over the arrays of a FAISS search, which pads with -1 at the largest float."""
    if metric is Metric.IP:
        np.negative(distances, out=distances)
    else:
        np.maximum(distances, 0, out=distances)  # x² + y² - 2xy rounds below zero
    if len(ids) and ids[:, -1].min() < 0:
        distances[ids < 0] = np.inf
    return Neighbors(ids, distances)
