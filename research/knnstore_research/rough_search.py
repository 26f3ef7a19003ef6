"""Approximate search taken apart: which neighbors an index finds, and at which distances.

An index of codes (compressed keys) makes two errors: it misses neighbors, and it computes distances to
decoded keys. Xu et al. 2023 (https://arxiv.org/abs/2301.02828) call the choice of neighbors the mask, and the
distances the score. With this module each of them can be exact while the other is approximate. FAISS must be
installed.
"""

import math
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Metric, paired_distances
from knnstore.lm.calibration import ScoredText
from knnstore.lm.mixing import NeighborSums

_CODES_PER_NEIGHBOR = 8
"""Approximate number of codes that a search compares with a query, for each of the k neighbors."""
_LEAST_PROBES = 8

Rows = NDArray[np.int64]
"""Row numbers of keys for each query, shape (q, k); -1 for a missing key."""


class RoughIndex:
    """An approximate index of FAISS (an inverted file with codes) over keys.

    Args:
        keys: the keys to index, float32, shape (n, d).
        metric: metric of the distances.
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
        """The keys as the index has stored them (decoded), float32, shape (n, d). The index computes
        distances to the decoded keys."""

    def find_rows(self, queries: Keys, k: int) -> Rows:
        """Find approximately the k nearest keys of each query, by the distances to the decoded keys.

        Args:
            queries: query vectors, float32, shape (q, d).
            k: number of keys.

        Returns:
            Row numbers of the keys, int64, shape (q, k); -1 if the probed lists have fewer keys.
        """
        lists = self._index.nlist
        probes = math.ceil(_CODES_PER_NEIGHBOR * k * lists / len(self.decoded)) + _LEAST_PROBES
        self._index.nprobe = min(lists, probes)
        return cast(Rows, self._index.search(queries, k)[1])


def replace_neighbors(
    scored: ScoredText, rows: Tensor, tokens: Tensor, keys: Keys, metric: Metric
) -> ScoredText:
    """Return a copy of a scored text with other neighbors, as if a search had found them.

    The distances to the neighbors are computed from `keys`.

    Args:
        scored: the text, of n tokens.
        rows: the neighbors of each token as row numbers of `keys`, in any order, int64, shape (n, k); -1 for
            a missing neighbor.
        tokens: the token of each key, int64.
        keys: the keys to which distances are computed, float32.
        metric: metric of the distances.
    """
    reading = scored.reading
    assert reading is not None
    distances = torch.full(rows.shape, torch.inf)
    for number, (query, of_query) in enumerate(zip(reading.keys.numpy(), rows, strict=True)):
        is_found = of_query >= 0
        distances[number, is_found] = torch.from_numpy(
            paired_distances(query, keys[of_query[is_found].numpy()], metric)
        )
    distances, order = distances.sort(dim=1, stable=True)
    hits = tokens[rows.gather(1, order)] == reading.targets[:, None]
    return replace(scored, evidence=replace(scored.evidence, searches=[NeighborSums(distances, hits=hits)]))
