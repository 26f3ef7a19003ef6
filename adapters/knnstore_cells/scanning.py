"""Distances between queries and codes (compressed keys), without decoding the codes.

A byte of a code is the index of a vector in a table, its codebook. For each query, the inner products with
all vectors of all codebooks are computed once. The inner product with a key is then a sum of one number for
each byte of the key's code (asymmetric distances, Jégou et al. 2011). FAISS computes these sums, if it is
installed. If many queries share a cell (a cluster of near keys), one multiplication with decoded keys is
faster.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Distances, Ids, Keys, Metric, ProductCodec, Visit, Visits
from knnstore.errors import InvalidVectorError
from knnstore_cells.cell_cache import CellCache

_AT_ONCE = 64  # queries; all cells that they probe are kept, even if they exceed the room
_TOGETHER = 8  # queries of one call of FAISS; for more, its results need too much memory
_BYTES_BESIDE = 20  # bytes of a record beside its code: id, |key|², first byte of the code as an index
_NONE = -1
_FAST_LENGTHS = (1, 2, 4, 8, 12)
"""Lengths of a codebook's vectors for which FAISS computes the products of a query four to seven times faster
than for other lengths up to 12. Shorter vectors are padded with zeros."""


class CodedCell(NamedTuple):
    """The r records of a cell (a cluster of near keys), with codes (compressed keys) in place of keys.

    Deleted and replaced records are left out.
    """

    ids: Ids
    """Record ids, int64, shape (r,)."""

    codes: NDArray[np.uint8]
    """Codes (compressed keys), uint8, shape (r, size)."""

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
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
    """Query vectors minus the middle, float32, shape (q, width).

    They are multiplied by the factor of an inner product in a distance: -2 for L2, -1 for inner products.
    """

    cells: NDArray[np.int64]
    """Numbers of the cells that each query searches, int64, shape (q, p); padded with -1."""

    center_products: NDArray[np.float32]
    """Inner products of the scaled `queries` and the centers of the codec minus the middle, shape (q, 256).

    The codec is the compressor of keys. A decoded key is the sum of a center and of other vectors.
    """

    squares: NDArray[np.float32]
    """|query - middle|² of each query, shape (q,)."""

    @classmethod
    def prepare(
        cls, queries: Keys, cells: NDArray[np.int64], middle: Keys, centers: Tensor, metric: Metric
    ) -> Self:
        """Compute the products of each query with the codec's centers, and its squared length.

        The codec compresses keys. `CodeScanner` computes distances from these values.

        Args:
            queries: query vectors in the rotated space of the codec, float32, shape (q, width).
            cells: numbers of the cells (clusters of near keys) that each query searches, shape (q, p); padded
                with -1.
            middle: vector that is subtracted from keys and queries, shape (width,).
            centers: centers of the codec, after `middle` was subtracted; float32, shape (width, 256). Each
                column is a center.
            metric: metric of the distances.
        """
        relative_queries = np.ascontiguousarray(queries - middle)
        squares = np.einsum("ij,ij->i", relative_queries, relative_queries)
        relative_queries *= -2 if metric is Metric.L2 else -1  # exact: no digit of a product changes
        # All products use torch: the threads of numpy would compete with those of torch.
        center_products = (torch.from_numpy(relative_queries) @ centers).numpy()
        return cls(relative_queries, np.ascontiguousarray(cells, np.int64), center_products, squares)

    def select_rows(self, rows: Sequence[int] | slice) -> Self:
        """Return only some of the queries.

        Args:
            rows: row numbers of the queries.
        """
        return self._replace(
            queries=self.queries[rows],
            cells=self.cells[rows],
            center_products=self.center_products[rows],
            squares=self.squares[rows],
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

        parts, _, length = codec.books.shape
        padded_length = next((fast for fast in _FAST_LENGTHS if fast >= length), length)
        books = np.pad(codec.books, ((0, 0), (0, 0), (0, padded_length - length)))
        self._padded_shape, width = (parts, padded_length), parts * padded_length
        self._codec, self._metric, self._room = codec, metric, cell_cache
        # Distances do not depend on the origin; with the mean key as origin they lose the fewest digits.
        mean: Keys = codec.centers.mean(0)
        self._middle = mean if metric is Metric.L2 else np.zeros_like(mean)
        self._centers = torch.from_numpy(codec.centers - self._middle).T.contiguous()
        self._quantizer = faiss.IndexFlat(width, faiss.METRIC_INNER_PRODUCT)  # never searched
        self._index: Any = faiss.IndexIVFPQ(
            self._quantizer, width, cells, parts, 8, faiss.METRIC_INNER_PRODUCT
        )
        self._index.by_residual = False
        faiss.copy_array_to_vector(books.ravel(), self._index.pq.centroids)
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
        prepared = _PreparedQueries.prepare(queries, cells, self._middle, self._centers, self._metric)
        with self._room.wait_to_grow():
            self._load_cells(prepared.cells, read)
            ids, distances = self._compute_distances(prepared)
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
        prepared = _PreparedQueries.prepare(queries, cells, self._middle, self._centers, self._metric)
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
                batch = prepared.select_rows(order[start : start + _AT_ONCE])
                self._load_cells(batch.cells, read)
                for numbers, ids, distances in zip(
                    batch.cells.tolist(), *self._compute_distances(batch), strict=True
                ):
                    offset = 0
                    for number in numbers:
                        if number == _NONE:
                            continue
                        length = len(self._cell_norms[number].norms)
                        if number not in visits:
                            rows, ranks = np.array(queries_of_cell[number]).T
                            cell_distances = np.empty((len(rows), length), np.float32)
                            cell_ids = ids[offset : offset + length].copy()
                            visits[number] = Visit(rows, cell_ids, cell_distances, ranks=ranks)
                        visits[number].distances[filled_rows[number]] = distances[offset : offset + length]
                        filled_rows[number] += 1
                        offset += length
        return [Visits.from_visit(visits[number]) for number in sorted(visits)]

    def forget(self) -> None:
        """Drop the codes of all cells (clusters of near keys) from memory; the next scan reads them again.

        Codes are compressed keys.
        """
        self._index.reset()
        self._cell_norms.clear()
        self.held = 0

    def _compute_distances(self, prepared: _PreparedQueries) -> tuple[Ids, Distances]:
        """Compute the distances of each query to all records of its cells, which are in memory.

        Args:
            prepared: the queries, at least one.

        Returns:
            Record ids and distances, each of shape (q, r). The records of a query are cell after cell; r is
            the largest number of records of a query, and other rows are padded with id -1 at distance +inf.

        Raises:
            InvalidVectorError: an inner product is not finite, because a query is too large.
        """
        cells = [[self._cell_norms[at] for at in row if at != _NONE] for row in prepared.cells.tolist()]
        lengths = [sum([len(cell.norms) for cell in of_query]) for of_query in cells]
        shape = len(cells), max(lengths)
        ids, distances = np.full(shape, -1), np.full(shape, np.inf, np.float32)
        for start in range(0, len(cells), _TOGETHER):
            together = slice(start, start + _TOGETHER)
            found = self._compute_products(prepared.queries[together], prepared.cells[together])
            for row, (found_ids, products) in enumerate(found, start):
                length, of_query = lengths[row], cells[row]
                if len(found_ids) != length:
                    raise InvalidVectorError(
                        "a query has too large components: its product with a key is not a finite number"
                    )
                if not length:
                    continue
                ids[row, :length] = found_ids
                # One query at a time: its numbers stay in the CPU's nearest cache.
                own = distances[row, :length]
                firsts = np.concatenate([cell.firsts for cell in of_query])
                np.add(products, prepared.center_products[row].take(firsts), out=own)
                if self._metric is Metric.L2:
                    own += np.concatenate([cell.norms for cell in of_query])
                    own += prepared.squares[row]
                    np.maximum(own, 0, out=own)
        return ids, distances

    def _load_cells(self, cells: NDArray[np.int64], read: Read) -> None:
        """Read the codes (compressed keys) of cells whose codes are not in memory yet, and keep the codes.

        If the memory limit is exceeded, the cell cache drops decoded cells.

        Args:
            cells: numbers of the cells that each query searches, shape (q, p); padded with -1.
            read: function that reads the records of cells.
        """
        # Sets, because the first `np.unique` imports masked arrays, which takes 8 ms.
        numbers = cells.ravel().tolist()
        missing = sorted({number for number in numbers if number not in self._cell_norms} - {_NONE})
        if not missing:
            return
        for number, (ids, codes) in zip(missing, read(missing), strict=True):
            relative_keys = self._codec.decode_rotated(codes) - self._middle
            parts, pointer = np.ascontiguousarray(codes[:, 1:]), self._faiss.swig_ptr
            if len(ids):
                self._index.invlists.add_entries(number, len(ids), pointer(ids), pointer(parts))
            norms = np.einsum("ij,ij->i", relative_keys, relative_keys)
            self._cell_norms[number] = _CellNorms(norms, codes[:, 0].astype(np.intp))
            self.held += len(ids) * (parts.shape[1] + _BYTES_BESIDE)
        self._room.shrink()

    def _compute_products(self, queries: Keys, cells: NDArray[np.int64]) -> Iterator[tuple[Ids, Distances]]:
        """Compute the inner products of queries with all keys of several cells, without the keys' centers.

        A decoded key is the sum of a center of the codec (the compressor of keys) and of vectors from its
        codebooks. This method computes the products with the vectors from the codebooks. The caller adds the
        products with the centers.

        Args:
            queries: scaled query vectors minus the middle, float32, shape (q, width).
            cells: numbers of the cells of each query, int64, shape (q, p); padded with -1.

        Yields:
            For each query the record ids and the inner products, each of shape (r,), cell after cell.
            Products that are not finite are left out. The arrays are valid until the generator continues.
        """
        faiss, pointer = self._faiss, self._faiss.swig_ptr
        if cells.shape[1] > self._index.nlist:
            # FAISS takes at most `nlist` cells of each query: move the padding to the end, and cut it off.
            places = (cells == _NONE).argsort(1, kind="stable")[:, : self._index.nlist]
            cells = np.take_along_axis(cells, places, 1)
        parts, padded_length = self._padded_shape
        padded = np.zeros((len(queries), parts, padded_length), np.float32)
        pieces = queries.reshape(len(queries), parts, -1)
        padded[..., : pieces.shape[2]] = pieces
        result = faiss.RangeSearchResult(len(queries))
        self._index.nprobe = cells.shape[1]
        center_terms = np.zeros(cells.shape, np.float32)  # FAISS adds these products with its own centers
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)  # its threads would compete with those of torch
        try:
            self._index.range_search_preassigned_c(
                len(queries), pointer(padded), -np.inf, pointer(cells), pointer(center_terms), result
            )
        finally:
            faiss.omp_set_num_threads(threads)
        borders = faiss.rev_swig_ptr(result.lims, len(queries) + 1).tolist()
        if not borders[-1]:
            yield from [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
            return
        ids, products = (faiss.rev_swig_ptr(each, borders[-1]) for each in (result.labels, result.distances))
        for start, stop in pairwise(borders):
            yield ids[start:stop], products[start:stop]


def can_scan() -> bool:
    """Return True if FAISS is installed, which `CodeScanner` needs; else False."""
    return find_spec("faiss") is not None
