"""p_kNN from all records of the probed cells, not only from the k nearest records (`CellSums`).

A cell is a part of a domain's records whose keys are near each other; a query probes the cells nearest to it.
A pair is a query with a cell that it probes. For each pair, exp(-d/T) is summed over all records of the cell,
and over the few records with the query's target token (the hits). This module also finds the hits
(`find_hits`) and the nearest records (`find_nearest_records`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import TOKEN_LIMIT
from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery
from knnstore.lm.mixing.token_sums import NeighborSums, count_distinct_tokens

_SAME = 3e-7
"""Relative tolerance when a temperature is compared with half of another temperature, because float32
rounds."""


class ProbedCells(NamedTuple):
    """b cells (groups of stored records with near keys), each with the queries that probe it."""

    queries: Tensor
    """Indices of the queries that probe each cell, int64, shape (b, m); -1 if a cell has fewer than m."""

    tokens: Tensor
    """Tokens of the records, int64, shape (b, r)."""

    distances: Tensor
    """Distance of each query to each record, float32, shape (b, m, r); +inf if the query or the record is
    missing."""

    ranks: Tensor | None = None
    """Rank of the cell for the query: the number of cells that are nearer, int64, shape (b, m); None if
    unknown."""

    def to_device(self, device: torch.device) -> "ProbedCells":
        """Return the cells and their queries with all tensors on a device.

        On the CPU the same object is returned.
        """
        if device.type == "cpu":
            return self
        ranks = None if self.ranks is None else self.ranks.to(device)
        return ProbedCells(self.queries.to(device), self.tokens.to(device), self.distances.to(device), ranks)


class Hits(NamedTuple):
    """h hits. A hit is a record that has the query's target token, in a cell that the query probes."""

    pairs: Tensor
    """For each hit the number of its pair (a query with a cell that it probes), int64, shape (h,). Pairs
    are numbered over all cells."""

    distances: Tensor
    """Distance of the query to the record of each hit, float32, shape (h,)."""


class CellSums:
    """The results of one search for n queries, summed over all records of the probed cells.

    A cell is a group of stored records with near keys; a query probes (searches) the cells nearest to it. A
    pair is a query with a cell that it probes.

    Sums are computed on the device of the distances; results are on the device of the targets.

    Args:
        cells: the probed cells. No query is compared twice with the same record.
        targets: target token of each query, int64, shape (n,).
        vocabulary: number of tokens v; `weights` then has v columns. None gives two columns: the target
            token, and all other tokens together.
        features: number of nearest records in `distances`; with 0 `distances` has only the nearest record.
    """

    tokens = None

    def __init__(
        self,
        cells: Sequence[ProbedCells],
        targets: Tensor,
        vocabulary: int | None = None,
        features: int = 0,
    ) -> None:
        device = cells[0].distances.device if cells else targets.device
        # One more query, with the number n, takes the places of missing queries.
        self._targets = torch.cat([targets, targets.new_zeros(1)]).to(device)
        self._vocabulary = vocabulary
        self._features = features
        self._cells = [some.to_device(device) for some in cells]
        asked = torch.cat([self._targets[:0], *(some.queries.flatten() for some in self._cells)])
        self._query_of_pair = asked.where(asked >= 0, len(targets))
        self._nearest_of_pair = _flatten_pairs([some.distances.amin(2) for some in self._cells], device)
        nearest = self._compute_nearest(self._nearest_of_pair)
        self._finite_nearest = nearest.where(nearest.isfinite(), 0)
        self._target_shares: dict[float, Tensor] = {}
        self._device = targets.device
        self.nearest = nearest[:-1].to(self._device)
        """Distance of the nearest record, float32, shape (n,); +inf if there is none."""

    @property
    def size(self) -> int:
        """Number of distances between queries and records that were computed, in all cells."""
        return sum(some.distances.numel() for some in self._cells)

    @property
    def hits(self) -> Tensor | None:
        """Mask of the columns of `weights`, bool, shape (n, 2): True for the target token, else False.

        None if `weights` has a column for each token of the vocabulary.
        """
        if self._vocabulary is not None:
            return None
        return torch.tensor([[True, False]], device=self._device).expand(len(self.nearest), -1)

    @property
    def distances(self) -> Tensor:
        """Distances of the nearest records, ascending, float32, shape (n, m); +inf if missing.

        m is `features` of the constructor, or 1 if `features` is 0.
        """
        return self._nearest_records[0] if self._features else self.nearest[:, None]

    @cached_property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... records of each query.

        int16, shape (n, r).
        """
        distances, tokens = self._nearest_records
        return count_distinct_tokens(tokens, distances)

    @cached_property
    def _nearest_records(self) -> tuple[Tensor, Tensor]:
        """Distances and tokens of the `features` nearest records, shape (n, features)."""
        return self.find_nearest(self._features)

    def select_rows(self, rows: slice | Tensor) -> "CellSums":
        """Return the results of some of the queries.

        Args:
            rows: a slice; or indices, int64, or a mask, bool. No query may be selected twice.
        """
        device, count = self._targets.device, len(self.nearest)
        chosen = torch.arange(count, device=device)[rows]
        numbers = torch.full((count + 1,), -1, device=device)  # of the others, and of missing queries
        numbers[chosen] = torch.arange(len(chosen), device=device)
        cells = [some._replace(queries=numbers[some.queries]) for some in self._cells]
        targets = self._targets[chosen].to(self._device)
        return CellSums(cells, targets, self._vocabulary, self._features)

    def to_neighbor_sums(self) -> NeighborSums:
        """Return only the nearest records, as `NeighborSums`; their number is `features` of the constructor.

        The result has no tokens. It has `hits` instead: True for a record with the query's target token.
        """
        distances, tokens = self._nearest_records
        hits = tokens == self._targets[:-1, None].to(tokens.device)
        return NeighborSums(distances, hits=hits, known_distinct=self.distinct)

    def find_nearest(self, k: int) -> tuple[Tensor, Tensor]:
        """Return distances and tokens of the k nearest records, nearest first, shape (n, k).

        A missing record has the distance +inf and an arbitrary token.
        """
        distances, tokens = find_nearest_records(self._cells, self._query_of_pair, len(self.nearest), k)
        return distances.to(self._device), tokens.to(self._device)

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Compute and keep the results of `weights` for these temperatures, in one pass over the records.

        If a temperature is half of another one, e^(-2d/T) is computed as the square of e^(-d/T). Does nothing
        if `weights` has a column for each token of the vocabulary.
        """
        if self._vocabulary is None:
            self._prepare_target_shares(temperatures)

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the records' probability of the target token and of all other tokens, or of every token.

        Args:
            temperature: T > 0, one value for all queries or one for each, shape (n,).

        Returns:
            Float32, shape (n, 2), or (n, v) if the object was created with a vocabulary. A row sums to 1, or
            is 0 if nothing was found.
        """
        if self._vocabulary is not None:
            return self._compute_token_probs(temperature, self._vocabulary)
        if isinstance(temperature, Tensor) and temperature.ndim:
            own = pad(temperature.float(), (0, 1), value=1.0).to(self._finite_nearest.device)
            return self._compute_target_shares(
                own, self._sum_weights_by_pair([own], [[1.0]])[0][0], self._compute_gaps()
            )
        self.precompute_weights([float(temperature)])
        return self._target_shares[float(temperature)]

    def target_weights(self, temperatures: Tensor) -> Tensor:
        """Compute the probability of each target token by the records, at m temperatures.

        Args:
            temperatures: m temperatures, each > 0.

        Returns:
            Float32, shape (n, m); 0 for a query that searched no cell (group of records).
        """
        self._prepare_target_shares(temperatures.tolist())
        return torch.stack([self._target_shares[one][:, 0] for one in temperatures.tolist()], 1)

    @property
    def is_ranked(self) -> bool:
        """True if for every cell and query it is known how many cells are nearer to the query, else False."""
        return all(some.ranks is not None for some in self._cells)

    def target_weights_within(self, probes: Sequence[int], temperatures: Tensor) -> Tensor:
        """Compute the probability of each target token as if each query had searched fewer cells.

        All results are computed in one pass over the records. A cell is a group of records with near keys.
        The ranks of all cells must be known (`is_ranked`).

        Args:
            probes: c numbers of cells that each query would search, ascending.
            temperatures: m temperatures.

        Returns:
            Float32, shape (c, n, m): a probability for each number of cells, query and temperature.
        """
        device = self._targets.device
        ranks = _flatten_pairs([some.ranks for some in self._cells if some.ranks is not None], device)
        gaps = [self._compute_gaps(ranks < count) for count in probes]
        found = torch.empty(len(probes), len(self.nearest), len(temperatures))
        columns = {temperature: column for column, temperature in enumerate(temperatures.tolist())}
        for temperature, sums in self._iterate_sums(columns):
            one = self._finite_nearest.new_tensor([temperature])
            for at, of_cells in enumerate(gaps):
                found[at, :, columns[temperature]] = self._compute_target_shares(one, sums, of_cells)[:, 0]
        return found

    def _compute_token_probs(self, temperature: PerQuery, vocabulary: int) -> Tensor:
        """Compute the probability of each token of the vocabulary by the records, float32, shape (n, v).

        Args:
            temperature: T > 0: one value for all queries, or one for each query, shape (n,).
            vocabulary: number of tokens, v. Records with larger tokens count for the last token.
        """
        temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(self.nearest))
        temperatures = pad(temperatures, (0, 1), value=1.0).to(self._finite_nearest.device)
        sums = self._finite_nearest.new_zeros(len(self._finite_nearest), vocabulary)
        for some, zero, asked in self._iterate_cells(
            self._finite_nearest[self._query_of_pair], self._query_of_pair
        ):
            of_each = (zero - some.distances).div_(temperatures[asked]).exp_()
            # The weight of a missing record is 0, so its token does not matter.
            at = asked * vocabulary + some.tokens.clamp(max=vocabulary - 1)[:, None]
            sums.view(-1).index_add_(0, at.flatten(), of_each.flatten())
        sums = sums[:-1]
        return sums.div_(sums.sum(1, keepdim=True).clamp_(min=LEAST_PROBABILITY)).to(self._device)

    def _prepare_target_shares(self, temperatures: Iterable[float]) -> None:
        """Compute and keep the results of `_compute_target_shares` for these temperatures."""
        gaps = self._compute_gaps()
        for temperature, sums in self._iterate_sums(set(temperatures) - self._target_shares.keys()):
            self._target_shares[temperature] = self._compute_target_shares(
                self._finite_nearest.new_tensor([temperature]), sums, gaps
            )

    def _iterate_sums(self, temperatures: Iterable[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield each temperature with sums of exp(-d/T) for each pair of a query and a cell.

        The sums have shape (2, pairs): over all records of the cell, and over the hits (records with the
        query's target token).
        """
        chains = group_into_halving_chains(temperatures)
        sums = self._sum_weights_by_pair([self._finite_nearest.new_tensor(of[:1]) for of in chains], chains)
        for of_chain, of_sums in zip(chains, sums, strict=True):
            yield from zip(of_chain, of_sums, strict=True)

    def _sum_weights_by_pair(
        self, temperatures: Sequence[Tensor], chains: Sequence[Sequence[float]]
    ) -> list[list[Tensor]]:
        """Sum exp(-d/T) for each pair of query and cell, over all records and over the hits.

        A cell is a group of records; a hit is a record with the query's target token.

        Distances are relative to the nearest record of the pair, so that no sum overflows or becomes 0.

        Args:
            temperatures: the first temperature of each chain, shape (1,), or shape (n + 1,) with one value
                for each query.
            chains: lists of temperatures; in a list each temperature is half of the temperature before it.

        Returns:
            For each chain and each of its temperatures the sums over all records and over hits, shape (2,
            pairs).
        """
        if not chains:
            return []
        near = self._nearest_of_pair.where(self._nearest_of_pair.isfinite(), 0)
        totals = [[list[Tensor]() for _ in of] for of in chains]
        for some, zero, asked in self._iterate_cells(near, self._query_of_pair):
            gaps = zero - some.distances
            for own, of_chain in zip(temperatures, totals, strict=True):
                divisors = own if len(own) == 1 else own[asked]
                powers = (gaps / divisors).exp_() if len(chains) > 1 else gaps.div_(divisors).exp_()
                for sums in of_chain:
                    if sums is not of_chain[0]:
                        powers.square_()
                    sums.append(powers.sum(2))
        pairs, distances = self._hits
        found = []
        for own, of_chain in zip(temperatures, totals, strict=True):
            divisors = own if len(own) == 1 else own[self._query_of_pair[pairs]]
            powers = ((near[pairs] - distances) / divisors).exp_()
            found.append(list[Tensor]())
            for sums in of_chain:
                if sums is not of_chain[0]:
                    powers.square_()
                total = _flatten_pairs(sums, near.device)
                target = torch.zeros_like(total).index_add_(0, pairs, powers)
                found[-1].append(torch.stack([total, target]))
        return found

    def _compute_target_shares(self, temperatures: Tensor, sums: Tensor, gaps: Tensor) -> Tensor:
        """Compute the probabilities of the target token and of all other tokens, shape (n, 2), from sums.

        Args:
            temperatures: one temperature, shape (1,), or one for each query, shape (n + 1,).
            sums: sums of exp(-d/T) over all records and over hits of each pair, shape (2, pairs).
            gaps: the query's nearest distance minus the nearest distance of each pair, shape (pairs,).
        """
        divisors = temperatures if len(temperatures) == 1 else temperatures[self._query_of_pair]
        parts = sums * (gaps / divisors).exp_()
        total, target = self._finite_nearest.new_zeros(2, len(self._finite_nearest)).index_add_(
            1, self._query_of_pair, parts
        )
        share = (target / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return torch.stack([share, (total > 0).float() - share], 1)[:-1].to(self._device)

    def _compute_gaps(self, among: Tensor | None = None) -> Tensor:
        """Compute, for each pair, the query's nearest distance minus the pair's own nearest distance (<= 0).

        Args:
            among: False for each pair to leave out, whose gap is -inf; bool, shape (pairs,). None for all
                pairs.

        Returns:
            Shape (pairs,).
        """
        near = self._nearest_of_pair if among is None else self._nearest_of_pair.where(among, torch.inf)
        return torch.where(
            near.isfinite(), self._compute_nearest(near)[self._query_of_pair] - near, -torch.inf
        )

    def _compute_nearest(self, distances: Tensor) -> Tensor:
        """Compute the smallest distance of each query, shape (n + 1,).

        Args:
            distances: for each pair of a query and a cell (group of records), the distance to the nearest
                record of the cell, shape (pairs,).
        """
        nearest = distances.new_full((len(self._targets),), torch.inf)
        return nearest.scatter_reduce_(0, self._query_of_pair, distances, "amin")

    @cached_property
    def _hits(self) -> Hits:
        """The records with the target token of a query that probes their cell, with their distances."""
        return find_hits(self._cells, self._query_of_pair, self._targets)

    def _iterate_cells(self, *of_pairs: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each `ProbedCells` object with the values that belong to its pairs of query and cell.

        Args:
            *of_pairs: columns of values, each of shape (pairs,).

        Yields:
            The object (b cells, each with m queries), then its part of each column, shape (b, m, 1).
        """
        sizes = [some.queries.numel() for some in self._cells]
        columns = [torch.split(one, sizes) for one in of_pairs]
        for some, *parts in zip(self._cells, *columns, strict=True):
            yield some, *(part.view(*some.queries.shape, 1) for part in parts)


def _flatten_pairs(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate tensors of shapes (b, m) into one tensor of shape (pairs,), row after row.

    Args:
        parts: the tensors; none gives an empty tensor.
        device: device of an empty result.
    """
    if not parts:
        return torch.empty(0, device=device)
    if all(len(part) == 1 for part in parts):  # faster for a thousand small tensors, as on a CPU
        return torch.cat(list(parts), 1)[0]
    return torch.cat([part.flatten() for part in parts])


def group_into_halving_chains(temperatures: Iterable[float]) -> list[list[float]]:
    """Group temperatures into lists in which each temperature is half of the temperature before it.

    Args:
        temperatures: the temperatures, in any order.

    Returns:
        The lists. A temperature is a list of its own if neither its double nor its half is given.
    """
    chains: list[list[float]] = []
    for temperature in sorted(temperatures, reverse=True):
        for chain in chains:
            if math.isclose(chain[-1], 2 * temperature, rel_tol=_SAME):
                chain.append(temperature)
                break
        else:
            chains.append([temperature])
    return chains


def find_hits(cells: Sequence[ProbedCells], queries: Tensor, targets: Tensor) -> Hits:
    """Find the hits: the records that have a query's target token and are in a cell that the query probes.

    A cell is a group of records with near keys. A pair is a query with a cell that it probes (searches). This
    function sorts the records of each cell by token and finds the target tokens by bisection.

    Args:
        cells: the cells, on one device.
        queries: number of the query of each pair, from 0 to n - 1, int64, shape (pairs,); the pairs of the
            first cell, then of the next cell, and so on.
        targets: target token of each query, int64, shape (n,).

    Returns:
        The pair and the distance of each hit; empty without cells.
    """
    nothing = torch.empty(0, device=targets.device)
    if not cells:
        return Hits(targets[:0], nothing)
    shapes = [some.distances.shape for some in cells]
    visits = torch.arange(sum(count for count, _, _ in shapes), device=targets.device)
    each = torch.tensor([shape for shape in shapes for _ in range(shape[0])], device=targets.device)
    _, asked, lengths = each.unbind(1)
    of_records, of_pairs = visits.repeat_interleave(lengths), visits.repeat_interleave(asked)
    tokens = torch.cat([some.tokens.flatten() for some in cells])
    ordered, order = (of_records * TOKEN_LIMIT + tokens).sort()
    wanted = of_pairs * TOKEN_LIMIT + targets[queries]
    low = torch.searchsorted(ordered, wanted)
    counts = torch.searchsorted(ordered, wanted, right=True) - low
    pair = torch.arange(len(counts), device=targets.device).repeat_interleave(counts)
    found = order[torch.arange(len(pair), device=targets.device) + (low - _compute_starts(counts))[pair]]
    # Convert a record's number to its place among the distances of all cells.
    at = torch.arange(len(of_pairs), device=targets.device) - _compute_starts(asked)[of_pairs]
    base = (_compute_starts(asked * lengths) - _compute_starts(lengths))[of_pairs] + at * lengths[of_pairs]
    places = found + base[pair]
    ends = torch.tensor([some.distances.numel() for some in cells]).cumsum(0)
    shares = torch.searchsorted(places, ends.to(targets.device)).diff(prepend=places.new_zeros(1)).tolist()
    begins = (ends - ends.diff(prepend=ends.new_zeros(1))).tolist()
    parts = zip(cells, torch.split(places, shares), begins, strict=True)
    distances = torch.cat([nothing, *(some.distances.take(at - begin) for some, at, begin in parts)])
    return Hits(pair, distances)


def _compute_starts(sizes: Tensor) -> Tensor:
    """Return the index at which each part begins if parts of these sizes are concatenated, same shape."""
    return sizes.cumsum(0) - sizes


def find_nearest_records(
    cells: Sequence[ProbedCells], asked: Tensor, count: int, k: int
) -> tuple[Tensor, Tensor]:
    """Find the k nearest records of each query in the cells (groups of records) that it probes.

    Args:
        cells: the cells, on one device.
        asked: for each pair of a cell and a query, the number of the query, from 0 to n - 1, or n if the
            query is missing; int64, shape (pairs,). All pairs of the first cell come first.
        count: number of queries, n.
        k: number of records.

    Returns:
        Distances and tokens, shape (n, k), nearest first. A missing record has the distance +inf and an
        arbitrary token.
    """
    bounds, begins = _bound_kth_distances(cells, asked, count, k)[asked], asked.new_zeros(0)
    queries, distances, tokens = [begins], [bounds[:0]], [begins]
    sizes = [some.queries.numel() for some in cells]
    parts = zip(cells, torch.split(asked, sizes), torch.split(bounds, sizes), strict=True)
    for some, of_cells, bound in parts:
        _, across, records = some.distances.shape
        near = _find_true_indices(some.distances <= bound.view(-1, across, 1))
        pairs = near // records
        queries.append(of_cells[pairs])
        distances.append(some.distances.take(near))
        tokens.append(some.tokens.take(pairs // across * records + near % records))
    away, owners = torch.cat(distances), torch.cat(queries)
    order = away.argsort()
    owners, then = owners[order].sort(stable=True)
    order, place = order[then], _number_within_owner(owners)
    chosen = (place < k) & (owners < count)
    nearest, of_nearest = away.new_full((count, k), torch.inf), asked.new_zeros(count, k)
    at = owners[chosen], place[chosen]
    nearest[at], of_nearest[at] = away[order[chosen]], torch.cat(tokens)[order[chosen]]
    return nearest, of_nearest


def _bound_kth_distances(cells: Sequence[ProbedCells], asked: Tensor, count: int, k: int) -> Tensor:
    """Compute a close upper bound of the distance from each query to its k-th nearest record.

    Each cell that the query probes is divided into k groups of records, and the nearest record of each group
    is kept. (Up to k - 1 records of a cell may be left out.) The bound is the distance to the k-th nearest of
    the records that were kept from all cells. The k-th nearest of all records is at most as far.

    Args:
        cells: the cells (groups of records), on one device.
        asked: number of the query of each pair (a query with a cell that it probes), int64, shape (pairs,);
            `count` for a missing query.
        count: number of queries, n.
        k: number of records.

    Returns:
        The bound of each query, float32, shape (n + 1,); the last entry is for missing queries.
    """
    leasts = [torch.empty(0, k, device=asked.device)]
    for some in cells:
        visits, across, records = some.distances.shape
        if records < k:
            least = pad(some.distances, (0, k - records), value=torch.inf)
        else:
            least = some.distances[..., : records // k * k].reshape(visits, across, -1, k).amin(2)
        leasts.append(least.flatten(0, 1))
    owners, order = asked.sort(stable=True)
    there = owners < count
    owners, place, order = owners[there], _number_within_owner(owners)[there], order[there]
    most = int(place.max()) + 1 if len(place) else 1
    table = leasts[0].new_full((count + 1, most, k), torch.inf)
    table[owners, place] = torch.cat(leasts)[order]
    bounds = table.flatten(1).topk(k, largest=False, sorted=False).values.amax(1)
    return bounds.clamp(max=torch.finfo(bounds.dtype).max)  # below the +inf of missing records


def _find_true_indices(mask: Tensor) -> Tensor:
    """Return the flat indices at which a mask is True, int64.

    On a CPU they are computed with numpy, which is faster.
    """
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero()[:, 0]


def _number_within_owner(owners: Tensor) -> Tensor:
    """Count each owner's entries from 0: return the index of each entry within its owner, int64, shape (n,).

    Args:
        owners: owner of each entry, ascending, shape (n,).
    """
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
