"""Approximate search taken apart: which neighbors an index finds, and at which distances.

An index of codes errs twice: it misses neighbors, and its distances are those to decoded keys. Xu et al. 2023
(https://arxiv.org/abs/2301.02828) call these the mask and the score. Here either of both can be exact. FAISS
must be installed.
"""

import math
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Metric, paired
from knnstore.lm.calibration import ScoredText
from knnstore.lm.mixing import NeighborSums

_CODES_PER_NEIGHBOR = 8
"""Codes that are compared for each neighbor wanted, about."""
_LEAST_PROBES = 8

Rows = NDArray[np.int64]
"""Rows of keys for each query, shape (q, k); -1 where one is missing."""


class RoughIndex:
    """An inverted file of FAISS over keys.

    Args:
        keys: float32, shape (n, d).
        metric: of distances.
        factory: FAISS's name of an inverted file, for example ``IVF64,PQ32``.
    """

    def __init__(self, keys: Keys, metric: Metric, factory: str) -> None:
        import faiss

        kind = faiss.METRIC_INNER_PRODUCT if metric is Metric.IP else faiss.METRIC_L2
        self._index = faiss.index_factory(keys.shape[1], factory, kind)
        if isinstance(self._index, faiss.IndexIVFPQ):  # else FAISS permutes the codes, which takes long
            self._index.do_polysemous_training = False
        self._index.train(keys)
        self._index.add(keys)
        self._index.make_direct_map()
        self.decoded: Keys = self._index.reconstruct_n(0, len(keys))
        """The keys as the index has them: its distances are those to these. Float32, shape (n, d)."""

    def find_rows(self, queries: Keys, k: int) -> Rows:
        """Find about the k nearest of the decoded keys; fewer where the lists visited hold fewer."""
        lists = self._index.nlist
        probes = math.ceil(_CODES_PER_NEIGHBOR * k * lists / len(self.decoded)) + _LEAST_PROBES
        self._index.nprobe = min(lists, probes)
        return cast(Rows, self._index.search(queries, k)[1])


def replace_neighbors(
    scored: ScoredText, rows: Tensor, tokens: Tensor, keys: Keys, metric: Metric
) -> ScoredText:
    """Return a text as if a search had found other neighbors.

    Args:
        scored: the text, of n tokens.
        rows: the neighbors of each token as rows of `keys`, in any order, int64, shape (n, k); -1 where one
            is missing.
        tokens: the token of each row, int64.
        keys: the keys to which distances are measured, float32.
        metric: measure of distances.
    """
    reading = scored.reading
    assert reading is not None
    distances = torch.full(rows.shape, torch.inf)
    for number, (query, of_query) in enumerate(zip(reading.keys.numpy(), rows, strict=True)):
        found = of_query >= 0
        distances[number, found] = torch.from_numpy(paired(query, keys[of_query[found].numpy()], metric))
    distances, order = distances.sort(dim=1, stable=True)
    hits = tokens[rows.gather(1, order)] == reading.targets[:, None]
    return replace(scored, evidence=replace(scored.evidence, searches=[NeighborSums(distances, hits=hits)]))
