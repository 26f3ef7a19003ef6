"""Which index for how many rows, and how far to search it."""

import math
from dataclasses import dataclass
from typing import Any

import faiss

from knnstore.datastore import Metric, checked_params
from knnstore.errors import ConfigError

# Measured with keys of a language model (dim 256, 2 threads, 256 queries a batch); the time of a batch
# relative to exact search over the same rows, at the number of probes that `Policy.probes` chooses, and
# the share of the true neighbours found. See benchmarks/search.py.
EXACT_UP_TO = 1 << 15
"""Rows up to which exact search serves: no training, and every neighbour found."""

SCALAR_UP_TO = 1 << 20
"""Rows up to which inverted lists of 8-bit scalars serve; beyond it 4-bit product codes, ranked again."""

_CODES_PER_NEIGHBOUR = 8  # rows to visit for each neighbour wanted
_LEAST_PROBES = 8
_RANKED_AGAIN = 4  # candidates for each neighbour wanted, where codes are coarse
_LEAST_RANKED_AGAIN = 1024
_HNSW_FROM = 1 << 14  # lists from which finding the nearest ones needs an index of its own


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, checked.

    Args:
        index: ``"auto"`` (by size), ``"exact"``, or the FAISS factory string of an inverted file,
            such as ``"IVF1024,SQ8"``.
        nprobe: lists to visit for each query; 0 chooses by k.
        rerank: candidates for each neighbour wanted whose exact distances decide; 0 chooses by
            the index, 1 is off.
        exact_distances: compute the returned distances from the stored keys; else return the
            index's own, which are approximate, and rank nothing again.
    """

    index: str = "auto"
    nprobe: int = 0
    rerank: int = 0
    exact_distances: bool = True

    @classmethod
    def of(cls, params: dict[str, Any], dim: int, metric: Metric) -> "Policy":
        """Check the parameters that a user gave.

        Raises:
            ConfigError: one is unknown or has a bad value.
        """
        accepted = {"index": "auto", "nprobe": 0, "rerank": 0, "exact_distances": True}
        policy = cls(**checked_params("faiss", params, accepted))
        for name in ("nprobe", "rerank"):
            value = getattr(policy, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"faiss: {name} must be an integer >= 0, got {value!r}")
        if not isinstance(policy.exact_distances, bool):
            raise ConfigError(f"faiss: exact_distances must be true or false, got {policy.exact_distances!r}")
        if policy.index not in ("auto", "exact"):
            new_index(policy.index, dim, metric)
        return policy

    def factory(self, rows: int, dim: int) -> str | None:
        """The factory string of the index for so many rows; None for exact search."""
        if self.index == "exact" or (self.index == "auto" and rows <= EXACT_UP_TO):
            return None
        if self.index != "auto":
            return self.index
        lists = 2 ** round(math.log2(2 * math.sqrt(rows)))
        quantizer = f"IVF{lists}_HNSW32" if lists >= _HNSW_FROM else f"IVF{lists}"
        if rows <= SCALAR_UP_TO:
            return f"{quantizer},SQ8"
        codes = next(m for m in range(max(1, dim // 4), dim + 1) if dim % m == 0)
        return f"{quantizer},PQ{codes}x4fs"

    def probes(self, k: float, rows: int, matching: int, lists: int) -> int:
        """How many lists to visit for about the k nearest of the rows that match a filter."""
        unfiltered = self.nprobe or math.ceil(_CODES_PER_NEIGHBOUR * k * lists / rows) + _LEAST_PROBES
        return min(math.ceil(unfiltered * rows / matching), lists)

    def candidates(self, k: int, rows: int, *, coarse: bool) -> int:
        """How many candidates to rank again by their exact distances, k at least."""
        if not self.exact_distances:
            return k
        if self.rerank:
            return min(k * self.rerank, max(rows, k))
        return min(max(_RANKED_AGAIN * k, _LEAST_RANKED_AGAIN), max(rows, k)) if coarse else k


def new_index(factory: str, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Make an empty inverted file that trains in bounded time and alike every time.

    Raises:
        ConfigError: FAISS does not know the factory string or it is no plain inverted file.
    """
    faiss_metric = faiss.METRIC_L2 if metric is Metric.L2 else faiss.METRIC_INNER_PRODUCT
    try:
        index = faiss.index_factory(dim, factory, faiss_metric)
    except (RuntimeError, TypeError) as error:
        reason = str(error).rsplit(": ", 1)[-1]
        raise ConfigError(f"faiss: index {factory!r} does not work for dim {dim}: {reason}") from error
    if not isinstance(index, faiss.IndexIVF):
        raise ConfigError(
            f"faiss: index must be 'auto', 'exact' or an inverted file such as 'IVF1024,SQ8', got {factory!r}"
        )
    if isinstance(index, faiss.IndexIVFPQ):  # else it permutes the codes, for hours; `np` in the string
        index.do_polysemous_training = False
    index.cp.niter = 10
    index.cp.min_points_per_centroid = 1
    index.cp.max_points_per_centroid = 64
    return index
