"""p_kNN as a sum over whole cells: every record of the cells that a query visits counts, near or far."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery


class VisitedCell(NamedTuple):
    """Some queries and the records of a cell."""

    queries: Tensor
    """Their numbers, int64, shape (m,)."""

    tokens: Tensor
    """Of the records, int64, shape (r,)."""

    distances: Tensor
    """Of each query to each record, float32, shape (m, r)."""

    log_weights: Tensor | None = None
    """Of the records, float32, shape (r,); see `neighbor_weights`."""


class Visited:
    """All records that n queries were measured against, and the tokens that came.

    Args:
        cells: in which a query meets each record once at most.
        gold: the token that came after each query, int64, shape (n,).
    """

    def __init__(self, cells: Sequence[VisitedCell], gold: Tensor) -> None:
        self._cells = cells
        self._gold = gold
        self.nearest = torch.full((len(gold),), torch.inf)
        """The distance to the nearest record, float32, shape (n,); +inf where there is none."""
        for cell in cells:
            found = torch.minimum(self.nearest[cell.queries], cell.distances.amin(1))
            self.nearest[cell.queries] = found

    @property
    def size(self) -> int:
        """How many distances these are."""
        return sum(cell.distances.numel() for cell in self._cells)

    def spread(self, rows: NDArray[np.bool_], gold: Tensor) -> "Visited":
        """The same as the queries of a larger number that are True, shape (n,), with the tokens of all."""
        if rows.all():
            return self
        numbers = torch.from_numpy(np.flatnonzero(rows))
        return Visited([cell._replace(queries=numbers[cell.queries]) for cell in self._cells], gold)

    def near(self, k: int) -> tuple[Tensor, Tensor]:
        """Distances and tokens of the k nearest, shape (n, k); +inf and anything where there are fewer."""
        counts = torch.zeros(len(self._gold), dtype=torch.int64)
        for cell in self._cells:
            counts[cell.queries] += min(k, len(cell.tokens))
        width = max(k, int(counts.max())) if len(counts) else k
        distances = torch.full((len(counts), width), torch.inf)
        tokens = torch.zeros((len(counts), width), dtype=torch.int64)
        counts.zero_()
        for cell in self._cells:
            near, at = cell.distances.topk(min(k, len(cell.tokens)), largest=False, sorted=False)
            places = cell.queries[:, None], counts[cell.queries][:, None] + torch.arange(near.shape[1])
            distances[places], tokens[places] = near, cell.tokens[at]
            counts[cell.queries] += near.shape[1]
        found = distances.topk(k, largest=False)
        return found.values, tokens.gather(1, found.indices)

    def gold_on_grid(self, temperatures: Tensor) -> Tensor:
        """What p_kNN gives to the token that came, at each temperature.

        Args:
            temperatures: shape (m,), ascending by half octaves.

        Returns:
            Float32, shape (n, m); 0 where nothing was visited.
        """
        total, gold = torch.zeros(2, len(temperatures), len(self._gold))
        for queries, tokens, distances, log_weights in self._cells:
            counts = torch.ones(len(tokens)) if log_weights is None else log_weights.exp()
            hits = (tokens == self._gold[queries, None]).nonzero(as_tuple=True)
            gaps = self.nearest[queries, None] - distances
            at_two = [(gaps / temperature).exp_() for temperature in temperatures.flip(0)[:2]]
            of_cell, of_hits = torch.empty(len(total), len(queries)), torch.empty(len(total), len(hits[0]))
            for step in range(len(total)):
                of_each = at_two[step % 2]
                torch.mv(of_each, counts, out=of_cell[step])
                of_hits[step] = of_each[hits]
                of_each.square_()  # which makes it that of half the temperature
            total.index_add_(1, queries, of_cell)
            gold.index_add_(1, queries[hits[0]], of_hits * counts[hits[1]])
        shares: Tensor = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return shares.flip(0).T.contiguous()

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to the records with the token that came, and to all others; see `GoldShares`."""
        temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(self._gold))
        total, gold = torch.zeros(2, len(self._gold))
        for queries, tokens, distances, log_weights in self._cells:
            # The nearest is taken as zero, as in `neighbor_weights`.
            of_each = (self.nearest[queries, None] - distances).div_(temperatures[queries, None]).exp_()
            if log_weights is not None:
                of_each *= log_weights.exp()
            total.index_add_(0, queries, of_each.sum(1))
            of_each *= tokens == self._gold[queries, None]
            gold.index_add_(0, queries, of_each.sum(1))
        share = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return torch.stack([share, (total > 0).float() - share], 1)
