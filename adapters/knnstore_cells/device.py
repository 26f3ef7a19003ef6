"""Keys in the memory of a device such as a GPU, where many cells are compared with queries at the same time.

A cell is a cluster of records whose keys are near each other. A query *probes* its nearest cells: it is
compared with all records of these cells.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from knnstore.datastore import (
    Codec,
    CodecFile,
    IdRanges,
    Ids,
    Metric,
    ProductCodec,
    Segment,
    Visits,
    tokens_from_ids,
)
from knnstore.errors import ConfigError
from knnstore_cells.device_records import Books, Found, Probed, Queries, Records
from knnstore_cells.device_search import measure_distances
from knnstore_cells.index import SegmentCells

_log = logging.getLogger(__name__)

_QUERIES = 64  # most queries of one visit
_RECORDS = 128  # most records of one visit
_COMPONENTS_AT_ONCE = 1 << 28
_ROWS_AT_ONCE = 1 << 18
_SHARE_OF_MEMORY = 0.7  # the rest is for distances and for the model


def disable_autocast() -> ExitStack:
    """Return a context manager that switches off torch's autocast (automatic half precision).

    Autocast would round distances, and mix dtypes that cannot be added.
    """
    switched_off = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            switched_off.enter_context(torch.autocast(device, enabled=False))
    return switched_off


class RowsByCell(NamedTuple):
    """A choice of n records of a `DeviceKeys`, sorted by cell. The arrays are on the device.

    A cell is a cluster of records with near keys. Row i of a `DeviceKeys` is its i-th record.
    """

    rows: Tensor | None
    """Row numbers, int64, shape (n,); None for all rows."""

    starts: Tensor
    """Bounds in `rows`, shape (cells + 1,): the rows of cell i are at starts[i] to starts[i + 1] - 1."""

    largest: int
    """Number of rows of the cell with the most rows; 0 without rows."""


class QueriesByCell(NamedTuple):
    """The queries that probe each of c cells, sorted by cell. The arrays are on the device.

    A cell is a cluster of records with near keys. A query probes a cell if it is compared with all records of
    the cell.
    """

    cells: Tensor
    """Numbers of the cells, each once, shape (c,)."""

    queries: Tensor
    """Row numbers of the queries, sorted by cell, shape (n,). A query occurs once for each of its cells."""

    starts: Tensor
    """Bounds in `queries`, shape (c + 1,): the queries of cells[i] are at starts[i] to starts[i + 1] - 1."""


class DeviceKeys:
    """The keys of a segment in the memory of a device, sorted by cell, in their stored form.

    A segment is a set of files with records of one group. The stored form is half precision, or codes
    (compressed keys).

    Args:
        segment: the segment.
        cells: the cell of each record of the segment.
        codec_file: codec (compressor of keys) of the group; None if the group has none. Keys that were
            compressed by another codec are decoded first.
        rotate: function that rotates uncompressed keys to the space in which distances are computed.
        origins: centers of the cells, rotated, float32, shape (cells, width), on the device.
    """

    def __init__(
        self,
        segment: Segment,
        cells: SegmentCells,
        codec_file: CodecFile | None,
        rotate: Callable[[Tensor], Tensor],
        origins: Tensor,
    ) -> None:
        columns, self._row_of = segment.columns, cells.rows.astype(np.int64)
        self._origins, device = origins, origins.device
        self._ids: Ids = columns.ids_at(self._row_of)
        self._starts = cells.starts
        self.largest_token = int(tokens_from_ids(self._ids).max(initial=0))
        """Largest token of the records; 0 without records."""
        self._all = RowsByCell(
            None, torch.from_numpy(cells.starts).to(device), int(cells.counts.max(initial=0))
        )
        self._last_selection: tuple[object, object, RowsByCell] = (None, None, self._all)
        self._decode: Callable[[Tensor], Tensor] = lambda keys: rotate(keys.float())
        self._records: Records | None = None
        self._books: Books | None = None
        self.is_coded = False
        """True if the keys are codes of the group's codec, so that decoded keys are rotated."""
        read: Callable[[NDArray[np.int64]], NDArray[np.generic]] = columns.keys_at
        if codec_file is not None and columns.codec_file is codec_file:
            self.is_coded, codec = True, codec_file.codec
            self._decode = _make_decoder(codec, device)
            if isinstance(codec, ProductCodec):
                self._books = Books(
                    torch.from_numpy(codec.centers).to(device), torch.from_numpy(codec.books).to(device)
                )
            read = lambda rows: columns.codes_at(rows, codec_file)  # noqa: E731
        starts = range(0, max(1, len(self._row_of)), _ROWS_AT_ONCE)
        parts = [
            torch.from_numpy(read(self._row_of[start : start + _ROWS_AT_ONCE])).to(device) for start in starts
        ]
        owners = torch.split(torch.repeat_interleave(self._all.starts.diff()), _ROWS_AT_ONCE)
        self._values = torch.cat(parts)
        self._norms = torch.cat(
            [
                (self._decode(values) - origins[owner]).square().sum(1)
                for values, owner in zip(parts, owners, strict=True)
            ]
        )
        """|key - center of its cell|² of each record, in the order of the cells."""

    def select_rows(self, alive: NDArray[np.bool_] | None, ids: IdRanges | None) -> RowsByCell:
        """Select the records that a search may find, and return their row numbers, sorted by cell.

        A cell is a cluster of records with near keys. The result of the last call is cached.

        Args:
            alive: mask of the segment's records, False for deleted and replaced records; None if no record is
                deleted or replaced.
            ids: ids of the records to select; None selects all records that are not deleted or replaced.
        """
        if alive is None and ids is None:
            return self._all
        last_alive, last_ids, order = self._last_selection  # read once: other threads may replace it
        if last_alive is not alive or last_ids is not ids:
            is_selected = np.ones(len(self._ids), bool) if alive is None else alive[self._row_of]
            if ids is not None:
                is_selected &= ids.contains(self._ids)
            rows = np.flatnonzero(is_selected)
            starts = np.searchsorted(rows, self._starts)
            device, largest = self._values.device, int(np.diff(starts).max(initial=0))
            order = RowsByCell(
                torch.from_numpy(rows).to(device), torch.from_numpy(starts).to(device), largest
            )
            self._last_selection = alive, ids, order
        return order

    def measure_distances(
        self,
        probed: Probed,
        queries: Tensor,
        order: RowsByCell,
        middle: Tensor,
        metric: Metric,
        found: Found,
    ) -> None:
        """Compute the distances of a few queries to the records of their cells; do not wait for the device.

        A cell is a cluster of records with near keys. The first call computes the norm of each key, which
        stays in the memory of the device together with the tokens: 8 bytes for each record.

        Args:
            probed: the cells that each query probes.
            queries: query vectors, float32, shape (q, width), on the device; rotated if `is_coded`.
            order: the records to compare with, a result of `select_rows`.
            middle: vector that is subtracted from keys and queries, in the space of the queries; the same at
                each call. Not used for inner products.
            metric: metric of the distances.
            found: filled; a column without a record is not changed.
        """
        if self._records is None:
            self._records = self._make_records(middle, metric)
        records = self._records._replace(starts=order.starts, rows=order.rows, width=order.largest)
        vectors = queries - records.middle
        is_l2 = metric is Metric.L2
        squares = vectors.square().sum(1) if is_l2 else vectors.new_zeros(len(vectors))
        measure_distances(probed, records, Queries(vectors, squares, 2.0 if is_l2 else 1.0), found)

    def _make_records(self, middle: Tensor, metric: Metric) -> Records:
        """Return all records with norms and tokens, ready for `device_search.measure_distances`.

        Args:
            middle: vector that is subtracted from keys and queries before they are compared, shape (dim,). It
                is replaced by zeros for another metric than L2.
            metric: the distance.
        """
        device = self._values.device
        decode = self._decode if self.is_coded else Tensor.float
        norms = [torch.empty(0, device=device)]
        if metric is Metric.L2:
            parts = torch.split(self._values, _ROWS_AT_ONCE)
            norms += [(decode(values) - middle).square().sum(1) for values in parts]
        else:
            middle = torch.zeros_like(middle)
            norms.append(torch.zeros(len(self._values), device=device))
        tokens = torch.from_numpy(tokens_from_ids(self._ids).astype(np.int32)).to(device)
        all_rows = self._all
        return Records(
            self._values, decode, middle, torch.cat(norms), tokens, all_rows.starts, None, all_rows.largest,
            self._books,
        )  # fmt: skip

    def visit(
        self, visitors: QueriesByCell, order: RowsByCell, queries: Tensor, metric: Metric
    ) -> Iterator[Visits]:
        """Compute the distances between queries and the records of the cells that they probe.

        A visit holds the distances between some queries and some records of one cell. All visits have the
        same shape, so a cell with many queries or records is divided among several visits.

        Args:
            visitors: the queries that probe each cell.
            order: the records to compare with, a result of `select_rows`.
            queries: query vectors, rotated, float32, shape (q, width), on the device.
            metric: metric of the distances.

        Yields:
            `Visits`, each a stack of several visits. The distances are a tensor on the device if it is a GPU,
            else a numpy array.
        """
        tiles = _divide_into_tiles(visitors, order)
        widest = max(tile.shape[1] for tile in tiles[1:])
        step = max(1, _COMPONENTS_AT_ONCE // (queries.shape[1] * widest))
        for cells, numbers, rows in zip(*(torch.split(tile, step) for tile in tiles), strict=True):
            key_rows, tile_queries = rows.clamp(min=0), queries[numbers.clamp(min=0)]
            keys = self._decode(self._values[key_rows])
            if metric is Metric.IP:
                distances = torch.bmm(tile_queries, keys.mT).neg_()
            else:  # |(q - o) - (k - o)|², where (q - o)(k - o) = (q - o)k - (q - o)o
                origins = self._origins[cells, None]
                tile_queries -= origins
                distances = torch.baddbmm(self._norms[key_rows][:, None], tile_queries, keys.mT, alpha=-2)
                distances += (tile_queries.square() + 2 * tile_queries * origins).sum(2)[..., None]
                distances.clamp_(min=0)
            distances.masked_fill_((numbers < 0)[..., None] | (rows < 0)[:, None], torch.inf)
            query_numbers, row_numbers = numbers.cpu().numpy(), rows.cpu().numpy()
            ids = np.where(row_numbers < 0, -1, self._ids[row_numbers])
            yield Visits(
                query_numbers, ids, distances.numpy() if distances.device.type == "cpu" else distances
            )


def choose_device(name: str, needed: int) -> torch.device | None:
    """Choose the device (such as a GPU) in whose memory the keys are kept for searches.

    Logs a warning if ``auto`` finds a GPU with too little free memory.

    Args:
        name: name of a torch device; ``none`` for no device; or ``auto`` for a GPU if one has enough free
            memory, else no device.
        needed: number of bytes of all keys in their stored form.

    Returns:
        The device; None if the keys stay in their files and are read when needed.

    Raises:
        ConfigError: torch has no device with this name.
    """
    if name == "none" or (name == "auto" and not torch.cuda.is_available()):
        return None
    if name == "auto":
        free = torch.cuda.mem_get_info()[0]
        if needed > _SHARE_OF_MEMORY * free:
            sizes = needed / 1e9, free / 1e9
            _log.warning(
                "the keys are not copied to the GPU: they need %.1f GB, and %.1f GB are free", *sizes
            )
            return None
        name = "cuda"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"cells: device {name!r} cannot be used: {reason}") from None


def _divide_into_tiles(visitors: QueriesByCell, order: RowsByCell) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the work of comparing queries with records into t tiles of equal size.

    A query is compared with all records of each cell (a cluster of near keys) that it probes. A tile consists
    of up to m queries that probe the same cell, and up to r records of this cell. All tiles together have
    every pair of a query and a record once.

    Args:
        visitors: the queries that probe each cell.
        order: the records to compare with, sorted by cell.

    Returns:
        The cell number of each tile, shape (t,); the row numbers of its queries, shape (t, m); and the row
        numbers of its records, shape (t, r). The last two are padded with -1.
    """
    begins, ends = order.starts[visitors.cells], order.starts[visitors.cells + 1]
    counts, query_counts = ends - begins, visitors.starts.diff()
    tile_queries = _round_up_to_power_of_two(len(visitors.queries) / max(1, len(query_counts)), _QUERIES)
    tile_rows = _round_up_to_power_of_two(int(counts.max()) if len(counts) else 1, _RECORDS)
    row_tiles = -(-counts // tile_rows)
    tiles_per_cell = -(-query_counts // tile_queries) * row_tiles
    cell_of_tile = torch.repeat_interleave(tiles_per_cell)
    number = (
        torch.arange(len(cell_of_tile), device=cell_of_tile.device)
        - (tiles_per_cell.cumsum(0) - tiles_per_cell)[cell_of_tile]
    )
    column, row = number // row_tiles[cell_of_tile], number % row_tiles[cell_of_tile]
    query_positions = _list_numbers(
        visitors.starts[cell_of_tile] + column * tile_queries, visitors.starts[cell_of_tile + 1], tile_queries
    )
    row_positions = _list_numbers(begins[cell_of_tile] + row * tile_rows, ends[cell_of_tile], tile_rows)
    return (
        visitors.cells[cell_of_tile],
        torch.where(query_positions < 0, -1, visitors.queries[query_positions]),
        row_positions
        if order.rows is None
        else torch.where(row_positions < 0, -1, order.rows[row_positions]),
    )


def _round_up_to_power_of_two(least: float, most: int) -> int:
    """Return the smallest power of two that is at least `least`; if it exceeds `most`, return `most`."""
    return min(most, 1 << math.ceil(math.log2(max(1.0, least))))


def _list_numbers(starts: Tensor, stops: Tensor, width: int) -> Tensor:
    """Write the numbers of several ranges into the rows of a matrix.

    Args:
        starts: first number of each range, shape (n,).
        stops: last number of each range plus one, shape (n,).
        width: number of columns. Numbers that do not fit into a row are left out.

    Returns:
        Matrix of shape (n, width). Row i holds the numbers starts[i] to stops[i] - 1, padded with -1.
    """
    numbers = starts[:, None] + torch.arange(width, device=starts.device)
    return torch.where(numbers < stops[:, None], numbers, -1)


def _make_decoder(codec: Codec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes codes (compressed keys) to rotated keys on a device.

    Args:
        codec: codec that made the codes.
        device: device on which the codes are.

    Returns:
        A function that converts codes, uint8, shape (..., size), to approximate rotated keys, float32, shape
        (..., width), as `Codec.decode_rotated` does.
    """
    if not isinstance(codec, ProductCodec):
        return lambda codes: codes[..., 4:].view(torch.int8) * codes[..., :4].contiguous().view(torch.float32)
    centers = torch.from_numpy(codec.centers).to(device)
    entries = torch.from_numpy(codec.books).to(device).flatten(0, 1)
    offsets = torch.arange(len(codec.books), device=device) * codec.books.shape[1]

    def decode(codes: Tensor) -> Tensor:
        """Decode codes, uint8, shape (..., size), to rotated keys, float32, shape (..., width).

        Codes are compressed keys.
        """
        pieces = embedding(codes[..., 1:] + offsets, entries)
        return pieces.flatten(-2) + embedding(codes[..., 0].int(), centers)

    return decode
