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

from knnstore.datastore import Distances, Ids, Keys, Metric, ProductCodec, Visits
from knnstore.errors import InvalidVectorError

_BYTES_BESIDE = 20  # of a record: its id, |key|², and the first byte of its code, as an index
_NONE = -1


class CodedCell(NamedTuple):
    """The live records of a cell as codes."""

    ids: Ids
    """Shape (r,)."""
    codes: NDArray[np.uint8]
    """Shape (r, size)."""


class _Beside(NamedTuple):
    """What is kept of a cell beside the codes."""

    norms: NDArray[np.float32]
    firsts: NDArray[np.intp]


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

    def scan(self, queries: Keys, cells: NDArray[np.int64], read: Callable[[int], CodedCell]) -> Visits:
        """Measure each query against all records of some cells: a visit of each, in their order.

        Args:
            queries: turned as the codec turns keys, float32, shape (q, width).
            cells: numbers of those of each, shape (q, p); -1 where one has fewer.
            read: gives a cell.
        """
        queries = np.ascontiguousarray(queries - self._middle)
        asked = [np.ascontiguousarray(of[of != _NONE], np.int64) for of in cells]
        of_centers, squares = queries @ self._centers, (queries * queries).sum(1).tolist()
        with self._lock:
            if self._held > self._size:
                self._index.reset()
                self._beside.clear()
                self._held = 0
            beside = [self._kept(of.tolist(), read) for of in asked]
            counts = [sum(len(cell.norms) for cell in of) for of in beside]
            shape = len(queries), max(counts)
            ids, distances = np.full(shape, -1), np.full(shape, np.inf, np.float32)
            for row, (of, count) in enumerate(zip(beside, counts, strict=True)):
                if count:
                    # One by one: all at once FAISS has threads do them, which would wait beside torch's.
                    measured = distances[row, :count]
                    self._products(queries[row], asked[row], ids[row, :count], measured)
                    measured += of_centers[row].take(np.concatenate([cell.firsts for cell in of]))
                    if self._metric is Metric.IP:
                        np.negative(measured, out=measured)
                        continue
                    measured *= -2
                    measured += np.concatenate([cell.norms for cell in of])
                    measured += squares[row]
                    np.maximum(measured, 0, out=measured)
        return Visits(np.arange(len(queries))[:, None], ids, distances[:, None])

    def _kept(self, cells: Sequence[int], read: Callable[[int], CodedCell]) -> list[_Beside]:
        """Have these cells ready."""
        for number in cells:
            if number in self._beside:
                continue
            ids, codes = read(number)
            away = self._codec.turned(codes) - self._middle
            parts, pointer = np.ascontiguousarray(codes[:, 1:]), self._faiss.swig_ptr
            if len(ids):
                self._index.invlists.add_entries(number, len(ids), pointer(ids), pointer(parts))
            norms = np.einsum("ij,ij->i", away, away)
            self._beside[number] = _Beside(norms, codes[:, 0].astype(np.intp))
            self._held += len(ids) * (parts.shape[1] + _BYTES_BESIDE)
        return [self._beside[number] for number in cells]

    def _products(self, query: Keys, cells: NDArray[np.int64], ids: Ids, products: Distances) -> None:
        """A query's inner products with the keys of cells less their centers, and the ids, cell by cell."""
        pointer, found = self._faiss.swig_ptr, self._faiss.RangeSearchResult(1)
        self._index.nprobe = len(cells)
        to_centers = np.zeros(len(cells), np.float32)  # of its own, which it adds
        self._index.range_search_preassigned_c(
            1, pointer(query), -np.inf, pointer(cells), pointer(to_centers), found
        )
        if int(self._faiss.rev_swig_ptr(found.lims, 2)[1]) != len(ids):
            raise InvalidVectorError("a query is too large to be measured: a product is not a finite number")
        ids[:] = self._faiss.rev_swig_ptr(found.labels, len(ids))
        products[:] = self._faiss.rev_swig_ptr(found.distances, len(ids))


def can_scan() -> bool:
    """Whether FAISS is installed."""
    return find_spec("faiss") is not None
