"""Records, queries and results of a search on a device such as a GPU, as its functions and kernels need them.

A cell is a cluster of records whose keys are near each other. A query *probes* its nearest cells: it is
compared with all records of these cells.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Records(NamedTuple):
    """The records of a segment (an immutable set of records) on the device, sorted by cell."""

    values: Tensor
    """The keys as they are stored: codes (compressed keys), uint8, shape (rows, size), or half precision,
    float16, shape (rows, dim)."""

    decode: Callable[[Tensor], Tensor]
    """Function that converts rows of `values`, shape (..., size), to keys, float32, shape (..., width)."""

    middle: Tensor
    """Vector that is subtracted from keys and queries, so that rounding errors are small; float32, shape
    (width,). It is 0 for inner products."""

    norms: Tensor
    """|key - middle|² of each record, float32, shape (rows,); 0 for inner products."""

    tokens: Tensor
    """Token of each record, int32, shape (rows,)."""

    starts: Tensor
    """Bounds of each cell, int64, shape (cells + 1,): positions in `rows`, or row numbers if that is None."""

    rows: Tensor | None
    """Numbers of the rows to find, int64, sorted by cell; None for all rows."""

    width: int
    """Largest number of records to find in a cell."""

    books: "Books | None"
    """The tables of the codec if `values` are codes of a product quantizer; else None."""


class Books(NamedTuple):
    """The tables of a product quantizer (`ProductCodec`) on the device."""

    centers: Tensor
    """The centers, float32, shape (256, width)."""

    books: Tensor
    """The codebook of each part, float32, shape (parts, 256, width / parts)."""


class Queries(NamedTuple):
    """q queries in the space of a segment's keys, in the terms from which distances are computed.

    The distance of a query to a key is square + norm - factor * product. The product is that of the row of
    `vectors` and the key minus the middle.
    """

    vectors: Tensor
    """Query vectors minus the middle, float32, shape (q, width)."""

    squares: Tensor
    """|query - middle|², float32, shape (q,); 0 for inner products."""

    factor: float
    """2 for squared Euclidean distances; 1 for inner products, whose distance is the negative product."""


class Probed(NamedTuple):
    """The p cells that each of q queries probes, and where the results of their records begin."""

    cells: Tensor
    """Numbers of the cells, int64, shape (q, p); -1 in place of a cell of another group."""

    columns: Tensor
    """Column of `Found` for the first record of each cell, int64, shape (q, p); ascending in each row."""


class Found(NamedTuple):
    """Distances and tokens of the records in the cells that each of q queries probes, to be filled in."""

    distances: Tensor
    """Distances, float32, shape (q, r), contiguous; +inf in a column without a record."""

    tokens: Tensor
    """Tokens, int32, shape (q, r), contiguous."""

    @classmethod
    def create(cls, queries: int, columns: int, device: torch.device) -> Self:
        """Return empty results: all distances are +inf, all tokens are 0."""
        distances = torch.full((queries, columns), torch.inf, device=device)
        return cls(distances, torch.zeros((queries, columns), dtype=torch.int32, device=device))


def make_tables(queries: Queries, records: Records) -> Tensor:
    """Multiply queries with all centers and codebook entries of the codec that compressed the records.

    A decoded key is a center plus an entry of each part's codebook, so its product with a query is a sum of
    1 + parts values of the query's tables.

    Args:
        queries: the queries.
        records: records that are codes of a product quantizer.

    Returns:
        Float32, shape (q, 1 + parts, 256), contiguous: the products with the centers minus the middle, then
        with the entries of each part.
    """
    assert records.books is not None
    centers, books = records.books
    pieces = queries.vectors.view(len(queries.vectors), len(books), -1)
    with_centers = queries.vectors @ (centers - records.middle).T
    return torch.cat([with_centers[:, None], torch.einsum("qms,mes->qme", pieces, books)], 1)
