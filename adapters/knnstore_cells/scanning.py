"""Distances between queries and codes (compressed keys), without decoding the codes.

A byte of a code is the index of a vector in a table, its codebook. For each query, the inner products with
all vectors of all codebooks are computed once. The inner product with a key is then a sum of one number for
each byte of the key's code (asymmetric distances, Jégou et al. 2011). FAISS computes these sums, if it is
installed. If many queries share a cell (a cluster of near keys), one multiplication with decoded keys is
faster.
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
from knnstore_cells.cell_cache import CellCache

_AT_ONCE = 64  # queries; all cells that they probe are kept, even if they exceed the room
_BYTES_BESIDE = 20  # bytes of a record beside its code: id, |key|², first byte of the code as an index
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
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate lists of records of one cell into one list, in the order of the lists.

        Args:
            parts: one or more lists of records. A single list is returned itself.
        """
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


Read = Callable[[Sequence[int]], list[CodedCell]]
"""Function that reads the records of several cells by the cells' numbers, which must have no duplicates."""


class _CellNorms(NamedTuple):
    """Values of the r records of a cell that are kept in memory in addition to their codes.

    A cell is a cluster of records with near keys, and codes are compressed keys.
    """

    norms: NDArray[np.float32]
    """|key - middle|² of each key, shape (r,). The middle is a vector near the mean key.

    The middle is subtracted from keys and queries before distances are computed.
    """

    firsts: NDArray[np.intp]
    """First byte of each code, which is the number of the codec's center for the key, shape (r,)."""


class _PreparedQueries(NamedTuple):
    """Query vectors minus the middle (a vector near the mean key), and the cells that each query searches.

    A cell is a cluster of records with near keys.
    """

    queries: Keys
    """Query vectors minus the middle, float32, shape (q, width)."""

    cells: list[NDArray[np.int64]]
    """For each query the numbers of the cells that it searches, int64, without padding."""

    center_products: NDArray[np.float32]
    """Inner products of `queries` and the centers of the codec minus the middle, shape (q, 256).

    The codec is the compressor of keys. A decoded key is the sum of a center and of other vectors.
    """

    squares: list[float]
    """|query - middle|² of each query."""

    @classmethod
    def of(cls, queries: Keys, cells: NDArray[np.int64], middle: Keys, centers: Tensor) -> Self:
        """Compute the values of queries that `CodeScanner` needs.

        Args:
            queries: rotated query vectors, float32, shape (q, width).
            cells: numbers of the cells (clusters of near keys) that each query searches, shape (q, p); padded
                with -1.
            middle: vector that is subtracted from keys and queries, shape (width,).
            centers: centers of the codec (a compressor of keys) minus `middle`, one in each column, shape
                (width, 256).
        """
        relative_queries = np.ascontiguousarray(queries - middle)
        cells_of_queries = [np.ascontiguousarray(numbers[numbers != _NONE], np.int64) for numbers in cells]
        # All products use torch: the threads of numpy would compete with those of torch.
        center_products = (torch.from_numpy(relative_queries) @ centers).numpy()
        return cls(
            relative_queries,
            cells_of_queries,
            center_products,
            (relative_queries * relative_queries).sum(1).tolist(),
        )


class CodeScanner:
    """Computes distances between queries and the codes (compressed keys) of a group's cells, with FAISS.

    A cell is a cluster of near keys. The codes of a cell are read when a query first searches the cell, and
    are kept in memory. Threads may share a scanner.

    Args:
        codec: product quantizer that compressed all keys of the group.
        cells: number of cells.
        metric: metric of the distances.
        cell_cache: cache of cells. Its memory limit includes the codes that this scanner keeps in memory.
    """

    held: int
    """Number of bytes of codes in memory."""

    def __init__(self, codec: ProductCodec, cells: int, metric: Metric, cell_cache: CellCache) -> None:
        import faiss

        parts, width = len(codec.books), codec.centers.shape[1]
        self._codec, self._metric, self._room = codec, metric, cell_cache
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
        self._cell_norms: dict[int, _CellNorms] = {}
        cell_cache.add_sharer(self)

    def scan(self, queries: Keys, cells: NDArray[np.int64], read: Read) -> Visits:
        """Compute the distances of each query to all records of its cells (clusters of near keys).

        Args:
            queries: query vectors, rotated by the codec (the compressor of keys), float32, shape (q, width).
            cells: numbers of the cells that each query searches, shape (q, p); padded with -1.
            read: function that reads the records of cells whose codes are not in memory.

        Returns:
            Arrays of query numbers, record ids and distances. Entry i has the distances of query i to the
            records of all cells that query i searches, padded with id -1 at distance +inf.

        Raises:
            InvalidVectorError: an inner product is not finite, because a query is too large.
        """
        prepared = _PreparedQueries.of(queries, cells, self._middle, self._centers)
        with self._room.wait_to_grow():
            self._load_cells(prepared.cells, read)
            norms_of_queries = [
                [self._cell_norms[number] for number in norms.tolist()] for norms in prepared.cells
            ]
            counts = [sum(len(cell.norms) for cell in norms) for norms in norms_of_queries]
            shape = len(queries), max(counts)
            ids, distances = np.full(shape, -1), np.full(shape, np.inf, np.float32)
            for row, (norms, count) in enumerate(zip(norms_of_queries, counts, strict=True)):
                if count:
                    self._compute_distances(prepared, row, norms, ids[row, :count], distances[row, :count])
        return Visits(np.arange(len(queries))[:, None], ids, distances[:, None])

    def scan_by_cell(self, queries: Keys, cells: NDArray[np.int64], read: Read) -> list[Visits]:
        """Compute the distances of each query to all records of its cells, arranged by cell.

        A cell is a cluster of records with near keys. The distances equal those of `scan`, which arranges the
        distances by query.

        Args:
            queries: query vectors, rotated by the codec (the compressor of keys), float32, shape (q, width).
            cells: numbers of the cells that each query searches, nearest first, shape (q, p); padded with -1.
            read: function that reads the records of cells whose codes are not in memory.

        Returns:
            A list with one entry for each cell that is searched, by ascending cell number. An entry has the
            queries that search the cell, the ids of the cell's records, the distances between these queries
            and records, and the rank of the cell among the cells of each query (0 for the nearest).

        Raises:
            InvalidVectorError: an inner product is not finite, because a query is too large.
        """
        prepared = _PreparedQueries.of(queries, cells, self._middle, self._centers)
        queries_of_cell: dict[int, list[tuple[int, int]]] = {}
        # Queries with the same nearest cell stand together, so that cells without room are read less often.
        order = cells[:, 0].argsort(kind="stable").tolist()
        for row in order:
            for rank, number in enumerate(cells[row].tolist()):
                if number != _NONE:
                    queries_of_cell.setdefault(number, []).append((row, rank))
        visits, filled_rows = dict[int, Visit](), dict.fromkeys(queries_of_cell, 0)
        for start in range(0, len(queries), _AT_ONCE):
            with self._room.wait_to_grow():
                batch = order[start : start + _AT_ONCE]
                self._load_cells([prepared.cells[row] for row in batch], read)
                for row in batch:
                    numbers = prepared.cells[row].tolist()
                    cell_norms = [self._cell_norms[number] for number in numbers]
                    lengths = [len(cell.norms) for cell in cell_norms]
                    ids, distances = np.empty(sum(lengths), np.int64), np.empty(sum(lengths), np.float32)
                    if len(ids):
                        self._compute_distances(prepared, row, cell_norms, ids, distances)
                    offset = 0
                    for number, length in zip(numbers, lengths, strict=True):
                        if number not in visits:
                            rows, ranks = np.array(queries_of_cell[number]).T
                            cell_distances = np.empty((len(rows), length), np.float32)
                            cell_ids = ids[offset : offset + length].copy()
                            visits[number] = Visit(rows, cell_ids, cell_distances, ranks=ranks)
                        visits[number].distances[filled_rows[number]] = distances[offset : offset + length]
                        filled_rows[number] += 1
                        offset += length
        return [Visits.of(visits[number]) for number in sorted(visits)]

    def forget(self) -> None:
        """Drop the codes of all cells (clusters of near keys) from memory; the next scan reads them again.

        Codes are compressed keys.
        """
        self._index.reset()
        self._cell_norms.clear()
        self.held = 0

    def _compute_distances(
        self,
        prepared: _PreparedQueries,
        row: int,
        cell_norms: Sequence[_CellNorms],
        ids: Ids,
        distances: Distances,
    ) -> None:
        """Compute the distances of one query to all records of its cells, which are in memory.

        Args:
            prepared: the queries.
            row: row number of the query in `prepared`.
            cell_norms: for each cell that the query searches, the values of its records; in the order of
                ``prepared.cells[row]``.
            ids: array that is filled with the record ids, int64, shape (r,), r >= 1.
            distances: array that is filled with the distances, float32, shape (r,).

        Raises:
            InvalidVectorError: an inner product is not finite, because the query is too large.
        """
        # One query at a time: for several FAISS starts threads, which would compete with those of torch.
        self._compute_products(prepared.queries[row], prepared.cells[row], ids, distances)
        distances += prepared.center_products[row].take(np.concatenate([cell.firsts for cell in cell_norms]))
        if self._metric is Metric.IP:
            np.negative(distances, out=distances)
            return
        distances *= -2
        distances += np.concatenate([cell.norms for cell in cell_norms])
        distances += prepared.squares[row]
        np.maximum(distances, 0, out=distances)

    def _load_cells(self, cells: Sequence[NDArray[np.int64]], read: Read) -> None:
        """Read the codes (compressed keys) of cells whose codes are not in memory yet, and keep the codes.

        If the memory limit is exceeded, the cell cache drops decoded cells.

        Args:
            cells: for each query the numbers of the cells that it searches.
            read: function that reads the records of cells.
        """
        # Sets, because the first `np.unique` imports masked arrays, which takes 8 ms.
        missing = sorted(set(np.concatenate(cells).tolist()) - self._cell_norms.keys())
        if not missing:
            return
        for number, (ids, codes) in zip(missing, read(missing), strict=True):
            relative_keys = self._codec.turned(codes) - self._middle
            parts, pointer = np.ascontiguousarray(codes[:, 1:]), self._faiss.swig_ptr
            if len(ids):
                self._index.invlists.add_entries(number, len(ids), pointer(ids), pointer(parts))
            norms = np.einsum("ij,ij->i", relative_keys, relative_keys)
            self._cell_norms[number] = _CellNorms(norms, codes[:, 0].astype(np.intp))
            self.held += len(ids) * (parts.shape[1] + _BYTES_BESIDE)
        self._room.shrink()

    def _compute_products(self, query: Keys, cells: NDArray[np.int64], ids: Ids, products: Distances) -> None:
        """Compute the inner products of a query with all keys of several cells, without the keys' centers.

        A decoded key is the sum of a center of the codec (the compressor of keys) and of vectors from its
        codebooks. This method computes the product of the query with the vectors from the codebooks. The
        caller adds the product with the center.

        Args:
            query: query vector minus the middle, float32, shape (width,).
            cells: numbers of the cells.
            ids: array that is filled with the record ids, int64, shape (r,).
            products: array that is filled with the inner products, float32, shape (r,).

        Raises:
            InvalidVectorError: a product is not finite.
        """
        pointer, result = self._faiss.swig_ptr, self._faiss.RangeSearchResult(1)
        self._index.nprobe = len(cells)
        center_terms = np.zeros(len(cells), np.float32)  # FAISS adds these products with its own centers
        self._index.range_search_preassigned_c(
            1, pointer(query), -np.inf, pointer(cells), pointer(center_terms), result
        )
        if int(self._faiss.rev_swig_ptr(result.lims, 2)[1]) != len(ids):
            raise InvalidVectorError("a query is too large to be measured: a product is not a finite number")
        ids[:] = self._faiss.rev_swig_ptr(result.labels, len(ids))
        products[:] = self._faiss.rev_swig_ptr(result.distances, len(ids))


def can_scan() -> bool:
    """Return True if FAISS is installed, which `CodeScanner` needs; else False."""
    return find_spec("faiss") is not None
