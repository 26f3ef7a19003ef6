"""Visits: each query is compared with all records of its nearest cells, over several groups."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import IdRanges, Keys, Metric, Visit, Visits
from knnstore_cells.device import Visitors
from knnstore_cells.kept import Cell
from knnstore_cells.scanning import CodedCell, CodeScanner

DISTANCES_AT_ONCE = 1 << 24
"""Number of distances, float32, that are in memory at once."""
_FEW = 64  # more queries than this may share many of their cells
_DECODING = 64  # decoding a key costs as much as computing its distance by tables so many times


class Cells(NamedTuple):
    """The cells of a group that queries may visit."""

    numbers: NDArray[np.int64]
    """Numbers of the cells, shape (cells,)."""

    centers: Tensor
    """Centers, float32, shape (cells, dim), stored by columns."""

    half_norms: Tensor
    """|center|²/2, float32, shape (cells,)."""

    @classmethod
    def of(cls, centers: Tensor, counts: NDArray[np.int64]) -> Self:
        """Select the cells that have a record."""
        numbers = np.flatnonzero(counts)
        there = centers if len(numbers) == len(centers) else centers.T[:, torch.from_numpy(numbers)].T
        return cls(numbers, there, (there * there).sum(1) / 2)


class Visitable(Protocol):
    """A group with cells."""

    metric: Metric
    device: torch.device | None
    """Device that holds all keys; None if cells are read one by one."""

    middle: Tensor
    """Origin of the keys in `Cell`, rotated, float32, shape (width,)."""

    def cells_with(self, ids: IdRanges | None) -> Cells:
        """Return the cells that have live records with these ids; None for all ids."""

    def turned(self, vectors: Tensor) -> Tensor:
        """Rotate vectors, shape (n, dim), as the codec rotates keys. Distances stay the same."""

    def cell(self, number: int) -> Cell:
        """Return the live records of a cell."""

    rows: int
    """Number of live records."""

    room: int
    """Maximum number of bytes of decoded keys in memory, of all groups together."""

    def scanner(self) -> CodeScanner | None:
        """Return the scanner of the codes; None if the keys are not all codes that it can read."""

    def codes(self, numbers: Sequence[int]) -> list[CodedCell]:
        """Return the live records of some different cells as codes."""

    def visit_on_device(self, visitors: Visitors, queries: Tensor, ids: IdRanges | None) -> Iterator[Visits]:
        """Compare queries with the records of their cells on the device."""


def visit(groups: Sequence[Visitable], queries: Keys, probes: int, ids: IdRanges | None) -> list[Visits]:
    """Compare each query with the records of its nearest cells of all groups; see `SupportsCells.visit`."""
    if not groups or not len(queries):
        return []
    there = [group.cells_with(ids) for group in groups]
    numbers_of_all = np.concatenate([of.numbers for of in there])
    if not len(numbers_of_all):
        return []
    asked = torch.from_numpy(np.require(queries, requirements="W"))  # torch warns about read-only arrays
    asked = asked.to(there[0].centers.device)
    metric = groups[0].metric
    few = len(queries) <= _FEW
    nearest = _nearest_cells(asked, there, min(probes, len(numbers_of_all)), metric, ranked=not few)
    scanners = [group.scanner() for group in groups] if few or _shares_little(groups, nearest, there) else []
    able = [scanner for scanner in scanners if scanner is not None]
    if len(able) == len(groups):
        of_each = _by_group(nearest.numpy(), [of.numbers for of in there])
        scanned = list[Visits]()
        for group, scanner, numbers in zip(groups, able, of_each, strict=True):
            if len(groups) == 1 or (numbers >= 0).any():
                given = group.turned(asked).numpy(), numbers, group.codes
                scanned += [scanner.scan(*given)] if few else scanner.scan_by_cell(*given)
        return scanned if ids is None else [some.only(ids.contains(some.ids)) for some in scanned]
    owners = np.repeat(np.arange(len(groups)), [len(of.numbers) for of in there])
    turned = cache(lambda owner: groups[owner].turned(asked) - groups[owner].middle)
    squares = cache(lambda owner: (turned(owner) * turned(owner)).sum(1))
    if len(queries) == 1 and groups[0].device is None:
        rows = nearest[0].tolist()
        visited = [(groups[owners[row]], turned(owners[row]), int(numbers_of_all[row])) for row in rows]
        return [Visits.of(_visit_alone(visited, ids))]
    order = nearest.flatten().argsort(stable=True)
    visitors = order.div(nearest.shape[1], rounding_mode="floor")
    rows, counts = torch.unique_consecutive(nearest.flatten()[order], return_counts=True)
    if groups[0].device is not None:
        visits, ends = list[Visits](), pad(counts.cumsum(0), (1, 0))
        numbers_met = torch.from_numpy(numbers_of_all).to(rows.device)[rows]
        firsts = torch.from_numpy(owners.searchsorted(range(len(groups) + 1))).to(rows.device)
        shares = torch.searchsorted(rows, firsts).tolist()
        for group, first, last in zip(groups, shares, shares[1:], strict=False):
            of_group = Visitors(numbers_met[first:last], visitors, ends[first : last + 1])
            visits += group.visit_on_device(of_group, asked, ids)
        return visits
    ranks = None if few else order.remainder(nearest.shape[1]).numpy()
    visits, done = [], 0
    for row, of_cell in zip(rows.tolist(), torch.split(visitors, counts.tolist()), strict=True):
        group, number = groups[owners[row]], int(numbers_of_all[row])
        found, keys, norms = _matching(group.cell(number), ids)
        met = turned(owners[row])[of_cell]
        if metric is Metric.IP:
            distances = -(met @ keys.T)
        else:
            distances = torch.addmm(norms, met, keys.T, alpha=-2)
            distances += squares(owners[row])[of_cell, None]
            distances.clamp_(min=0)
        own_ranks = None if ranks is None else ranks[done : done + len(of_cell)]
        visits.append(Visits.of(Visit(of_cell.numpy(), found, distances.numpy(), ranks=own_ranks)))
        done += len(of_cell)
    return visits


def _shares_little(groups: Sequence[Visitable], nearest: Tensor, cells: Sequence[Cells]) -> bool:
    """Check whether scanning codes is faster: few queries share a cell, and decoded keys have no room."""
    decoded = sum(4 * group.rows * len(group.middle) for group in groups)
    lacking = max(0.0, 1 - groups[0].room / max(1, decoded))
    return nearest.numel() < lacking * _DECODING * sum(len(of.numbers) for of in cells)


def _by_group(
    nearest: NDArray[np.int64], numbers: Sequence[NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Yield the cells of each group that queries visit, shape (q, probes); -1 for cells of other groups."""
    if len(numbers) == 1:
        yield numbers[0][nearest]
        return
    first = 0
    for own in numbers:
        at = nearest - first
        yield np.where((at >= 0) & (at < len(own)), np.append(own, -1)[at.clip(0, len(own))], -1)
        first += len(own)


def _visit_alone(visited: Sequence[tuple[Visitable, Tensor, int]], ids: IdRanges | None) -> Visit:
    """Compare a single query with all records of its cells.

    Args:
        visited: the group of each cell, the query in the coordinates of that group, shape (1, d), and the
            number of the cell in the group.
        ids: ids of the records to compare with; None compares with all.

    Returns:
        One visit of the query 0 with the records of all cells.
    """
    cells = [_matching(group.cell(number), ids) for group, _, number in visited]
    found = np.concatenate([cell.ids for cell in cells])
    distances = torch.empty(len(found))
    lengths = [len(cell.ids) for cell in cells]
    parts = torch.split(distances, lengths)
    if visited[0][0].metric is Metric.IP:
        for (_, query, _), cell, part in zip(visited, cells, parts, strict=True):
            torch.mv(cell.keys, query[0], out=part)
        distances.neg_()
    else:
        for (_, query, _), cell, part in zip(visited, cells, parts, strict=True):
            torch.addmv(cell.norms, cell.keys, query[0], alpha=-2, out=part)
        squares = [float(query[0].dot(query[0])) for _, query, _ in visited]
        distances += torch.from_numpy(np.repeat(np.array(squares, np.float32), lengths))
        distances.clamp_(min=0)
    return Visit(np.zeros(1, np.int64), found, distances.numpy()[None])


def _matching(cell: Cell, ids: IdRanges | None) -> Cell:
    """Return the records of a cell with these ids."""
    if ids is None:
        return cell
    chosen = ids.contains(cell.ids)
    if chosen.all():
        return cell
    rows = torch.from_numpy(np.flatnonzero(chosen))
    return Cell(cell.ids[chosen], cell.keys[rows], cell.norms[rows])


def _nearest_cells(
    queries: Tensor, cells: Sequence[Cells], probes: int, metric: Metric, *, ranked: bool
) -> Tensor:
    """Find the nearest cells of each query among those of all groups.

    Returns:
        Indices into the cells of all groups in a row, int64, shape (q, probes); with `ranked` nearest first.
    """
    counts = [len(of.numbers) for of in cells]
    if probes == sum(counts) and (probes == 1 or not ranked):
        return torch.arange(probes, device=queries.device).expand(len(queries), -1)
    norms = [of.half_norms if metric is Metric.L2 else torch.zeros_like(of.half_norms) for of in cells]
    found, step = [], max(1, DISTANCES_AT_ONCE // sum(counts))
    for start in range(0, len(queries), step):
        some = queries[start : start + step]
        if len(cells) == 1:
            away = torch.addmm(norms[0], some, cells[0].centers.T, alpha=-1)
        else:
            away = some.new_empty(len(some), sum(counts))  # the centers of the groups are not concatenated
            for of, own, part in zip(cells, norms, torch.split(away, counts, dim=1), strict=True):
                torch.addmm(own, some, of.centers.T, alpha=-1, out=part)
        found.append(away.topk(probes, largest=False, sorted=ranked).indices)
    return found[0] if len(found) == 1 else torch.cat(found)
