"""Codes (compressed keys) of cells in memory, and the distances of queries to them, without decoding a key.

A cell is a cluster of records with near keys. `CompiledCells` computes distances by a function that Numba
compiles (`knnstore_cells.cpu_kernels`, extra ``fast``); `FaissCells` computes them with FAISS. Both find the
same records in the same order, and distances that differ in the last digits.
"""

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.datastore import Distances, Ids, Keys, Metric, ProductCodec
from knnstore.errors import InvalidVectorError

_log = logging.getLogger(__name__)

SWITCH = "KNNSTORE_NUMBA"
"""Environment variable that switches the compiled function off with the value ``0``."""

_TOGETHER = 8  # queries of one call of FAISS; for more, its results need too much memory
_LEAST_ROWS = 1024  # records for which memory is reserved at first
_NONE = -1


class CodedCell(NamedTuple):
    """The r records of a cell (a cluster of near keys), with codes (compressed keys) in place of keys.

    Deleted and replaced records are left out.
    """

    ids: Ids
    """Record ids, int64, shape (r,)."""

    codes: NDArray[np.uint8]
    """Codes (compressed keys), uint8, shape (r, size)."""

    @classmethod
    def joined(cls, parts: "list[CodedCell]") -> "CodedCell":
        """Concatenate lists of records of one cell into one list, in the order of the lists.

        Args:
            parts: one or more lists of records. A single list is returned itself.
        """
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class Measured(NamedTuple):
    """The records of the cells of each of q queries, cell after cell, with their distances."""

    ids: Ids
    """Record ids, int64, shape (q, r); padded with -1."""

    distances: Distances
    """Distances to these records, float32, shape (q, r); +inf for padding."""

    @classmethod
    def create(cls, queries: int, records: int) -> "Measured":
        """Return a result to be filled in, shape (queries, records), which is all padding."""
        shape = queries, records
        return cls(np.full(shape, _NONE), np.full(shape, np.inf, np.float32))


class CellCodes(Protocol):
    """The codes (compressed keys) of cells in memory. `CompiledCells` and `FaissCells` implement it."""

    def add_cell(self, number: int, cell: CodedCell, norms: NDArray[np.float32]) -> None:
        """Add the records of a cell.

        Args:
            number: number of the cell, which was not added before.
            cell: the records.
            norms: |key - middle|² of each record, shape (r,); the middle is a vector near the mean key.
        """

    def clear(self) -> None:
        """Drop all cells."""

    def measure(self, queries: Keys, cells: NDArray[np.int64]) -> Measured:
        """Compute the distances of q queries to all records of their cells.

        Args:
            queries: query vectors minus the middle, float32, shape (q, width), contiguous.
            cells: numbers of the cells of each query, which were added, int64, shape (q, p); padded with -1.

        Raises:
            InvalidVectorError: an inner product is not finite, because a query is too large.
        """


class CompiledCells:
    """Codes of cells in one growing matrix, which a compiled function reads.

    Args:
        kernels: the module `knnstore_cells.cpu_kernels`.
        codec: product quantizer that compressed the keys.
        middle: vector that is subtracted from keys and queries, shape (width,).
        cells: number of cells.
        metric: metric of the distances.
    """

    def __init__(self, kernels: Any, codec: ProductCodec, middle: Keys, cells: int, metric: Metric) -> None:
        self._kernels, self._cells, self._metric = kernels, cells, metric
        self._centers = codec.centers - middle
        self._books = np.ascontiguousarray(codec.books.swapaxes(1, 2))
        block = kernels.PARTS_AT_ONCE
        self._width = -(-len(codec.books) // block) * block
        self.clear()

    def clear(self) -> None:
        """Drop all cells, and free their memory."""
        self._rows = 0
        self._starts: NDArray[np.int64] = np.zeros(self._cells, np.int64)
        self._counts: NDArray[np.int64] = np.zeros(self._cells, np.int64)
        self._ids: NDArray[np.int64] = np.zeros(_LEAST_ROWS, np.int64)
        self._firsts: NDArray[np.uint8] = np.zeros(_LEAST_ROWS, np.uint8)
        self._codes: NDArray[np.uint8] = np.zeros((_LEAST_ROWS, self._width), np.uint8)
        self._norms: NDArray[np.float32] = np.zeros(_LEAST_ROWS, np.float32)

    def add_cell(self, number: int, cell: CodedCell, norms: NDArray[np.float32]) -> None:
        """Add the records of a cell; see `CellCodes`."""
        start, stop = self._rows, self._rows + len(cell.ids)
        if stop > len(self._ids):
            self._reserve(max(stop, 2 * len(self._ids)))
        self._ids[start:stop], self._firsts[start:stop] = cell.ids, cell.codes[:, 0]
        self._codes[start:stop, : len(self._books)] = cell.codes[:, 1:]
        self._norms[start:stop] = norms if self._metric is Metric.L2 else 0
        self._starts[number], self._counts[number], self._rows = start, len(cell.ids), stop

    def measure(self, queries: Keys, cells: NDArray[np.int64]) -> Measured:
        """Compute the distances of queries to all records of their cells; see `CellCodes`."""
        is_euclidean = self._metric is Metric.L2
        squares = (
            np.einsum("ij,ij->i", queries, queries) if is_euclidean else np.zeros(len(queries), np.float32)
        )
        counts = np.where(cells == _NONE, 0, self._counts[cells]).sum(1)
        found = Measured.create(len(queries), int(counts.max(initial=0)))
        is_finite = self._kernels.measure_codes(
            queries, squares, cells, self._starts, self._counts, self._firsts, self._codes, self._norms,
            self._ids, self._centers, self._books, *((2.0, 0.0) if is_euclidean else (1.0, -np.inf)), *found,
        )  # fmt: skip
        if not is_finite:
            raise InvalidVectorError("a query is too large to be measured: a product is not a finite number")
        return found

    def _reserve(self, rows: int) -> None:
        """Extend all columns to a number of records. Memory is used only where records are written."""
        for name in ("_ids", "_firsts", "_codes", "_norms"):
            column = getattr(self, name)
            extended = np.zeros((rows, *column.shape[1:]), column.dtype)
            extended[: self._rows] = column[: self._rows]
            setattr(self, name, extended)


class _Columns(NamedTuple):
    """Values of the r records of a cell that FAISS does not keep."""

    norms: NDArray[np.float32]
    """|key - middle|² of each key, shape (r,)."""

    firsts: NDArray[np.intp]
    """First byte of each code, which is the number of the codec's center for the key, shape (r,)."""


class FaissCells:
    """Codes of cells in an index of FAISS, which computes the inner products.

    Args:
        codec: product quantizer that compressed the keys.
        middle: vector that is subtracted from keys and queries, shape (width,).
        cells: number of cells.
        metric: metric of the distances.
    """

    def __init__(self, codec: ProductCodec, middle: Keys, cells: int, metric: Metric) -> None:
        import faiss

        parts, width = len(codec.books), codec.centers.shape[1]
        self._metric = metric
        self._centers = torch.from_numpy(codec.centers - middle).T.contiguous()
        self._quantizer = faiss.IndexFlat(width, faiss.METRIC_INNER_PRODUCT)  # never searched
        self._index: Any = faiss.IndexIVFPQ(
            self._quantizer, width, cells, parts, 8, faiss.METRIC_INNER_PRODUCT
        )
        self._index.by_residual = False
        faiss.copy_array_to_vector(codec.books.ravel(), self._index.pq.centroids)
        self._index.is_trained = True
        self._faiss = faiss
        self._columns: dict[int, _Columns] = {}

    def add_cell(self, number: int, cell: CodedCell, norms: NDArray[np.float32]) -> None:
        """Add the records of a cell; see `CellCodes`."""
        parts, pointer = np.ascontiguousarray(cell.codes[:, 1:]), self._faiss.swig_ptr
        if len(cell.ids):
            self._index.invlists.add_entries(number, len(cell.ids), pointer(cell.ids), pointer(parts))
        self._columns[number] = _Columns(norms, cell.codes[:, 0].astype(np.intp))

    def clear(self) -> None:
        """Drop all cells, and free their memory."""
        self._index.reset()
        self._columns.clear()

    def measure(self, queries: Keys, cells: NDArray[np.int64]) -> Measured:
        """Compute the distances of queries to all records of their cells; see `CellCodes`."""
        # Torch computes the products: the threads of numpy would compete with those of torch.
        center_products = (torch.from_numpy(queries) @ self._centers).numpy()
        squares = np.einsum("ij,ij->i", queries, queries)
        parts = []
        for start in range(0, len(queries), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            parts.append(self._measure_some(queries[some], cells[some], center_products[some], squares[some]))
        if len(parts) == 1 and len(queries) == 1:
            ((_, ids, distances),) = parts
            return Measured(ids[None], distances[None])
        found = Measured.create(
            len(queries), max((int(np.diff(ends).max()) for ends, _, _ in parts), default=0)
        )
        row = 0
        for ends, ids, distances in parts:
            for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                found.ids[row, : end - begin], found.distances[row, : end - begin] = (
                    ids[begin:end],
                    distances[begin:end],
                )
                row += 1
        return found

    def _measure_some(
        self,
        queries: Keys,
        cells: NDArray[np.int64],
        center_products: NDArray[np.float32],
        squares: NDArray[np.float32],
    ) -> tuple[NDArray[np.int64], Ids, Distances]:
        """Compute the distances of at most `_TOGETHER` queries.

        Args:
            queries: query vectors minus the middle, shape (q, width).
            cells: numbers of the cells of each query, shape (q, p); padded with -1.
            center_products: inner products of the queries with all centers, shape (q, 256).
            squares: |query|² of each query, shape (q,).

        Returns:
            Three arrays: 0 and the index at which the records of each query end, int64, shape (q + 1,); the
            record ids; and the distances.
        """
        columns = [self._columns[number] for number in cells.ravel().tolist() if number != _NONE]
        firsts = np.concatenate([np.empty(0, np.intp), *(cell.firsts for cell in columns)])
        ends, ids, distances = self._multiply(queries, cells)
        if len(ids) != len(firsts):
            raise InvalidVectorError("a query is too large to be measured: a product is not a finite number")
        counts = np.diff(ends)
        rows, width = np.arange(len(counts)), center_products.shape[1]
        distances += center_products.ravel().take(firsts + np.repeat(rows * width, counts))
        if self._metric is Metric.IP:
            np.negative(distances, out=distances)
        else:
            distances *= -2
            distances += np.concatenate([np.empty(0, np.float32), *(cell.norms for cell in columns)])
            distances += np.repeat(squares, counts)
            np.maximum(distances, 0, out=distances)
        return ends, ids, distances

    def _multiply(self, queries: Keys, cells: NDArray[np.int64]) -> tuple[NDArray[np.int64], Ids, Distances]:
        """Compute the inner products of queries with all keys of several cells, without the keys' centers.

        A decoded key is the sum of a center of the codec (the compressor of keys) and of vectors from its
        codebooks. This method computes the products with the vectors from the codebooks. The caller adds the
        products with the centers.

        Args:
            queries: query vectors minus the middle, float32, shape (q, width).
            cells: numbers of the cells of each query, int64, shape (q, p); padded with -1.

        Returns:
            Three arrays: 0 and the index at which the records of each query end, int64, shape (q + 1,); the
            record ids; and the inner products. The records of the queries follow each other, and those of a
            query are cell after cell. Products that are not finite are left out.
        """
        faiss, pointer = self._faiss, self._faiss.swig_ptr
        if cells.shape[1] > self._index.nlist:
            # FAISS takes at most `nlist` cells of each query: move the padding to the end, and cut it off.
            places = (cells == _NONE).argsort(1, kind="stable")[:, : self._index.nlist]
            cells = np.take_along_axis(cells, places, 1)
        result = faiss.RangeSearchResult(len(queries))
        self._index.nprobe = cells.shape[1]
        center_terms = np.zeros(cells.shape, np.float32)  # FAISS adds these products with its own centers
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)  # its threads would compete with those of torch
        try:
            self._index.range_search_preassigned_c(
                len(queries), pointer(queries), -np.inf, pointer(cells), pointer(center_terms), result
            )
        finally:
            faiss.omp_set_num_threads(threads)
        ends = faiss.rev_swig_ptr(result.lims, len(queries) + 1).astype(np.int64)
        if not ends[-1]:
            return ends, np.empty(0, np.int64), np.empty(0, np.float32)
        arrays = (faiss.rev_swig_ptr(values, int(ends[-1])) for values in (result.labels, result.distances))
        ids, products = (array.copy() for array in arrays)  # FAISS frees its own
        return ends, ids, products


def can_measure_codes() -> bool:
    """Return True if Numba or FAISS is installed, one of which `create_cell_codes` needs; else False."""
    return load_kernels() is not None or find_spec("faiss") is not None


def create_cell_codes(codec: ProductCodec, middle: Keys, cells: int, metric: Metric) -> CellCodes:
    """Return an object for the codes of a group's cells: compiled by Numba if it is installed, else of FAISS.

    Args:
        codec: product quantizer that compressed all keys of the group.
        middle: vector that is subtracted from keys and queries, shape (width,).
        cells: number of cells.
        metric: metric of the distances.
    """
    kernels = load_kernels()
    if kernels is not None:
        return CompiledCells(kernels, codec, middle, cells, metric)
    return FaissCells(codec, middle, cells, metric)


@cache
def load_kernels() -> Any:
    """Import the compiled function, which is compiled now if no earlier process has kept it.

    Returns:
        The module `knnstore_cells.cpu_kernels`. None without Numba, which the extra ``fast`` installs, or if
        the environment variable `SWITCH` is ``0``. Also None, with a warning, if Numba fails.
    """
    if os.environ.get(SWITCH) == "0" or find_spec("numba") is None:
        return None
    try:
        from knnstore_cells import cpu_kernels
    except Exception as error:  # of the compiler, or of a version of numpy that it does not know
        _log.warning("Numba cannot be used for searches on the CPU: %s: %s", type(error).__name__, error)
        return None
    return cpu_kernels
