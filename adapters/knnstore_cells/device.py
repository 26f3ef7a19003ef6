"""Keys in the memory of a device, where many cells are visited at a time."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from knnstore.datastore import Codec, CodecFile, IdRanges, Ids, Metric, ProductCodec, Segment, Visits
from knnstore.errors import ConfigError
from knnstore_cells.index import SegmentCells

_log = logging.getLogger(__name__)

_QUERIES = 64  # most queries of one visit
_RECORDS = 128  # most records of one visit
_COMPONENTS_AT_ONCE = 1 << 28
_ROWS_AT_ONCE = 1 << 18
_SHARE_OF_MEMORY = 0.7  # the rest is for distances and for the model


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off torch's autocast, which would round distances and mix dtypes that cannot be added."""
    with ExitStack() as switched_off:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                switched_off.enter_context(torch.autocast(device, enabled=False))
        yield


class Order(NamedTuple):
    """Some rows of `DeviceKeys`, sorted by cell, on the device."""

    rows: Tensor | None
    """Row numbers, shape (n,); None for all rows."""

    starts: Tensor
    """Begin of each cell in `rows`, and the end of the last one, shape (cells + 1,)."""


class Visitors(NamedTuple):
    """Queries that visit cells, on the device."""

    cells: Tensor
    """Numbers of the cells, each once, shape (c,)."""

    queries: Tensor
    """Numbers of the queries, sorted by cell, shape (n,)."""

    starts: Tensor
    """Begin of each cell in `queries`, and the end of the last one, shape (c + 1,)."""


class DeviceKeys:
    """The keys of a segment, sorted by cell, in their stored form.

    Args:
        segment: the segment.
        cells: the cells of its rows.
        codec_file: codec of the group; keys with another codec are held decoded.
        turned: rotates keys that are not coded; see `Visitable.turned`.
        origins: centers of the cells, rotated, on the device.
    """

    def __init__(
        self,
        segment: Segment,
        cells: SegmentCells,
        codec_file: CodecFile | None,
        turned: Callable[[Tensor], Tensor],
        origins: Tensor,
    ) -> None:
        columns, self._row_of = segment.columns, cells.rows.astype(np.int64)
        self._origins, device = origins, origins.device
        self._ids: Ids = columns.ids_at(self._row_of)
        self._starts = cells.starts
        self._all = Order(None, torch.from_numpy(cells.starts).to(device))
        self._chosen: tuple[object, object, Order] = (None, None, self._all)
        self._decode: Callable[[Tensor], Tensor] = lambda keys: turned(keys.float())
        read: Callable[[NDArray[np.int64]], NDArray[np.generic]] = columns.keys_at
        if codec_file is not None and columns.codec_file is codec_file:
            self._decode = _decoder(codec_file.codec, device)
            read = lambda rows: columns.codes_at(rows, codec_file)  # noqa: E731
        starts = range(0, max(1, len(self._row_of)), _ROWS_AT_ONCE)
        parts = [torch.from_numpy(read(self._row_of[at : at + _ROWS_AT_ONCE])).to(device) for at in starts]
        owners = torch.split(torch.repeat_interleave(self._all.starts.diff()), _ROWS_AT_ONCE)
        self._values = torch.cat(parts)
        self._norms = torch.cat(
            [
                (self._decode(values) - origins[owner]).square().sum(1)
                for values, owner in zip(parts, owners, strict=True)
            ]
        )
        """|key - origin|² of each row."""

    def chosen(self, alive: NDArray[np.bool_] | None, ids: IdRanges | None) -> Order:
        """Return the live rows (`alive`) with these ids. The result of the last call is kept."""
        if alive is None and ids is None:
            return self._all
        if self._chosen[0] is not alive or self._chosen[1] is not ids:
            there = np.ones(len(self._ids), bool) if alive is None else alive[self._row_of]
            if ids is not None:
                there &= ids.contains(self._ids)
            rows = np.flatnonzero(there)
            arrays = rows, np.searchsorted(rows, self._starts)
            order = Order(*(torch.from_numpy(one).to(self._values.device) for one in arrays))
            self._chosen = alive, ids, order
        return self._chosen[2]

    def visit(self, visitors: Visitors, order: Order, queries: Tensor, metric: Metric) -> Iterator[Visits]:
        """Compare queries with the records of their cells, and yield visits of one shape.

        Args:
            visitors: the queries that visit each cell.
            order: the rows to compare; see `chosen`.
            queries: queries, rotated, on the device, float32, shape (q, width).
            metric: metric of the distances.
        """
        tiles = _tiles(visitors, order)
        widest = max(one.shape[1] for one in tiles[1:])
        step = max(1, _COMPONENTS_AT_ONCE // (queries.shape[1] * widest))
        for at, numbers, rows in zip(*(torch.split(one, step) for one in tiles), strict=True):
            there, asking = rows.clamp(min=0), queries[numbers.clamp(min=0)]
            keys = self._decode(self._values[there])
            if metric is Metric.IP:
                distances = torch.bmm(asking, keys.mT).neg_()
            else:  # |(q - o) - (k - o)|², where (q - o)(k - o) = (q - o)k - (q - o)o
                origins = self._origins[at, None]
                asking -= origins
                distances = torch.baddbmm(self._norms[there][:, None], asking, keys.mT, alpha=-2)
                distances += (asking.square() + 2 * asking * origins).sum(2)[..., None]
                distances.clamp_(min=0)
            distances.masked_fill_((numbers < 0)[..., None] | (rows < 0)[:, None], torch.inf)
            asked, met = numbers.cpu().numpy(), rows.cpu().numpy()
            ids = np.where(met < 0, -1, self._ids[met])
            yield Visits(asked, ids, distances if distances.is_cuda else distances.numpy())


def chosen_device(name: str, needed: int) -> torch.device | None:
    """Choose the device that holds the keys; None leaves them in their files.

    Args:
        name: a torch device, ``none``, or ``auto`` for the GPU if there is one with room.
        needed: bytes of the keys in their stored form.

    Raises:
        ConfigError: torch has no such device.
    """
    if name == "none" or (name == "auto" and not torch.cuda.is_available()):
        return None
    if name == "auto":
        free = torch.cuda.mem_get_info()[0]
        if needed > _SHARE_OF_MEMORY * free:
            sizes = needed / 1e9, free / 1e9
            _log.warning("the keys stay in their files: they are %.1f GB; the GPU has %.1f GB free", *sizes)
            return None
        name = "cuda"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"cells: device {name!r} cannot be used: {reason}") from None


def _tiles(visitors: Visitors, order: Order) -> tuple[Tensor, Tensor, Tensor]:
    """Divide visits into t tiles with at most m queries and r records.

    Returns:
        The cell of each tile, shape (t,); its queries, shape (t, m); its rows, shape (t, r). -1 if a query or
        row is missing.
    """
    begins, ends = order.starts[visitors.cells], order.starts[visitors.cells + 1]
    counts, askers = ends - begins, visitors.starts.diff()
    across = _power_of_two(len(visitors.queries) / max(1, len(askers)), _QUERIES)
    down = _power_of_two(int(counts.max()) if len(counts) else 1, _RECORDS)
    of_rows = -(-counts // down)
    each = -(-askers // across) * of_rows
    visit = torch.repeat_interleave(each)
    number = torch.arange(len(visit), device=visit.device) - (each.cumsum(0) - each)[visit]
    column, row = number // of_rows[visit], number % of_rows[visit]
    asked = _slices(visitors.starts[visit] + column * across, visitors.starts[visit + 1], across)
    met = _slices(begins[visit] + row * down, ends[visit], down)
    return (
        visitors.cells[visit],
        torch.where(asked < 0, -1, visitors.queries[asked]),
        met if order.rows is None else torch.where(met < 0, -1, order.rows[met]),
    )


def _power_of_two(least: float, most: int) -> int:
    """Return the smallest power of two that is at least `least`, but at most `most`."""
    return min(most, 1 << math.ceil(math.log2(max(1.0, least))))


def _slices(starts: Tensor, stops: Tensor, width: int) -> Tensor:
    """Return the numbers from each start to its stop, then -1; shape (len(starts), width)."""
    at = starts[:, None] + torch.arange(width, device=starts.device)
    return torch.where(at < stops[:, None], at, -1)


def _decoder(codec: Codec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes codes, shape (..., size), on a device, as `Codec.turned` does."""
    if not isinstance(codec, ProductCodec):
        return lambda codes: codes[..., 4:].view(torch.int8) * codes[..., :4].contiguous().view(torch.float32)
    centers = torch.from_numpy(codec.centers).to(device)
    entries = torch.from_numpy(codec.books).to(device).flatten(0, 1)
    offsets = torch.arange(len(codec.books), device=device) * codec.books.shape[1]

    def decode(codes: Tensor) -> Tensor:
        pieces = embedding(codes[..., 1:] + offsets, entries)
        return pieces.flatten(-2) + embedding(codes[..., 0].int(), centers)

    return decode
