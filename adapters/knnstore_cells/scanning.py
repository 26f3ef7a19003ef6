"""Distances between queries and codes (compressed keys), without decoding the codes.

A byte of a code is the index of a vector in a table, its codebook. For each query, the inner products with
all vectors of all codebooks are computed once. The inner product with a key is then a sum of one number for
each byte of the key's code (asymmetric distances, Jégou et al. 2011). `knnstore_cells.coded_cells` computes
these sums, if Numba or FAISS is installed. If many queries share a cell (a cluster of near keys), one
multiplication with decoded keys is faster.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys, Metric, ProductCodec, Visit, Visits
from knnstore_cells.cell_cache import CellCache
from knnstore_cells.coded_cells import CodedCell, create_cell_codes

_AT_ONCE = 64  # queries; all cells that they probe are kept, even if they exceed the room
_BYTES_BESIDE = 20  # bytes of a record beside its code: id, |key|², first byte of the code as an index
_NONE = -1

Read = Callable[[Sequence[int]], list[CodedCell]]
"""Function that reads the records of several cells by the cells' numbers, which must have no duplicates."""


class CodeScanner:
    """Computes distances between queries and the codes (compressed keys) of a group's cells.

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
        self._codec, self._room = codec, cell_cache
        # Distances do not depend on the origin; with the mean key as origin they lose the fewest digits.
        is_euclidean = metric is Metric.L2
        self._middle = codec.centers.mean(0) if is_euclidean else np.zeros_like(codec.centers[0])
        self._codes = create_cell_codes(codec, self._middle, cells, metric)
        self._lengths: dict[int, int] = {}  # number of records of each cell in memory
        self.held = 0
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
        relative_queries, cells = np.ascontiguousarray(queries - self._middle), np.ascontiguousarray(cells)
        with self._room.wait_to_grow():
            self._load_cells(cells, read)
            ids, distances = self._codes.measure(relative_queries, cells)
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
        relative_queries, cells = np.ascontiguousarray(queries - self._middle), np.ascontiguousarray(cells)
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
                self._load_cells(cells[batch], read)
                found = self._codes.measure(relative_queries[batch], cells[batch])
                for numbers, ids, distances in zip(cells[batch].tolist(), *found, strict=True):
                    offset = 0
                    for number in numbers:
                        if number == _NONE:
                            continue
                        length = self._lengths[number]
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
        self._codes.clear()
        self._lengths.clear()
        self.held = 0

    def _load_cells(self, cells: NDArray[np.int64], read: Read) -> None:
        """Read the codes (compressed keys) of cells whose codes are not in memory yet, and keep the codes.

        If the memory limit is exceeded, the cell cache drops decoded cells.

        Args:
            cells: numbers of the cells that each query searches, shape (q, p); padded with -1.
            read: function that reads the records of cells.
        """
        # Sets, because the first `np.unique` imports masked arrays, which takes 8 ms.
        numbers = cells.ravel().tolist()
        missing = sorted({number for number in numbers if number not in self._lengths} - {_NONE})
        if not missing:
            return
        for number, cell in zip(missing, read(missing), strict=True):
            relative_keys = self._codec.turned(cell.codes) - self._middle
            self._codes.add_cell(number, cell, np.einsum("ij,ij->i", relative_keys, relative_keys))
            self._lengths[number] = len(cell.ids)
            self.held += len(cell.ids) * (cell.codes.shape[1] + _BYTES_BESIDE)
        self._room.shrink()
