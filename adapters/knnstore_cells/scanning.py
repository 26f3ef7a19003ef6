"""Few queries measured against codes, which need not be decoded for them.

For each query a table says what each entry of each codebook adds to an inner product. That of a key is a sum
of as many numbers as its code has bytes (asymmetric distances, Jégou et al. 2011), which FAISS does, where it
is installed. Many queries share cells: for them one multiplication with decoded keys is faster.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Ids, Keys, Metric, ProductCodec

_BYTES_BESIDE = 13  # of a record: its id, |key|², and the first byte of its code
_NONE = -1


class CodedCell(NamedTuple):
    """The live records of a cell as codes."""

    ids: Ids
    """Shape (r,)."""
    codes: NDArray[np.uint8]
    """Shape (r, size)."""


class Scanned(NamedTuple):
    """What queries met, one query's records after another's."""

    counts: NDArray[np.int64]
    """How many each met, shape (q,)."""
    ids: Ids
    """Shape (n,)."""
    distances: NDArray[np.float32]
    """Shape (n,)."""


class _Beside(NamedTuple):
    """What is kept of a cell beside the codes."""

    norms: NDArray[np.float32]
    firsts: NDArray[np.uint8]


class CodeScanner:
    """The cells of a group as codes, each read when it is first visited.

    Threads may share it.

    Args:
        codec: of all the group's keys.
        cells: how many there are.
        metric: how distances are measured.
        size: bytes to keep at most; where it is reached all are forgotten.
    """

    def __init__(self, codec: ProductCodec, cells: int, metric: Metric, size: int) -> None:
        import faiss

        parts, width = len(codec.books), codec.centers.shape[1]
        self._codec, self._metric, self._size = codec, metric, size
        # Distances are the same around any point; those around the middle of all keys lose no digits.
        self._middle = codec.centers.mean(0) if metric is Metric.L2 else np.zeros(width, np.float32)
        self._centers = np.ascontiguousarray((codec.centers - self._middle).T)
        self._quantizer = faiss.IndexFlat(width, faiss.METRIC_INNER_PRODUCT)  # is not asked: cells are given
        self._index: Any = faiss.IndexIVFPQ(
            self._quantizer, width, cells, parts, 8, faiss.METRIC_INNER_PRODUCT
        )
        self._index.by_residual = False
        faiss.copy_array_to_vector(codec.books.ravel(), self._index.pq.centroids)
        self._index.is_trained = True
        self._faiss = faiss
        self._held = 0
        self._beside: dict[int, _Beside] = {}
        self._lock = Lock()

    def scan(self, queries: Keys, cells: NDArray[np.int64], read: Callable[[int], CodedCell]) -> Scanned:
        """Measure each query against all records of some cells.

        Args:
            queries: turned as the codec turns keys, float32, shape (q, width).
            cells: numbers of those of each, shape (q, p); -1 where one has fewer.
            read: gives a cell.
        """
        queries = np.ascontiguousarray(queries - self._middle)
        asked = [np.ascontiguousarray(of[of != _NONE], np.int64) for of in cells]
        order = np.concatenate(asked).tolist()
        with self._lock:
            self._keep(order, read)
            beside = [self._beside[number] for number in order]
            # One by one: all at once FAISS has threads do them, which would wait beside those of torch.
            parts = [self._products(query, of) for query, of in zip(queries, asked, strict=True)]
        counts = np.array([len(ids) for ids, _ in parts])
        ids, products = (np.concatenate(of) for of in zip(*parts, strict=True))
        firsts = np.concatenate([cell.firsts for cell in beside] or [np.empty(0, np.uint8)])
        of_centers, rows = queries @ self._centers, np.arange(len(queries)) * self._centers.shape[1]
        products += of_centers.take(firsts + np.repeat(rows, counts))
        if self._metric is Metric.IP:
            return Scanned(counts, ids, np.negative(products, out=products))
        products *= -2
        products += np.concatenate([cell.norms for cell in beside] or [np.empty(0, np.float32)])
        products += np.repeat((queries * queries).sum(1), counts)
        return Scanned(counts, ids, np.maximum(products, 0, out=products))

    def _keep(self, cells: Sequence[int], read: Callable[[int], CodedCell]) -> None:
        """Have these cells ready."""
        if self._held > self._size:
            self._index.reset()
            self._beside.clear()
            self._held = 0
        for number in cells:
            if number in self._beside:
                continue
            ids, codes = read(number)
            away = self._codec.turned(codes) - self._middle
            parts, pointer = np.ascontiguousarray(codes[:, 1:]), self._faiss.swig_ptr
            if len(ids):
                self._index.invlists.add_entries(number, len(ids), pointer(ids), pointer(parts))
            norms = np.einsum("ij,ij->i", away, away)
            self._beside[number] = _Beside(norms, np.ascontiguousarray(codes[:, 0]))
            self._held += len(ids) * (parts.shape[1] + _BYTES_BESIDE)

    def _products(self, query: Keys, cells: NDArray[np.int64]) -> tuple[Ids, NDArray[np.float32]]:
        """A query's inner products with the keys of cells less their centers, and the ids, cell by cell."""
        pointer, found = self._faiss.swig_ptr, self._faiss.RangeSearchResult(1)
        self._index.nprobe = len(cells)
        distances = np.zeros(len(cells), np.float32)  # to centers of its own, which it adds
        self._index.range_search_preassigned_c(
            1, pointer(query), -np.inf, pointer(cells), pointer(distances), found
        )
        total = int(self._faiss.rev_swig_ptr(found.lims, 2)[1])
        if not total:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        ids, products = (self._faiss.rev_swig_ptr(of, total) for of in (found.labels, found.distances))
        return ids.copy(), products.copy()


def can_scan() -> bool:
    """Whether FAISS is installed."""
    return find_spec("faiss") is not None
