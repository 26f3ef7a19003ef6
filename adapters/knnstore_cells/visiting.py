"""Search of groups that are divided into cells.

`CellSearch` finds the k nearest records of one group. `visit_cells` compares queries with all records of
their nearest cells, in several groups, and `measure_on_device` does this for a few queries on a device.

A cell is a cluster of records with near keys. A group is a numbered set of records, such as a domain, that
has its own cells.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import IdRanges, Keys, Metric, Neighbors, Visit, Visits
from knnstore_cells.cell_cache import Cell
from knnstore_cells.device import QueriesByCell
from knnstore_cells.device_records import Found, Probed
from knnstore_cells.device_search import DeviceVisits
from knnstore_cells.group import CellGroup, Cells

_SMALL = 4096  # with at most so many matching records, a query is compared with all of them
DISTANCES_AT_ONCE = 1 << 24
"""Largest number of distances (float32) that are in memory at the same time."""
_FEW = 64  # more queries than this may share many of their cells
_DECODING = 64  # decoding a key costs as much as computing its distance by tables so many times


class CellSearch(CellGroup):
    """Searches one group for the nearest records of queries; the arguments are those of `CellGroup`."""

    def search(self, queries: Keys, k: int, ids: IdRanges | None) -> Neighbors:
        """Find approximately the k nearest records of each query; see `GroupSearch.search`.

        The result is exact if few records match: at most 4096, or at most 4 * k. Then every query is compared
        with all matching records. Otherwise a query is compared with the records of its nearest cells. If at
        least k records match, no neighbor is missing.
        """
        counts = self.count_matching(ids)
        total, cells = int(counts.sum()), int((counts > 0).sum())
        if total == 0 or not len(queries):
            return Neighbors.all_missing(len(queries), k)
        probes = cells if total <= max(_SMALL, 4 * k) else self._policy.choose_probe_count(k, cells, total)
        neighbors = self._search_cells(queries, k, ids, probes)
        short = np.flatnonzero(neighbors.ids[:, min(k, total) - 1] < 0)
        if len(short):  # the visited cells hold fewer than k matching records
            neighbors.replace_rows(short, self._search_cells(queries[short], k, ids, cells))
        return neighbors

    def _search_cells(self, queries: Keys, k: int, ids: IdRanges | None, probes: int) -> Neighbors:
        """Find the k nearest records of each query among the records of its `probes` nearest cells.

        Arguments and result are those of `search`. If the nearest cells of a query have fewer than k matching
        records, each missing neighbor has id -1 and distance +inf.
        """
        largest = np.sort(self.count_matching(ids))[-probes:].sum()
        step = max(1, DISTANCES_AT_ONCE // int(largest))
        parts = []
        for start in range(0, len(queries), step):
            batch = queries[start : start + step]
            visits = visit_cells([self], batch, probes, ids)
            parts.append(Neighbors.from_visits(visits, len(batch)).select_nearest(k))
        return Neighbors.concatenate(parts, axis=0)


def measure_on_device(
    groups: Sequence[CellGroup], queries: Tensor, probes: int, ids: IdRanges | None
) -> DeviceVisits | None:
    """Compute the distances of a few queries to all records of their nearest cells, without waiting.

    A cell is a cluster of records with near keys. The nearest cells of a query are chosen among the cells of
    all groups together. The results stay on the device; see `knnstore_cells.device_search`.

    Args:
        groups: the groups to search; all have the same metric and device.
        queries: query vectors, float32, shape (q, dim), on any device.
        probes: number of cells to search for each query, >= 1. Cells without a matching record do not count.
        ids: ids of the records that match; None lets all records match.

    Returns:
        The distances and tokens. None if `visit_cells` has to be called: the groups' keys are not on the
        device of the queries, no record matches, or there are too many queries or columns.
    """
    if not groups or groups[0].device != queries.device or not 0 < len(queries) <= _FEW:
        return None
    cells_of_groups = [group.find_cells(ids) for group in groups]
    counts = [len(group_cells.numbers) for group_cells in cells_of_groups]
    probes = min(probes, sum(counts))
    largest = np.sort(
        np.concatenate([group_cells.descending_counts[:probes] for group_cells in cells_of_groups])
    )
    columns = int(largest[len(largest) - probes :].sum())
    if not 0 < len(queries) * columns <= DISTANCES_AT_ONCE:
        return None
    metric = groups[0].metric
    nearest = _find_nearest_cells(queries, cells_of_groups, probes, metric, is_ranked=False)
    found = Found.create(len(queries), columns, queries.device)
    records = torch.cat([group_cells.counts_on_device for group_cells in cells_of_groups])[nearest]
    begins, first = records.cumsum(1) - records, 0
    for group, group_cells, count in zip(groups, cells_of_groups, counts, strict=True):
        if count:
            index = nearest - first
            numbers = group_cells.numbers_on_device[index.clamp(0, count - 1)]
            cells = numbers.where((index >= 0) & (index < count), -1)
            group.measure_distances(Probed(cells, begins), queries, ids, found)
        first += count
    if metric is Metric.L2:
        found.distances.clamp_(min=0)
    largest_token = max(group.largest_token for group in groups)
    return DeviceVisits(*found, largest_token)


def visit_cells(
    groups: Sequence[CellGroup], queries: Keys, probes: int, ids: IdRanges | None
) -> list[Visits]:
    """Compute the distances of each query to all records of its nearest cells (clusters of near keys).

    A group is a numbered set of records, such as a domain, that has its own cells. The nearest cells of a
    query are chosen among the cells of all groups together. Cells without a matching record are left out.

    Args:
        groups: the groups to search; all must have the same metric and device.
        queries: query vectors, float32, shape (q, dim).
        probes: number of cells to search for each query, >= 1.
        ids: ids of the records that match; None lets all records match.

    Returns:
        A list of `Visits`. Each `Visits` has arrays of query numbers, record ids and the distances between
        these queries and records. The list is empty if there is no group, no query or no matching record.
    """
    if not groups or not len(queries):
        return []
    cells_of_groups = [group.find_cells(ids) for group in groups]
    numbers_of_all = np.concatenate([group_cells.numbers for group_cells in cells_of_groups])
    if not len(numbers_of_all):
        return []
    # torch warns about read-only arrays, so a read-only array is copied.
    query_tensor = torch.from_numpy(queries if queries.flags.writeable else queries.copy())
    query_tensor = query_tensor.to(cells_of_groups[0].centers.device)
    metric = groups[0].metric
    is_small_batch = len(queries) <= _FEW
    nearest = _find_nearest_cells(
        query_tensor, cells_of_groups, min(probes, len(numbers_of_all)), metric, is_ranked=not is_small_batch
    )
    # 1) Compute distances from codes, if that is faster and possible for all groups.
    scanners = (
        [group.get_scanner() for group in groups]
        if is_small_batch or _is_scanning_faster(groups, nearest, cells_of_groups)
        else []
    )
    usable_scanners = [scanner for scanner in scanners if scanner is not None]
    if len(usable_scanners) == len(groups):
        cells_by_group = _split_by_group(
            nearest.numpy(), [group_cells.numbers for group_cells in cells_of_groups]
        )
        scanned = list[Visits]()
        for group, scanner, numbers in zip(groups, usable_scanners, cells_by_group, strict=True):
            if len(groups) == 1 or (numbers >= 0).any():
                arguments = group.rotate(query_tensor).numpy(), numbers, group.read_codes
                scanned += [scanner.scan(*arguments)] if is_small_batch else scanner.scan_by_cell(*arguments)
        return (
            scanned if ids is None else [stack.select_records(ids.contains(stack.ids)) for stack in scanned]
        )
    # 2) A single query without a device: all its cells make one visit.
    owners = np.repeat(np.arange(len(groups)), [len(group_cells.numbers) for group_cells in cells_of_groups])
    relative_queries = cache(lambda owner: groups[owner].rotate(query_tensor) - groups[owner].middle)
    squares = cache(lambda owner: (relative_queries(owner) * relative_queries(owner)).sum(1))
    if len(queries) == 1 and groups[0].device is None:
        rows = nearest[0].tolist()
        visited = [
            (groups[owners[row]], relative_queries(owners[row]), int(numbers_of_all[row])) for row in rows
        ]
        return [Visits.from_visit(_visit_single_query(visited, ids))]
    # 3) Sort the queries by cell, and compare each cell's queries with its records, on the device if any.
    order = nearest.flatten().argsort(stable=True)
    sorted_queries = order.div(nearest.shape[1], rounding_mode="floor")
    rows, counts = torch.unique_consecutive(nearest.flatten()[order], return_counts=True)
    if groups[0].device is not None:
        visits, ends = list[Visits](), pad(counts.cumsum(0), (1, 0))
        cell_numbers = torch.from_numpy(numbers_of_all).to(rows.device)[rows]
        firsts = torch.from_numpy(owners.searchsorted(range(len(groups) + 1))).to(rows.device)
        borders = torch.searchsorted(rows, firsts).tolist()
        for group, first, last in zip(groups, borders, borders[1:], strict=False):
            queries_by_cell = QueriesByCell(cell_numbers[first:last], sorted_queries, ends[first : last + 1])
            visits += group.visit_on_device(queries_by_cell, query_tensor, ids)
        return visits
    ranks = None if is_small_batch else order.remainder(nearest.shape[1]).numpy()
    visits, position = [], 0
    for row, query_rows in zip(rows.tolist(), torch.split(sorted_queries, counts.tolist()), strict=True):
        group, number = groups[owners[row]], int(numbers_of_all[row])
        found_ids, keys, norms = _filter_cell(group.read_cell(number), ids)
        cell_queries = relative_queries(owners[row])[query_rows]
        if metric is Metric.IP:
            distances = -(cell_queries @ keys.T)
        else:
            distances = torch.addmm(norms, cell_queries, keys.T, alpha=-2)
            distances += squares(owners[row])[query_rows, None]
            distances.clamp_(min=0)
        cell_ranks = None if ranks is None else ranks[position : position + len(query_rows)]
        visits.append(
            Visits.from_visit(Visit(query_rows.numpy(), found_ids, distances.numpy(), ranks=cell_ranks))
        )
        position += len(query_rows)
    return visits


def _is_scanning_faster(groups: Sequence[CellGroup], nearest: Tensor, cells: Sequence[Cells]) -> bool:
    """Estimate whether computing distances from codes (compressed keys) is faster than decoding the keys.

    Computing from codes is faster if two conditions are met: few queries search the same cell (a cluster of
    near keys), and the decoded keys do not fit into the cache.

    Args:
        groups: the groups (sets of records) to search.
        nearest: the cells that each query searches, shape (q, probes).
        cells: for each group its cells that have matching records.

    Returns:
        True if computing from codes is faster; False if decoding is faster.
    """
    decoded_bytes = sum(4 * group.rows * len(group.middle) for group in groups)
    missing_share = max(0.0, 1 - groups[0].room / max(1, decoded_bytes))
    return nearest.numel() < missing_share * _DECODING * sum(
        len(group_cells.numbers) for group_cells in cells
    )


def _split_by_group(
    nearest: NDArray[np.int64], numbers: Sequence[NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Divide the nearest cells (clusters of near keys) of each query by the groups to which the cells belong.

    The list of all cells has the cells of the first group, then the cells of the second group, and so on.

    Args:
        nearest: for each query the indices of its nearest cells in the list of all cells, shape (q, probes).
        numbers: for each group the numbers (in the group) of its cells in the list.

    Yields:
        For each group an array of shape (q, probes). It has the numbers of the cells of this group that each
        query searches, and -1 in place of the cells of other groups.
    """
    if len(numbers) == 1:
        yield numbers[0][nearest]
        return
    first = 0
    for group_numbers in numbers:
        indices = nearest - first
        yield np.where(
            (indices >= 0) & (indices < len(group_numbers)),
            np.append(group_numbers, -1)[indices.clip(0, len(group_numbers))],
            -1,
        )
        first += len(group_numbers)


def _visit_single_query(visited: Sequence[tuple[CellGroup, Tensor, int]], ids: IdRanges | None) -> Visit:
    """Compute the distances of a single query to all records of its cells (clusters of near keys).

    Args:
        visited: for each cell its group, the rotated query minus the group's `middle`, shape (1, width), and
            the cell's number in the group.
        ids: ids of the records to compare with; None compares with all records.

    Returns:
        The query number 0, the ids of the records of all cells, and the distances to these records.
    """
    cells = [_filter_cell(group.read_cell(number), ids) for group, _, number in visited]
    ids_found = np.concatenate([cell.ids for cell in cells])
    distances = torch.empty(len(ids_found))
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
    return Visit(np.zeros(1, np.int64), ids_found, distances.numpy()[None])


def _filter_cell(cell: Cell, ids: IdRanges | None) -> Cell:
    """Return a copy of a cell (a cluster of near keys) that has only the records with certain ids.

    Args:
        cell: the cell; it is returned itself if all its records are kept.
        ids: ids of the records to keep; None keeps all records.
    """
    if ids is None:
        return cell
    is_selected = ids.contains(cell.ids)
    if is_selected.all():
        return cell
    rows = torch.from_numpy(np.flatnonzero(is_selected))
    return Cell(cell.ids[is_selected], cell.keys[rows], cell.norms[rows])


def _find_nearest_cells(
    queries: Tensor, cells: Sequence[Cells], probes: int, metric: Metric, *, is_ranked: bool
) -> Tensor:
    """Find the nearest cells (clusters of near keys) of each query among the cells of all groups.

    Args:
        queries: query vectors, float32, shape (q, dim).
        cells: for each group (a set of records) its cells that have matching records.
        probes: number of cells to find for each query, at most the number of all cells.
        metric: metric of the distances.
        is_ranked: True sorts the cells of each query, nearest first; False returns the cells in any order.

    Returns:
        Indices of the nearest cells in the list of all cells, int64, shape (q, probes). The list has the
        cells of the first group, then the cells of the second group, and so on.
    """
    counts = [len(group_cells.numbers) for group_cells in cells]
    if probes == sum(counts) and (probes == 1 or not is_ranked):
        return torch.arange(probes, device=queries.device).expand(len(queries), -1)
    norms = [
        group_cells.half_norms if metric is Metric.L2 else torch.zeros_like(group_cells.half_norms)
        for group_cells in cells
    ]
    index_parts, step = [], max(1, DISTANCES_AT_ONCE // sum(counts))
    for start in range(0, len(queries), step):
        batch = queries[start : start + step]
        if len(cells) == 1:
            distances = torch.addmm(norms[0], batch, cells[0].centers.T, alpha=-1)
        else:
            distances = batch.new_empty(
                len(batch), sum(counts)
            )  # the centers of the groups are not concatenated
            for group_cells, group_norms, group_distances in zip(
                cells, norms, torch.split(distances, counts, dim=1), strict=True
            ):
                torch.addmm(group_norms, batch, group_cells.centers.T, alpha=-1, out=group_distances)
        index_parts.append(distances.topk(probes, largest=False, sorted=is_ranked).indices)
    return index_parts[0] if len(index_parts) == 1 else torch.cat(index_parts)
