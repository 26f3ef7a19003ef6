"""The nearest of all records that queries met in the cells that they visited."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.mixing.meetings import VisitedCells

_PROCESSOR = "cpu"


def nearest_records(
    cells: Sequence[VisitedCells], asked: Tensor, count: int, k: int
) -> tuple[Tensor, Tensor]:
    """Find the k nearest records of each query.

    Args:
        cells: on one device.
        asked: the queries of all cells, one after another, int64, shape (pairs,); `count` where one is
            missing.
        count: queries, n.
        k: how many.

    Returns:
        Distances and tokens, shape (n, k), nearest first; +inf and anything where there are fewer.
    """
    if asked.device.type == _PROCESSOR:
        return _selected(cells, asked.numpy(), count, k)
    bounds, begins = _bounds(cells, asked, count, k), asked.new_zeros(0)
    queries, distances, tokens = [begins], [bounds[:0]], [begins]
    for some, of_cells in _with(cells, asked):
        found = (some.distances <= bounds[of_cells]).nonzero(as_tuple=True)
        queries.append(of_cells[..., 0][found[:2]])
        distances.append(some.distances[found])
        tokens.append(some.tokens[found[0], found[2]])
    away, owners = torch.cat(distances), torch.cat(queries)
    order = away.argsort()
    owners, then = owners[order].sort(stable=True)
    order, place = order[then], _places(owners)
    chosen = (place < k) & (owners < count)
    near, of_near = away.new_full((count, k), torch.inf), asked.new_zeros(count, k)
    at = owners[chosen], place[chosen]
    near[at], of_near[at] = away[order[chosen]], torch.cat(tokens)[order[chosen]]
    return near, of_near


def _selected(
    cells: Sequence[VisitedCells], asked: NDArray[np.int64], count: int, k: int
) -> tuple[Tensor, Tensor]:
    """The same on a processor, where numpy selects from whole numbers faster than torch sorts.

    A distance's bits and a token make one number; numbers are in the order of distances.
    """
    nothing = np.int64(_ordered(np.array(np.inf, np.float32))) << 32
    leasts, done = np.full((len(asked), k), nothing), 0
    for some in cells:
        numbers = _ordered(some.distances.numpy()).astype(np.int64) << 32 | some.tokens.numpy()[:, None]
        least = numbers if numbers.shape[2] <= k else np.partition(numbers, k - 1, axis=2)[..., :k]
        rows = least.reshape(-1, least.shape[2])
        leasts[done : done + len(rows), : rows.shape[1]] = rows
        done += len(rows)
    order = asked.argsort(kind="stable")
    owners = asked[order]
    place = np.arange(len(owners)) - np.searchsorted(owners, owners)
    there = owners < count
    most = int(place.max(initial=0)) + 1
    table = np.full((count, most, k), nothing)
    table[owners[there], place[there]] = leasts[order[there]]
    found = np.partition(table.reshape(count, most * k), k - 1, axis=1)[:, :k]
    found.sort(axis=1)
    near = _ordered((found >> 32).astype(np.int32).view(np.float32)).view(np.float32)
    return torch.from_numpy(near), torch.from_numpy(found & 0xFFFFFFFF)


def _ordered(distances: NDArray[np.float32]) -> NDArray[np.int32]:
    """Their bits as numbers in the same order, int32; the same again makes bits of them."""
    bits = distances.view(np.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _bounds(cells: Sequence[VisitedCells], asked: Tensor, count: int, k: int) -> Tensor:
    """What hardly more than the k nearest of each query are within, shape (n + 1,).

    The records of each cell are divided into k groups. The nearest of each group, of all cells a query
    visits, are a few, and the k-th of these is at least as far as the k-th of all.
    """
    leasts = [torch.empty(0, k, device=asked.device)]
    for some in cells:
        whole = some.distances.shape[2] // k * k
        least = some.distances.new_full((*some.distances.shape[:2], k), torch.inf)
        if whole:
            torch.amin(some.distances[..., :whole].reshape(*least.shape[:2], -1, k), 2, out=least)
        rest = some.distances[..., whole:]
        least[..., : rest.shape[2]] = torch.minimum(least[..., : rest.shape[2]], rest)
        leasts.append(least.flatten(0, 1))
    owners, order = asked.sort(stable=True)
    there = owners < count
    owners, place, order = owners[there], _places(owners)[there], order[there]
    most = int(place.max()) + 1 if len(place) else 1
    table = leasts[0].new_full((count + 1, most, k), torch.inf)
    table[owners, place] = torch.cat(leasts)[order]
    bounds = table.flatten(1).topk(k, largest=False, sorted=False).values.amax(1)
    return bounds.clamp(max=torch.finfo(bounds.dtype).max)  # what is missing is beyond it


def _with(cells: Sequence[VisitedCells], asked: Tensor) -> Iterator[tuple[VisitedCells, Tensor]]:
    """The cells, each with the queries that visit it, shape (b, m, 1)."""
    parts = torch.split(asked, [some.queries.numel() for some in cells])
    for some, part in zip(cells, parts, strict=True):
        yield some, part.view(*some.queries.shape, 1)


def _places(owners: Tensor) -> Tensor:
    """The how many-th of its owner's each is; owners ascend; shape (n,)."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
