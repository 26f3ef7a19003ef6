"""Distances between a few queries and the records of their cells, on a device such as a GPU, without waiting.

A cell is a cluster of records whose keys are near each other. A query *probes* its nearest cells: it is
compared with all records of these cells. A program that generates text on a GPU is slow if it waits for the
GPU in the middle of a step: the GPU has nothing to do until the program has gone on. So the results stay on
the device (`DeviceVisits`), and no shape depends on a result: a query that probes p cells has as many columns
as the p largest cells have records.

If Triton is installed and the device is a GPU, the kernels of `knnstore_cells.kernels` do the work. Otherwise
`measure_with_torch` and `sum_with_torch` do it, with operations of torch; so they do after an error of a
kernel.
"""

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from knnstore_cells.device_records import Books, Found, Probed, Queries, Records, make_tables

T = TypeVar("T")

_log = logging.getLogger(__name__)

_kernels: dict[torch.device, Any] = {}
"""The module `knnstore_cells.kernels` for each device on which a search ran; None if it cannot be used."""

SWITCH = "KNNSTORE_TRITON"
"""Environment variable that switches the kernels off with the value ``0``."""

_COMPONENTS_AT_ONCE = 1 << 26  # components of decoded keys in memory, without the kernels


class DeviceVisits(NamedTuple):
    """The records of the cells that q queries probe, each in one of r columns, on the device."""

    distances: Tensor
    """Distances, float32, shape (q, r), in any order; +inf in a column without a record."""

    tokens: Tensor
    """Tokens, int32, shape (q, r); arbitrary in a column without a record."""

    largest_token: int
    """Largest token of all records of the searched groups."""

    def select_rows(self, rows: Any) -> "DeviceVisits":
        """Return the records of some of the queries; `rows` is a slice, indices or a mask."""
        return self._replace(distances=self.distances[rows], tokens=self.tokens[rows])

    def sum_by_token(self, temperatures: Tensor, vocabulary: int) -> Tensor:
        """Sum exp((d₀ - d)/T) over the records of each token, where d₀ is the query's smallest distance.

        Args:
            temperatures: t temperatures of each query, float32, shape (q, t), on the device.
            vocabulary: number of tokens, v. A record with a larger token counts for the last token.

        Returns:
            Float32, shape (q, t, v); 0 for a query without records.
        """
        arguments = self.distances, self.tokens, self.distances.amin(1), temperatures, vocabulary
        sums: Tensor = _run_kernel(
            self.distances.device,
            lambda kernels: kernels.sum_by_token(*arguments),
            lambda: sum_with_torch(*arguments),
        )
        return sums


def measure_distances(probed: Probed, records: Records, queries: Queries, found: Found) -> None:
    """Compute the distances of queries to the records of the cells that they probe.

    Args:
        probed: the cells that each query probes.
        records: the records, at least one.
        queries: the queries.
        found: filled; a column without a record is not changed.
    """
    if records.books is None and records.values.dtype != torch.float16:  # no kernel reads such values
        measure_with_torch(probed, records, queries, found)
        return

    def measure_with(kernels: Any) -> None:
        """Fill `found` with the kernel for the kind of the records' values."""
        if records.books is None:
            kernels.measure_keys(probed, records, queries, found)
        else:
            kernels.measure_codes(probed, records, make_tables(queries, records), queries, found)

    _run_kernel(
        found.distances.device, measure_with, lambda: measure_with_torch(probed, records, queries, found)
    )


def measure_with_torch(probed: Probed, records: Records, queries: Queries, found: Found) -> None:
    """Fill in distances and tokens as `measure_distances` does, with torch: decode and multiply keys."""
    columns = torch.arange(found.distances.shape[1], device=found.distances.device)
    step = max(1, _COMPONENTS_AT_ONCE // max(1, len(columns) * len(records.middle)))
    for start in range(0, len(found.distances), step):
        part = slice(start, start + step)
        # 1) Find the cell of each column: the last that begins there or before. Others have no record.
        begins = probed.columns[part]
        rank = torch.searchsorted(begins, columns.expand(len(begins), -1).contiguous(), right=True) - 1
        rank.clamp_(min=0)
        cells, place = probed.cells[part].gather(1, rank), columns - begins.gather(1, rank)
        at = records.starts[cells.clamp(min=0)] + place
        is_record = (place >= 0) & (at < records.starts[cells.clamp(min=0) + 1]) & (cells >= 0)
        # 2) Multiply its keys with the query.
        rows = at.where(is_record, 0)
        rows = rows if records.rows is None else records.rows[rows]
        keys = records.decode(records.values[rows]) - records.middle
        products = torch.einsum("qd,qrd->qr", queries.vectors[part], keys)
        distances = queries.squares[part, None] + records.norms[rows] - queries.factor * products
        found.distances[part] = distances.where(is_record, found.distances[part])
        found.tokens[part] = records.tokens[rows].where(is_record, found.tokens[part])


def sum_with_torch(
    distances: Tensor, tokens: Tensor, nearest: Tensor, temperatures: Tensor, vocabulary: int
) -> Tensor:
    """Sum the weights of each token's records as `DeviceVisits.sum_by_token` does, with operations of torch.

    Args:
        distances: distances of each query's records, float32, shape (q, r); +inf for no record.
        tokens: tokens of these records, int32, shape (q, r).
        nearest: smallest distance of each query, float32, shape (q,).
        temperatures: t temperatures of each query, float32, shape (q, t).
        vocabulary: number of tokens, v.

    Returns:
        Float32, shape (q, t, v).
    """
    gaps = (nearest[:, None] - distances).where(distances < torch.inf, -torch.inf)
    weights = (gaps[:, None] / temperatures[..., None]).exp_()
    places = tokens.long().clamp(max=vocabulary - 1)[:, None].expand(weights.shape)
    return distances.new_zeros((*temperatures.shape, vocabulary)).scatter_add_(2, places, weights)


def get_kernels(device: torch.device) -> Any:
    """Return the module `knnstore_cells.kernels` for a GPU on which its kernels can be used; else None."""
    if device not in _kernels:
        _kernels[device] = _load_kernels(device) if device.type == "cuda" else None
    return _kernels[device]


def _run_kernel(device: torch.device, run: Callable[[Any], T], run_plainly: Callable[[], T]) -> T:
    """Return the result of a kernel, or of operations of torch if kernels cannot be used on the device.

    If the kernel fails, for example because it does not compile for the shapes of this search, a warning is
    logged, and no kernel is used on the device any more. An error for lack of memory is raised: the
    operations of torch need more.

    Args:
        device: the device of the tensors.
        run: function that calls the kernel. Its argument is the module `knnstore_cells.kernels`.
        run_plainly: function that computes the same with operations of torch.
    """
    kernels = get_kernels(device)
    if kernels is None:
        return run_plainly()
    try:
        return run(kernels)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler or a driver
        _warn_of_kernels(device, f"{type(error).__name__}: {error}")
        _kernels[device] = None
        return run_plainly()


def _warn_of_kernels(device: torch.device, problem: str) -> None:
    """Log a warning that kernels are not used on a device, with the reason."""
    _log.warning(
        "Triton's kernels cannot be used on %s, so slower operations of torch are: %s", device, problem
    )


def _load_kernels(device: torch.device) -> Any:
    """Import the kernels, and compare them once with the operations of torch on a GPU.

    Returns:
        The module. None without Triton, which the extra ``gpu`` installs, or if the environment variable
        `SWITCH` is ``0``. Also None, with a warning, if a kernel fails or computes something else.
    """
    if os.environ.get(SWITCH) == "0" or find_spec("triton") is None:
        return None
    try:
        from knnstore_cells import kernels

        if verify_kernels(kernels, device):
            return kernels
        problem = "their results differ from those of torch"
    except Exception as error:  # of a compiler, a driver, or a version of Triton that is not known
        problem = f"{type(error).__name__}: {error}"
    _warn_of_kernels(device, problem)
    return None


def verify_kernels(kernels: Any, device: torch.device) -> bool:
    """Check on a small example that the kernels compute what the functions of torch compute.

    Args:
        kernels: the module `knnstore_cells.kernels`.
        device: the device on which they run.
    """
    random = torch.Generator().manual_seed(0)
    parts, dim, rows = 32, 96, 100

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    books = Books(draw(256, dim), draw(parts, 256, dim // parts))
    codes = torch.randint(256, (rows, 1 + parts), generator=random, dtype=torch.uint8).to(device)
    number = torch.arange(parts, device=device)

    def decode(values: Tensor) -> Tensor:
        entries = books.books[number, values[..., 1:].long()]
        return books.centers[values[..., 0].long()] + entries.flatten(-2)

    probed = Probed(
        torch.tensor([[0, 2], [2, -1], [1, 2]], device=device),
        torch.tensor([[0, 70], [0, 30], [0, 0]], device=device),
    )
    starts, middle = torch.tensor([0, 70, 70, rows], device=device), draw(dim)
    tokens = torch.arange(rows, dtype=torch.int32, device=device) % 7
    vectors, temperatures = draw(3, dim), torch.tensor([[20.0, 40.0]], device=device)
    squares = vectors.square().sum(1)
    of_keys = Records(
        draw(rows, dim).half(), Tensor.float, middle, draw(rows), tokens, starts, None, 70, None
    )
    of_codes = of_keys._replace(values=codes, decode=decode, books=books)
    of_some = torch.arange(rows, device=device).flip(0)
    for records, factor in (
        *((records, 2.0) for records in (of_codes, of_keys)),
        *((records._replace(rows=of_some), 1.0) for records in (of_codes, of_keys)),
    ):
        queries = Queries(vectors, squares, factor)
        expected, found = (Found.create(3, rows, device) for _ in range(2))
        measure_with_torch(probed, records, queries, expected)
        if records.books is None:
            kernels.measure_keys(probed, records, queries, found)
        else:
            kernels.measure_codes(probed, records, make_tables(queries, records), queries, found)
        arguments = *expected, expected.distances.amin(1), temperatures.expand(3, -1), 7
        sums = [add_up(*arguments) for add_up in (sum_with_torch, kernels.sum_by_token)]
        pairs = [*zip(found, expected, strict=True), sums]
        if not all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in pairs):
            return False
    return True
