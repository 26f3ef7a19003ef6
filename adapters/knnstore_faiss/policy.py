"""Which index for how many rows, and how far to search it."""

import logging
import math
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import faiss

from knnstore.datastore import Metric, checked_params
from knnstore.errors import ConfigError

METRICS = {Metric.L2: faiss.METRIC_L2, Metric.IP: faiss.METRIC_INNER_PRODUCT}
"""What FAISS calls the metrics."""

# Measured with keys of a language model (the last FFN's input of a 4-layer GPT-2, dim 256) over technical
# prose, 256 queries of other documents a batch, exact distances included, by FAISS 1.15 on two busy cores.
# Time is relative to exact search over the same rows; recall is against exact search.
#
#      rows  index              k=1024: time  recall    k=64: time  recall
#    16 384  IVF256,SQ8                1.52    .998            .37    .978
#    32 768  IVF256,SQ8                1.01    .996            .17    .975
#    65 536  IVF512,SQ8                 .64    .992            .10    .977
#   131 072  IVF1024,SQ8                .39    .990            .06    .977   (12 rows visited a neighbor
#   300 000  IVF1024,SQ8                .15    .971            .034   .979    up to here, 8 below)
#   300 000  IVF1024,PQ64x4fs           .16    .970            .046   .979
# 1 000 000  IVF1024,SQ8                .05    .970            .03    .980   (16 and 8 probes)
# 1 000 000  IVF2048,PQ64x4fs             -    .966              -    .980
#
# So inverted lists win from 32 768 rows on even at k=1024. Product codes, ranked again, are neither faster
# nor worse than scalars; they take 40 bytes a row instead of 264, which counts when
# memory is short.
_FACTORY = re.compile(r"[A-Za-z0-9,_()+-]{1,64}")
_MOST = 1 << 20

EXACT_UP_TO = 1 << 15
"""Rows of a group up to which exact search serves: no training, and every neighbor found."""

SCALAR_UP_TO = 1 << 20
"""Rows up to which inverted lists of 8-bit scalars serve; beyond it 4-bit product codes, ranked again."""

_CODES_PER_NEIGHBOR = 8  # rows to visit for each neighbor wanted
_LEAST_PROBES = 8
_SMALLEST_INDEXED = 1 << 13
_RANKED_AGAIN = 6  # candidates for each neighbor wanted, where codes are coarse
_LEAST_RANKED_AGAIN = 1024
_HNSW_FROM = 1 << 14  # lists from which finding the nearest ones needs an index of its own

_REMOVED = {"exact_distances": True, "neighbors": "auto"}
"""Parameters of earlier versions that only measurements needed, with their defaults. A home may have them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """The adapter's parameters, checked.

    Args:
        index: ``"auto"`` (by size), ``"exact"``, or the FAISS factory string of an inverted file,
            such as ``"IVF1024,SQ8"``.
        nprobe: lists to visit for each query; 0 chooses by k.
        rerank: candidates for each neighbor wanted whose exact distances decide; 0 chooses by
            the index, 1 is off.
    """

    index: str = "auto"
    nprobe: int = 0
    rerank: int = 0

    @classmethod
    def of(cls, params: dict[str, Any], dim: int, metric: Metric) -> "Policy":
        """Check the parameters that a user gave; those that only earlier versions had are ignored.

        Raises:
            ConfigError: one is unknown or has a bad value.
        """
        ignored = [name for name, default in _REMOVED.items() if params.get(name, default) != default]
        if ignored:
            _warn_of_ignored(", ".join(ignored))
        params = {name: value for name, value in params.items() if name not in _REMOVED}
        accepted = {field.name: field.default for field in fields(cls)}
        policy = cls(**checked_params("faiss", params, accepted))
        for name in ("nprobe", "rerank"):
            value = getattr(policy, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"faiss: {name} must be an integer >= 0, got {value!r}")
        if policy.index not in ("auto", "exact"):
            new_index(policy.index, dim, metric)
        return policy

    def indexes(self, group_rows: int) -> bool:
        """Whether a group of so many live rows is searched by indexes at all."""
        return self.index != "exact" and (self.index != "auto" or group_rows > EXACT_UP_TO)

    def factory(self, rows: int, group_rows: int, dim: int) -> str | None:
        """The index for a segment of so many rows in a group of so many; None for exact search.

        In a large group smaller segments have indexes too: their share of the neighbors is small,
        and so is what must be visited, while exact search would visit all.
        """
        if self.index != "auto":
            return None if self.index == "exact" else self.index
        if not self.indexes(group_rows) or rows < _SMALLEST_INDEXED:
            return None
        lists = 2 ** round(math.log2(2 * math.sqrt(rows)))
        quantizer = f"IVF{lists}_HNSW32" if lists >= _HNSW_FROM else f"IVF{lists}"
        if rows <= SCALAR_UP_TO:
            return f"{quantizer},SQ8"
        codes = next(m for m in range(max(1, dim // 4), dim + 1) if dim % m == 0)
        return f"{quantizer},PQ{codes}x4fs"

    def probes(self, k: int, rows: int, matching: int, lists: int) -> int:
        """How many lists to visit for about the k nearest of the rows that match a filter."""
        unfiltered = self.nprobe or math.ceil(_CODES_PER_NEIGHBOR * k * lists / rows) + _LEAST_PROBES
        return min(math.ceil(unfiltered * rows / matching), lists)

    def candidates(self, k: int, rows: int, *, coarse: bool) -> int:
        """How many of the rows that match to rank again by their exact distances, k at least.

        An index is coarse whose own distances are too rough to choose the k nearest.
        """
        by_index = max(_RANKED_AGAIN * k, _LEAST_RANKED_AGAIN) if coarse else k
        wanted = k * self.rerank or by_index
        return max(k, min(wanted, rows))


@cache
def _warn_of_ignored(names: str) -> None:
    """Warn once in a process that parameters have no effect."""
    _log.warning("faiss: this version ignores the parameter %s: distances are always exact", names)


def new_index(factory: str, dim: int, metric: Metric) -> faiss.IndexIVF:
    """Make an empty inverted file that trains in bounded time and alike every time.

    Raises:
        ConfigError: FAISS does not know the factory string or it is no plain inverted file.
    """
    # FAISS reads the string by recursion and makes its lists at once: it would end the process.
    if not (isinstance(factory, str) and _FACTORY.fullmatch(factory)) or any(
        int(number) > _MOST for number in re.findall(r"\d+", factory)
    ):
        raise ConfigError(
            f"faiss: index must be at most 64 letters, digits and ,_()+- with numbers up to {_MOST:,}, "
            f"got {str(factory)[:64]!r}"
        )
    try:
        index = faiss.index_factory(dim, factory, METRICS[metric])
    except (RuntimeError, TypeError, MemoryError) as error:
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
