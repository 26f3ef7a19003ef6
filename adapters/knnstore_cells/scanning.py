"""Queries measured against codes, which need not be decoded for them.

For each query a table says what each entry of each codebook adds to an inner product. That of a key is a sum
of as many numbers as its code has bytes (asymmetric distances, Jégou et al. 2011), which FAISS does, where it
is installed. Where many queries share a cell one multiplication with decoded keys is faster.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Distances, Ids, Keys, Metric, ProductCodec, Visit, Visits
from knnstore.errors import InvalidVectorError
from knnstore_cells.kept import KeptCells

_AT_ONCE = 64  # queries; what they need is kept together, whatever it takes
_BYTES_BESIDE = 20  # of a record: its id, |key|², and the first byte of its code, as an index
_NONE = -1


class CodedCell(NamedTuple):
    """The live records of a cell as codes."""

    ids: Ids
    """Shape (r,)."""
    codes: NDArray[np.uint8]
    """Shape (r, size)."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """What several segments hold of a cell."""
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate(of) for of in zip(*parts, strict=True)))


Read = Callable[[Sequence[int]], list[CodedCell]]
"""Gives some cells, different ones."""


class _Beside(NamedTuple):
    """What is kept of a cell beside the codes."""

    norms: NDArray[np.float32]
    firsts: NDArray[np.intp]


class _Asked(NamedTuple):
    """Queries, and what is known of each."""

    queries: Keys
    cells: list[NDArray[np.int64]]
    of_centers: NDArray[np.float32]
    """Its inner products with the codec's centers, shape (q, 256)."""
    squares: list[float]

    @classmethod
    def of(cls, queries: Keys, cells: NDArray[np.int64], middle: Keys, centers: Tensor) -> Self:
        """Around a middle; the centers are around it too, a column each."""
        around = np.ascontiguousarray(queries - middle)
        asked = [np.ascontiguousarray(of[of != _NONE], np.int64) for of in cells]
        # By torch, as all products: the threads of numpy's would wait beside those of torch.
        of_centers = (torch.from_numpy(around) @ centers).numpy()
        return cls(around, asked, of_centers, (around * around).sum(1).tolist())


class CodeScanner:
    """The cells of a group as codes, each read when it is first visited.

    Threads may share it.

    Args:
        codec: of all the group's keys.
        cells: how many there are.
        metric: how distances are measured.
        kept: with which it shares the room for what is kept.
    """

    held: int
    """Bytes that are kept."""

    def __init__(self, codec: ProductCodec, cells: int, metric: Metric, kept: KeptCells) -> None:
        import faiss

        parts, width = len(codec.books), codec.centers.shape[1]
        self._codec, self._metric, self._room = codec, metric, kept
        # Distances are the same around any point; those around the middle of all keys lose no digits.
        self._middle = codec.centers.mean(0) if metric is Metric.L2 else np.zeros(width, np.float32)
        self._centers = torch.from_numpy(codec.centers - self._middle).T.contiguous()
        self._quantizer = faiss.IndexFlat(width, faiss.METRIC_INNER_PRODUCT)  # is not asked: cells are given
        self._index: Any = faiss.IndexIVFPQ(
            self._quantizer, width, cells, parts, 8, faiss.METRIC_INNER_PRODUCT
        )
        self._index.by_residual = False
        faiss.copy_array_to_vector(codec.books.ravel(), self._index.pq.centroids)
        self._index.is_trained = True
        self._faiss = faiss
        self.held = 0
        self._beside: dict[int, _Beside] = {}
        kept.share(self)

    def scan(self, queries: Keys, cells: NDArray[np.int64], read: Read) -> Visits:
        """Measure each query against all records of some cells: a visit of each, in their order.

        Args:
            queries: turned as the codec turns keys, float32, shape (q, width).
            cells: numbers of those of each, shape (q, p); -1 where one has fewer.
            read: gives those that are not kept.
        """
        asked = _Asked.of(queries, cells, self._middle, self._centers)
        with self._room.scanning():
            self._keep(asked.cells, read)
            beside = [[self._beside[number] for number in of.tolist()] for of in asked.cells]
            counts = [sum(len(cell.norms) for cell in of) for of in beside]
            shape = len(queries), max(counts)
            ids, distances = np.full(shape, -1), np.full(shape, np.inf, np.float32)
            for row, (of, count) in enumerate(zip(beside, counts, strict=True)):
                if count:
                    self._measure(asked, row, of, ids[row, :count], distances[row, :count])
        return Visits(np.arange(len(queries))[:, None], ids, distances[:, None])

    def scan_by_cell(self, queries: Keys, cells: NDArray[np.int64], read: Read) -> list[Visits]:
        """What `scan` does for many queries, whose cells come nearest first: a visit of each cell."""
        asked = _Asked.of(queries, cells, self._middle, self._centers)
        visitors: dict[int, list[tuple[int, int]]] = {}
        # Those with the same nearest cell together: what has no room is read less often.
        order = cells[:, 0].argsort(kind="stable").tolist()
        for row in order:
            for rank, number in enumerate(cells[row].tolist()):
                if number != _NONE:
                    visitors.setdefault(number, []).append((row, rank))
        visits, done = dict[int, Visit](), dict.fromkeys(visitors, 0)
        for start in range(0, len(queries), _AT_ONCE):
            with self._room.scanning():
                some = order[start : start + _AT_ONCE]
                self._keep([asked.cells[row] for row in some], read)
                for row in some:
                    numbers = asked.cells[row].tolist()
                    beside = [self._beside[number] for number in numbers]
                    lengths = [len(cell.norms) for cell in beside]
                    ids, distances = np.empty(sum(lengths), np.int64), np.empty(sum(lengths), np.float32)
                    if len(ids):
                        self._measure(asked, row, beside, ids, distances)
                    at = 0
                    for number, length in zip(numbers, lengths, strict=True):
                        if number not in visits:
                            rows, ranks = np.array(visitors[number]).T
                            met = np.empty((len(rows), length), np.float32)
                            own_ids = ids[at : at + length].copy()
                            visits[number] = Visit(rows, own_ids, met, ranks=ranks)
                        visits[number].distances[done[number]] = distances[at : at + length]
                        done[number] += 1
                        at += length
        return [Visits.of(visits[number]) for number in sorted(visits)]

    def forget(self) -> None:
        """Keep nothing."""
        self._index.reset()
        self._beside.clear()
        self.held = 0

    def _measure(
        self, asked: _Asked, row: int, beside: Sequence[_Beside], ids: Ids, measured: Distances
    ) -> None:
        """Measure a query against some cells, which have a record."""
        # One by one: all at once FAISS has threads do them, which would wait beside torch's.
        self._products(asked.queries[row], asked.cells[row], ids, measured)
        measured += asked.of_centers[row].take(np.concatenate([cell.firsts for cell in beside]))
        if self._metric is Metric.IP:
            np.negative(measured, out=measured)
            return
        measured *= -2
        measured += np.concatenate([cell.norms for cell in beside])
        measured += asked.squares[row]
        np.maximum(measured, 0, out=measured)

    def _keep(self, cells: Sequence[NDArray[np.int64]], read: Read) -> None:
        """Have some cells ready."""
        # By sets: a first `np.unique` imports masked arrays, which takes 8 ms.
        lacking = sorted(set(np.concatenate(cells).tolist()) - self._beside.keys())
        if not lacking:
            return
        for number, (ids, codes) in zip(lacking, read(lacking), strict=True):
            away = self._codec.turned(codes) - self._middle
            parts, pointer = np.ascontiguousarray(codes[:, 1:]), self._faiss.swig_ptr
            if len(ids):
                self._index.invlists.add_entries(number, len(ids), pointer(ids), pointer(parts))
            norms = np.einsum("ij,ij->i", away, away)
            self._beside[number] = _Beside(norms, codes[:, 0].astype(np.intp))
            self.held += len(ids) * (parts.shape[1] + _BYTES_BESIDE)
        self._room.shrink()

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
