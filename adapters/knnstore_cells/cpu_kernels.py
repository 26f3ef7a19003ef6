"""The comparison of queries with codes (compressed keys) on a CPU, compiled by Numba (https://numba.pydata.org).

`knnstore_cells.coded_cells` calls `measure_codes` if Numba is installed. The kernels for a GPU are in
`knnstore_cells.kernels`.

Importing this module compiles the function, which takes some seconds. Numba keeps the machine code for later
processes: in ``__pycache__`` beside this file, or else in the user's cache folder, or in the folder that the
environment variable ``NUMBA_CACHE_DIR`` names. If no folder can be written, each process compiles again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

PARTS_AT_ONCE = 8
"""Number of tables (of 1 KiB) from which sums are added at once, so that they stay in the nearest cache. The
second dimension of `codes` is a multiple of it."""

_SIGNATURE = (
    "boolean(float32[:,::1], float32[::1], int64[:,::1], int64[::1], int64[::1], uint8[::1], uint8[:,::1], "
    "float32[::1], int64[::1], float32[:,::1], float32[:,:,::1], float32, float32, "
    "int64[:,::1], float32[:,::1])"
)
_OPTIONS: dict[str, Any] = {
    "nogil": True,  # other threads of Python, such as those of a server, go on
    "fastmath": {"reassoc", "contract", "nsz"},  # sums in any order; NaN and infinities stay what they are
}


def _compile(function: Callable[..., bool]) -> Callable[..., bool]:
    """Compile a function, and keep its machine code in a file if a folder for it can be written."""
    compiled: Callable[..., bool]
    try:
        compiled = njit(_SIGNATURE, cache=True, **_OPTIONS)(function)
    except (OSError, RuntimeError):  # no folder can be written, or the disk is full
        compiled = njit(_SIGNATURE, **_OPTIONS)(function)
    return compiled


@_compile
def measure_codes(
    queries: NDArray[np.float32],
    squares: NDArray[np.float32],
    cells: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    firsts: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    norms: NDArray[np.float32],
    ids: NDArray[np.int64],
    centers: NDArray[np.float32],
    books: NDArray[np.float32],
    factor: np.float32,
    least: np.float32,
    found_ids: NDArray[np.int64],
    found_distances: NDArray[np.float32],
) -> bool:
    """Compute the distances of q queries to all records of their cells, cell after cell in each row.

    A distance is ``square + norm - factor * product``, but at least `least`. The product of a query with a
    key is the product with the key's center plus a number from each part's table of products.

    Args:
        queries: query vectors minus the middle, shape (q, width).
        squares: first term of each query's distances, shape (q,).
        cells: numbers of the cells of each query, shape (q, p); negative numbers are skipped.
        starts: row of the first record of each cell.
        counts: number of records of each cell.
        firsts: number of the center of each record, shape (rows,).
        codes: numbers of the codebook entries of each record, shape (rows, padded parts); columns after the
            last part are 0.
        norms: second term of the distances to each record, shape (rows,).
        ids: id of each record, shape (rows,).
        centers: the centers minus the middle, shape (256, width).
        books: the codebooks, shape (parts, width / parts, 256).
        factor: factor of the products.
        least: least distance.
        found_ids: filled with the ids of the records, shape (q, r).
        found_distances: filled with the distances, shape (q, r).

    Returns:
        True if all distances are finite.
    """
    parts, length, entries = books.shape
    table = np.zeros((codes.shape[1], entries), np.float32)
    products = np.empty(len(centers), np.float32)
    is_known = np.empty(len(centers), np.bool_)
    is_finite = True
    for query in range(len(queries)):
        # 1) Multiply the query with all entries of the codebooks. Products with centers are computed when
        #    a record needs them, since most cells have few of the centers.
        for part in range(parts):
            table[part] = 0
            for component in range(length):
                value = queries[query, part * length + component]
                for entry in range(entries):
                    table[part, entry] += value * books[part, component, entry]
        is_known[:] = False
        column = 0
        for cell in cells[query]:
            if cell < 0:
                continue
            start, count = np.uintp(starts[cell]), counts[cell]
            distances = found_distances[query, column : column + count]
            # 2) Sum the products of the parts, some parts at a time.
            for begin in range(0, codes.shape[1], PARTS_AT_ONCE):
                for record in range(count):
                    total = np.float32(0)
                    row = start + np.uintp(record)  # unsigned, so that no index is tested for its sign
                    for part in range(PARTS_AT_ONCE):
                        place = np.uintp(begin + part)
                        total += table[place, codes[row, place]]
                    distances[record] = total if begin == 0 else distances[record] + total
            # 3) Add the product with the center, and compute the distance.
            for record in range(count):
                row = start + np.uintp(record)
                center = firsts[row]
                if not is_known[center]:
                    is_known[center] = True
                    total = np.float32(0)
                    for component in range(queries.shape[1]):
                        total += queries[query, component] * centers[center, component]
                    products[center] = total
                product = products[center] + distances[record]
                distance = squares[query] + norms[row] - factor * product
                is_finite = is_finite and abs(distance) < np.inf
                distances[record] = max(least, distance)
                found_ids[query, column + record] = ids[row]
            column += count
    return is_finite
