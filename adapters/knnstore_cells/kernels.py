"""The search of probed cells as kernels for a GPU, in Triton (https://triton-lang.org).

A cell is a cluster of records whose keys are near each other. A query *probes* its nearest cells: it is
compared with all records of these cells. A *pair* is a query with a cell that it probes. This module has
three kernels, each with a function that starts it:

    measure_codes   distances from codes (compressed keys), by look-up tables
    measure_keys    distances from keys in half precision, by dot products
    sum_by_token    sums of exp(-d/T) for each token, from these distances

The first two read each probed cell once, also if several queries probe it: the pairs are sorted by cell,
and the programs of the first pair of a cell read its records and compare them with all queries of the cell.
The sums need the distance of the nearest record, so that no sum overflows. So they are a second kernel, which
reads 8 bytes for each record, and not the codes again. No function here waits for the GPU.

The results are those of `measure_with_torch` and `sum_with_torch` in `knnstore_cells.device_search`, but for
the last digits: sums are added in another order, and atomic additions in an order that changes from run to
run. The kernels have run in Triton's interpreter only (`TRITON_INTERPRET=1`), not on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from knnstore_cells.device_records import Found, Probed, Queries, Records

_RECORDS = 64  # records that a program of the kernels compares
_QUERIES = 16  # queries that are compared with keys at once; a product of matrices needs 16 rows
_COMPONENTS = 64  # components of keys that are multiplied at once
_SUMMED = 512  # distances that a program of `sum_by_token` sums


class Pairs(NamedTuple):
    """The n = q * p pairs of q queries and the p cells that each of them probes, sorted by cell."""

    cells: Tensor
    """Number of the cell of each pair, int64, ascending, shape (n,); -1 for no cell."""

    pairs: Tensor
    """Number of each pair before sorting, int64, shape (n,). Pair i is of query i // p."""

    firsts: Tensor
    """Index of the first pair with the same cell, int64, shape (n,)."""

    ends: Tensor
    """Index of the last pair with the same cell plus one, int64, shape (n,)."""

    @classmethod
    def sort(cls, cells: Tensor) -> "Pairs":
        """Sort the pairs of queries and cells by cell.

        Args:
            cells: numbers of the cells that each query probes, int64, shape (q, p); -1 for no cell.
        """
        ordered, pairs = cells.flatten().sort()
        firsts = torch.searchsorted(ordered, ordered)
        return cls(ordered, pairs, firsts, torch.searchsorted(ordered, ordered, right=True))


def measure_codes(probed: Probed, records: Records, tables: Tensor, queries: Queries, found: Found) -> None:
    """Fill in distances and tokens for codes of a product quantizer, as `measure_distances` does.

    Args:
        probed: the cells that each query probes.
        records: the records; their values are codes, uint8, shape (rows, 1 + parts), contiguous.
        tables: result of `device_records.make_tables`, float32, shape (q, 1 + parts, 256), contiguous.
        queries: the queries.
        found: filled; a column without a record is not changed.
    """
    parts = records.values.shape[1] - 1
    with _select_device(tables):
        _measure_codes[probed.cells.numel(), triton.cdiv(records.width, _RECORDS)](
            *_list_arguments(probed, records, queries, found), tables,
            parts=parts, padded_parts=triton.next_power_of_2(parts), records=_RECORDS,
            has_rows=records.rows is not None,
        )  # fmt: skip


def measure_keys(probed: Probed, records: Records, queries: Queries, found: Found) -> None:
    """Fill in distances and tokens for keys in half precision, as `measure_distances` does.

    Args:
        probed: the cells that each query probes.
        records: the records; their values are keys, float16, shape (rows, dim), contiguous.
        queries: the queries; their vectors are contiguous.
        found: filled; a column without a record is not changed.
    """
    with _select_device(queries.vectors):
        _measure_keys[probed.cells.numel(), triton.cdiv(records.width, _RECORDS)](
            *_list_arguments(probed, records, queries, found), queries.vectors, records.middle,
            dim=records.values.shape[1], records=_RECORDS, queries=_QUERIES, components=_COMPONENTS,
            has_rows=records.rows is not None,
        )  # fmt: skip


def sum_by_token(
    distances: Tensor, tokens: Tensor, nearest: Tensor, temperatures: Tensor, vocabulary: int
) -> Tensor:
    """Sum the weights of each token's records; same result as `device_search.sum_with_torch`.

    Args:
        distances: distances of each query's records, float32, shape (q, r), contiguous; +inf for no record.
        tokens: tokens of these records, int32, shape (q, r), contiguous.
        nearest: smallest distance of each query, float32, shape (q,).
        temperatures: t temperatures of each query, float32, shape (q, t).
        vocabulary: number of tokens, v.

    Returns:
        Float32, shape (q, t, v).
    """
    (queries, columns), count = distances.shape, temperatures.shape[1]
    sums = distances.new_zeros((queries, count, vocabulary))
    with _select_device(distances):
        _sum_by_token[queries, triton.cdiv(columns, _SUMMED)](
            distances, tokens, nearest, temperatures.contiguous(), sums, columns, vocabulary,
            temperatures_count=count, block=_SUMMED,
        )  # fmt: skip
    return sums


def _select_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU the current one, where Triton starts kernels. Does nothing in the interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _list_arguments(probed: Probed, records: Records, queries: Queries, found: Found) -> tuple[Any, ...]:
    """Return the arguments that both kernels for distances have in common, in their order."""
    rows = records.starts if records.rows is None else records.rows  # any tensor: not used without rows
    return (
        *(*Pairs.sort(probed.cells), probed.columns, probed.cells.shape[1]),
        *(records.values, records.norms, records.tokens, records.starts, rows),
        *(queries.squares, queries.factor, *found, found.distances.shape[1]),
    )


@triton.jit(do_not_specialize=["probes", "columns"])  # type: ignore[untyped-decorator]
def _measure_codes(  # type: ignore[no-untyped-def]
    cells, pairs, firsts, ends, begins, probes, codes, norms, tokens, starts, rows,
    squares, factor, found_distances, found_tokens, columns, tables,
    parts: tl.constexpr, padded_parts: tl.constexpr, records: tl.constexpr, has_rows: tl.constexpr,
):  # fmt: skip
    # 1) This program: the first pair of a cell, and a block of the cell's records.
    place = tl.program_id(0)
    cell = tl.load(cells + place)
    if (cell >= 0) & (tl.load(firsts + place) == place):
        column = tl.program_id(1) * records + tl.arange(0, records)
        at = tl.load(starts + cell) + column
        is_record = at < tl.load(starts + cell + 1)
        row = tl.load(rows + at, mask=is_record, other=0) if has_rows else at
        # 2) Read the codes once.
        part = tl.arange(0, padded_parts)
        start_of_code = row * (parts + 1)
        center = tl.load(codes + start_of_code, mask=is_record, other=0).to(tl.int32)
        is_code = is_record[:, None] & (part < parts)[None, :]
        entries = tl.load(codes + start_of_code[:, None] + 1 + part[None, :], mask=is_code, other=0)
        places_in_table = (part[None, :] + 1) * 256 + entries.to(tl.int32)
        norm = tl.load(norms + row, mask=is_record, other=0.0)
        token = tl.load(tokens + row, mask=is_record, other=0)
        # 3) Compare them with each query of the cell.
        for other in range(place, tl.load(ends + place)):
            pair = tl.load(pairs + other)
            query = pair // probes
            table = tables + query * (parts + 1) * 256
            product = tl.load(table + center, mask=is_record, other=0.0)
            product += tl.sum(tl.load(table + places_in_table, mask=is_code, other=0.0), axis=1)
            distance = tl.load(squares + query) + norm - factor * product
            in_row = tl.load(begins + pair) + column
            is_filled = is_record & (in_row < columns)
            filled = query * columns + in_row
            tl.store(found_distances + filled, distance, mask=is_filled)
            tl.store(found_tokens + filled, token, mask=is_filled)


@triton.jit(do_not_specialize=["probes", "columns"])  # type: ignore[untyped-decorator]
def _measure_keys(  # type: ignore[no-untyped-def]
    cells, pairs, firsts, ends, begins, probes, keys, norms, tokens, starts, rows,
    squares, factor, found_distances, found_tokens, columns, query_vectors, middle, dim,
    records: tl.constexpr, queries: tl.constexpr, components: tl.constexpr, has_rows: tl.constexpr,
):  # fmt: skip
    # 1) This program: the first pair of a cell, and a block of the cell's records.
    place = tl.program_id(0)
    cell = tl.load(cells + place)
    if (cell >= 0) & (tl.load(firsts + place) == place):
        column = tl.program_id(1) * records + tl.arange(0, records)
        at = tl.load(starts + cell) + column
        is_record = at < tl.load(starts + cell + 1)
        row = tl.load(rows + at, mask=is_record, other=0) if has_rows else at
        norm = tl.load(norms + row, mask=is_record, other=0.0)
        token = tl.load(tokens + row, mask=is_record, other=0)
        last = tl.load(ends + place)
        # 2) Compare the keys with a few queries of the cell at once; most cells have no more than that.
        for first in range(place, last, queries):
            others = first + tl.arange(0, queries)
            is_query = others < last
            pair = tl.load(pairs + others, mask=is_query, other=0)
            query = pair // probes
            products = tl.zeros((queries, records), dtype=tl.float32)
            for begin in range(0, dim, components):
                component = begin + tl.arange(0, components)
                is_component = component < dim
                key = tl.load(
                    keys + row[None, :] * dim + component[:, None],
                    mask=is_record[None, :] & is_component[:, None],
                    other=0.0,
                ).to(tl.float32)
                key -= tl.load(middle + component, mask=is_component, other=0.0)[:, None]
                vector = tl.load(
                    query_vectors + query[:, None] * dim + component[None, :],
                    mask=is_query[:, None] & is_component[None, :],
                    other=0.0,
                )
                products += tl.dot(vector, key, input_precision="ieee")
            square = tl.load(squares + query, mask=is_query, other=0.0)
            distance = square[:, None] + norm[None, :] - factor * products
            begin_of_pair = tl.load(begins + pair, mask=is_query, other=0)
            in_row = begin_of_pair[:, None] + column[None, :]
            is_filled = is_query[:, None] & is_record[None, :] & (in_row < columns)
            filled = (query * columns)[:, None] + in_row
            tl.store(found_distances + filled, distance, mask=is_filled)
            tl.store(
                found_tokens + filled, tl.broadcast_to(token[None, :], (queries, records)), mask=is_filled
            )


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _sum_by_token(  # type: ignore[no-untyped-def]
    distances, tokens, nearest, temperatures, sums, columns, vocabulary,
    temperatures_count: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    at = query * columns + column
    distance = tl.load(distances + at, mask=column < columns, other=float("inf"))
    token = tl.minimum(tl.load(tokens + at, mask=column < columns, other=0), vocabulary - 1)
    is_found = distance < float("inf")
    near = tl.load(nearest + query)
    near = tl.where(near < float("inf"), near, 0.0)  # a query without records
    gap = near - tl.where(is_found, distance, near)
    for number in tl.static_range(temperatures_count):
        of_query = query * temperatures_count + number
        weight = tl.exp(gap / tl.load(temperatures + of_query))
        tl.atomic_add(sums + of_query * vocabulary + token, weight, mask=is_found)
