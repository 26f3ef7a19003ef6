"""Distances between queries and codes, without decoding the codes.

For each query a table holds the inner product with each entry of each codebook. The inner product with a key
is the sum of one number for each byte of its code (asymmetric distances, Jégou et al. 2011). FAISS computes
this, if it is installed. If many queries share a cell, one multiplication with decoded keys is faster.
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

_AT_ONCE = 64  # queries; all cells that they probe are kept, even if they exceed the room
_BYTES_BESIDE = 20  # bytes of a record beside its code: id, |key|², first byte of the code as an index
_NONE = -1


class CodedCell(NamedTuple):
    """The live records of a cell as codes."""

    ids: Ids
    """Record ids, int64, shape (r,)."""

    codes: NDArray[np.uint8]
    """Codes, shape (r, size)."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the parts of a cell in several segments."""
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate(of) for of in zip(*parts, strict=True)))


Read = Callable[[Sequence[int]], list[CodedCell]]
"""Reads some different cells."""


class _Beside(NamedTuple):
    """The values of a cell that are kept beside the codes."""

    norms: NDArray[np.float32]
    firsts: NDArray[np.intp]


class _Asked(NamedTuple):
    """Queries, relative to the middle, with the cells that each probes."""

    queries: Keys
    """float32, shape (q, width)."""

    cells: list[NDArray[np.int64]]
    """Numbers of the cells of each query."""

    of_centers: NDArray[np.float32]
    """Inner products of the queries and the codec's centers, shape (q, 256)."""

    squares: list[float]
    """|query|² of each query."""

    @classmethod
    def of(cls, queries: Keys, cells: NDArray[np.int64], middle: Keys, centers: Tensor) -> Self:
        """Prepare queries. `centers` are relative to `middle`, one in each column."""
        around = np.ascontiguousarray(queries - middle)
        asked = [np.ascontiguousarray(of[of != _NONE], np.int64) for of in cells]
        # All products use torch: the threads of numpy would compete with those of torch.
        of_centers = (torch.from_numpy(around) @ centers).numpy()
        return cls(around, asked, of_centers, (around * around).sum(1).tolist())


class CodeScanner:
    """The cells of a group as codes; each is read when it is first visited. Threads may share it.

    Args:
        codec: codec of all keys of the group.
        cells: number of cells.
        metric: metric of the distances.
        kept: the cache with which it shares the room.
    """

    held: int
    """Number of bytes that are kept."""

    def __init__(self, codec: ProductCodec, cells: int, metric: Metric, kept: KeptCells) -> None:
        import faiss

        parts, width = len(codec.books), codec.centers.shape[1]
        self._codec, self._metric, self._room = codec, metric, kept
        # Distances do not depend on the origin; with the mean key as origin they lose the fewest digits.
        self._middle = codec.centers.mean(0) if metric is Metric.L2 else np.zeros(width, np.float32)
        self._centers = torch.from_numpy(codec.centers - self._middle).T.contiguous()
        self._quantizer = faiss.IndexFlat(width, faiss.METRIC_INNER_PRODUCT)  # never searched
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
        """Compute the distances of each query to all records of its cells, as one visit for each query.

        Args:
            queries: rotated as the codec rotates keys, float32, shape (q, width).
            cells: numbers of the cells of each query, shape (q, p); -1 if a query has fewer.
            read: reads cells that are not in memory.
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
        """Do the same as `scan` for many queries, as one visit for each cell. Cells stand nearest first."""
        asked = _Asked.of(queries, cells, self._middle, self._centers)
        visitors: dict[int, list[tuple[int, int]]] = {}
        # Queries with the same nearest cell stand together, so that cells without room are read less often.
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
        """Drop all cells."""
        self._index.reset()
        self._beside.clear()
        self.held = 0

    def _measure(
        self, asked: _Asked, row: int, beside: Sequence[_Beside], ids: Ids, measured: Distances
    ) -> None:
        """Compute the distances of one query to the records of its cells, at least one, into `measured`."""
        # One query at a time: for several FAISS starts threads, which would compete with those of torch.
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
        """Read the cells that are not in memory yet."""
        # Sets, because the first `np.unique` imports masked arrays, which takes 8 ms.
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
        """Compute the inner products of a query and the keys of cells, without their centers, and the ids."""
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
    """Check whether FAISS is installed."""
    return find_spec("faiss") is not None
