"""p_kNN as a sum over whole cells: every record of the cells that a query visits counts, near or far."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery


class VisitedCells(NamedTuple):
    """Some cells, and the queries that visit each; see `knnstore.datastore.Visits`."""

    queries: Tensor
    """Their numbers, int64, shape (b, m); -1 where a cell has fewer."""

    tokens: Tensor
    """Of the records, int64, shape (b, r)."""

    distances: Tensor
    """Of each query to each record, float32, shape (b, m, r); +inf where one is missing."""

    log_weights: Tensor | None = None
    """Of the records, float32, shape (b, r); see `neighbor_weights`."""


class Visited:
    """All records that n queries were measured against, and the tokens that came.

    What is asked of it is computed where the distances are, and comes to the processor's memory.

    Args:
        cells: in which a query meets each record once at most.
        gold: the token that came after each query, int64, shape (n,).
    """

    hits = (True, False)

    def __init__(self, cells: Sequence[VisitedCells], gold: Tensor) -> None:
        device = cells[0].distances.device if cells else gold.device
        # A query more, which is met in place of those that are missing.
        self._gold = torch.cat([gold, gold.new_full((1,), -1)]).to(device)
        self._cells = [_there(some, device, len(gold)) for some in cells]
        nearest = torch.full((len(gold) + 1,), torch.inf, device=device)
        for some in self._cells:
            nearest.scatter_reduce_(0, some.queries.flatten(), some.distances.amin(2).flatten(), "amin")
        self._zero = nearest.where(nearest.isfinite(), 0)
        self.nearest = nearest[:-1].cpu()
        """The distance to the nearest record, float32, shape (n,); +inf where there is none."""

    @property
    def size(self) -> int:
        """How many distances these are."""
        return sum(some.distances.numel() for some in self._cells)

    def spread(self, rows: NDArray[np.bool_], gold: Tensor) -> "Visited":
        """The same as the queries of a larger number that are True, shape (n,), with the tokens of all."""
        if rows.all():
            return self
        numbers = torch.from_numpy(np.append(np.flatnonzero(rows), -1)).to(self._gold.device)
        return Visited([some._replace(queries=numbers[some.queries]) for some in self._cells], gold)

    def near(self, k: int) -> tuple[Tensor, Tensor]:
        """Distances and tokens of the k nearest, shape (n, k); +inf and anything where there are fewer."""
        count = len(self.nearest)
        queries = [torch.empty(0, dtype=torch.int64, device=self._gold.device)]
        distances = [self._zero.new_empty(0, k)]
        tokens = [self._gold.new_empty(0, k)]
        for some in self._cells:
            found = some.distances.topk(min(k, some.distances.shape[2]), largest=False, sorted=False)
            of_each = some.tokens[:, None].expand_as(some.distances).gather(2, found.indices)
            asked = some.queries.flatten() < count
            missing = k - found.values.shape[2]
            queries.append(some.queries.flatten()[asked])
            distances.append(pad(found.values.flatten(0, 1)[asked], (0, missing), value=torch.inf))
            tokens.append(pad(of_each.flatten(0, 1)[asked], (0, missing)))
        asked, order = torch.cat(queries).sort(stable=True)
        place = torch.arange(len(asked), device=asked.device) - torch.searchsorted(asked, asked)
        shape = count, int(place.max()) + 1 if len(place) else 1, k
        near = self._zero.new_full(shape, torch.inf)
        met = self._gold.new_zeros(shape)
        near[asked, place], met[asked, place] = torch.cat(distances)[order], torch.cat(tokens)[order]
        least = near.flatten(1).topk(k, largest=False)
        return least.values.cpu(), met.flatten(1).gather(1, least.indices).cpu()

    def by_token(self, temperature: PerQuery, vocabulary: int) -> Tensor:
        """What p_kNN gives to each token.

        Args:
            temperature: T > 0, for all or of shape (n,).
            vocabulary: tokens, v; more than any record's.

        Returns:
            Float32, shape (n, v). Rows sum to 1, or to 0 when nothing was visited.
        """
        temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(self.nearest))
        temperatures = pad(temperatures, (0, 1), value=1.0).to(self._zero.device)
        shares = self._zero.new_zeros(len(self._zero), vocabulary)
        for queries, tokens, distances, log_weights in self._cells:
            of_each = (self._zero[queries, None] - distances).div_(temperatures[queries, None]).exp_()
            if log_weights is not None:
                of_each *= log_weights.exp()[:, None]
            # What is missing weighs nothing, whatever its token.
            at = (queries * vocabulary)[..., None] + tokens.clamp(max=vocabulary - 1)[:, None]
            shares.view(-1).index_add_(0, at.flatten(), of_each.flatten())
        shares = shares[:-1]
        return shares.div_(shares.sum(1, keepdim=True).clamp_(min=LEAST_PROBABILITY)).cpu()

    def gold_on_grid(self, temperatures: Tensor) -> Tensor:
        """What p_kNN gives to the token that came, at each temperature.

        Args:
            temperatures: shape (m,), ascending by half octaves.

        Returns:
            Float32, shape (n, m); 0 where nothing was visited.
        """
        total, gold = self._zero.new_zeros(2, len(temperatures), len(self._gold))
        for queries, tokens, distances, log_weights in self._cells:
            counts = distances.new_ones(tokens.shape) if log_weights is None else log_weights.exp()
            hits = (tokens[:, None] == self._gold[queries, None]).nonzero(as_tuple=True)
            gaps = self._zero[queries, None] - distances
            at_two = [(gaps / float(temperature)).exp_() for temperature in temperatures.flip(0)[:2]]
            of_cells = total.new_empty(len(total), queries.numel())
            of_hits = total.new_empty(len(total), len(hits[0]))
            for step in range(len(total)):
                of_each = at_two[step % 2]
                of_cells[step] = torch.matmul(of_each, counts[..., None]).flatten()
                of_hits[step] = of_each[hits]
                of_each.square_()  # which makes it that of half the temperature
            total.index_add_(1, queries.flatten(), of_cells)
            gold.index_add_(1, queries[hits[:2]], of_hits * counts[hits[0], hits[2]])
        shares: Tensor = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return shares.flip(0).T[:-1].contiguous().cpu()

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to the records with the token that came, and to all others; see `Shares`."""
        temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(self.nearest))
        temperatures = pad(temperatures, (0, 1), value=1.0).to(self._zero.device)
        total, gold = self._zero.new_zeros(2, len(self._zero))
        for queries, tokens, distances, log_weights in self._cells:
            # The nearest is taken as zero, as in `neighbor_weights`.
            of_each = (self._zero[queries, None] - distances).div_(temperatures[queries, None]).exp_()
            if log_weights is not None:
                of_each *= log_weights.exp()[:, None]
            total.index_add_(0, queries.flatten(), of_each.sum(2).flatten())
            of_each *= tokens[:, None] == self._gold[queries, None]
            gold.index_add_(0, queries.flatten(), of_each.sum(2).flatten())
        total, gold = total[:-1].cpu(), gold[:-1].cpu()
        share = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return torch.stack([share, (total > 0).float() - share], 1)


def nearest_of(visited: Sequence[Visited], count: int) -> tuple[Tensor, Tensor]:
    """Distances and tokens of so many nearest records of each search, side by side, shape (n, s * count).

    With 0 of them the distance to the nearest record of each search, shape (n, s), and no token.
    """
    if not count:
        distances = torch.stack([one.nearest for one in visited], 1)
        return distances, torch.empty((len(distances), 0), dtype=torch.int64)
    near = [one.near(count) for one in visited]
    return torch.cat([found for found, _ in near], 1), torch.cat([found for _, found in near], 1)


class VisitedTokens:
    """What was visited, with a place for each token of the vocabulary; see `Shares`.

    Args:
        visited: by n queries.
        vocabulary: tokens, v; more than any record's.
        device: where the shares are to be.
    """

    hits = None

    def __init__(self, visited: Visited, vocabulary: int, device: torch.device) -> None:
        self._visited, self._vocabulary, self._device = visited, vocabulary, device

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to each token, float32, shape (n, v)."""
        return self._visited.by_token(temperature, self._vocabulary).to(self._device)


def _there(cells: VisitedCells, device: torch.device, count: int) -> VisitedCells:
    """The same on a device, where a query that is missing has the number after the last."""
    queries, tokens, distances, log_weights = cells
    queries = queries.where(queries >= 0, count).to(device)
    weights = None if log_weights is None else log_weights.to(device)
    return VisitedCells(queries, tokens.to(device), distances.to(device), weights)
