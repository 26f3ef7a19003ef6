"""p_kNN as a sum over whole cells: every record of the cells that a query visits counts, near or far."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.lm.mixing.interpolation import LEAST_PROBABILITY, PerQuery
from knnstore.lm.mixing.meetings import Hits, VisitedCells, hits_of, nearest_records

_SAME = 3e-7
"""By so much of itself a temperature may differ from half of another one: as float32 does."""


class Visited:
    """All records that n queries were measured against, and the tokens that came.

    What is asked of it is computed where the distances are, and comes to the processor's memory. It is sums
    over all records, and over those with the token that came, which are few.

    Args:
        cells: in which a query meets each record once at most.
        gold: the token that came after each query, int64, shape (n,).
    """

    hits = (True, False)

    def __init__(self, cells: Sequence[VisitedCells], gold: Tensor) -> None:
        device = cells[0].distances.device if cells else gold.device
        # A query more, which is met in place of those that are missing.
        self._gold = torch.cat([gold, gold.new_zeros(1)]).to(device)
        self._cells = [some.on(device) for some in cells]
        asked = torch.cat([self._gold[:0], *(some.queries.flatten() for some in self._cells)])
        self._asked = asked.where(asked >= 0, len(gold))
        self._near = _in_a_row([some.distances.amin(2) for some in self._cells], device)
        nearest = self._nearest_of(self._near)
        self._zero = nearest.where(nearest.isfinite(), 0)
        self._weights: dict[float, Tensor] = {}
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
        distances, tokens = nearest_records(self._cells, self._asked, len(self.nearest), k)
        return distances.cpu(), tokens.cpu()

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
        for some, zero, asked in self._with(self._zero[self._asked], self._asked):
            of_each = (zero - some.distances).div_(temperatures[asked]).exp_()
            if some.log_weights is not None:
                of_each *= some.log_weights.exp()[:, None]
            # What is missing weighs nothing, whatever its token.
            at = asked * vocabulary + some.tokens.clamp(max=vocabulary - 1)[:, None]
            shares.view(-1).index_add_(0, at.flatten(), of_each.flatten())
        shares = shares[:-1]
        return shares.div_(shares.sum(1, keepdim=True).clamp_(min=LEAST_PROBABILITY)).cpu()

    def gold_on_grid(self, temperatures: Tensor) -> Tensor:
        """What p_kNN gives to the token that came, at each temperature, shape (m,).

        Returns:
            Float32, shape (n, m); 0 where nothing was visited.
        """
        self.prepare(temperatures.tolist())
        return torch.stack([self._weights[one][:, 0] for one in temperatures.tolist()], 1)

    @property
    def is_ranked(self) -> bool:
        """Whether it is known which of its cells are nearest to a query."""
        return all(some.ranks is not None for some in self._cells)

    def gold_within(self, cells: Sequence[int], temperatures: Tensor) -> Tensor:
        """What p_kNN gives to the token that came, over fewer cells: so many of each query's nearest ones.

        All from one pass, if `is_ranked`.

        Args:
            cells: numbers of them, ascending, shape (c,).
            temperatures: shape (m,).

        Returns:
            Float32, shape (c, n, m).
        """
        ranks = _in_a_row([some.ranks for some in self._cells if some.ranks is not None], self._gold.device)
        gaps = [self._gaps(ranks < count) for count in cells]
        found = torch.empty(len(cells), len(self.nearest), len(temperatures))
        columns = {temperature: column for column, temperature in enumerate(temperatures.tolist())}
        for temperature, sums in self._summed(columns):
            one = self._zero.new_tensor([temperature])
            for at, of_cells in enumerate(gaps):
                found[at, :, columns[temperature]] = self._shares(one, sums, of_cells)[:, 0]
        return found

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Go over all records once for some temperatures: `weights` with one of them is known then.

        No exponential is computed for one that is half of another: e^(-2d/T) is the square of e^(-d/T).
        """
        gaps = self._gaps()
        for temperature, sums in self._summed(set(temperatures) - self._weights.keys()):
            self._weights[temperature] = self._shares(self._zero.new_tensor([temperature]), sums, gaps)

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to the records with the token that came, and to all others; see `Shares`."""
        if isinstance(temperature, Tensor) and temperature.ndim:
            own = pad(temperature.float(), (0, 1), value=1.0).to(self._zero.device)
            return self._shares(own, self._chained([own], [[1.0]])[0][0], self._gaps())
        self.prepare([float(temperature)])
        return self._weights[float(temperature)]

    def _summed(self, temperatures: Iterable[float]) -> Iterator[tuple[float, Tensor]]:
        """Each temperature with its sums, shape (2, pairs); see `_chained`."""
        chains = halving(temperatures)
        sums = self._chained([self._zero.new_tensor(of[:1]) for of in chains], chains)
        for of_chain, of_sums in zip(chains, sums, strict=True):
            yield from zip(of_chain, of_sums, strict=True)

    def _chained(
        self, temperatures: Sequence[Tensor], chains: Sequence[Sequence[float]]
    ) -> list[list[Tensor]]:
        """Sum over the records of each cell that a query visits, and over those with the token that came.

        They are relative to the nearest of the cell, so that none overflows, or is 0 for all.

        Args:
            temperatures: with which each chain begins, shape (1,) or (n + 1,).
            chains: each temperature half of the one before it.

        Returns:
            Both sums along each chain, shape (2, pairs).
        """
        if not chains:
            return []
        near = self._near.where(self._near.isfinite(), 0)
        totals = [[list[Tensor]() for _ in of] for of in chains]
        for some, zero, asked in self._with(near, self._asked):
            gaps = zero - some.distances
            weights = None if some.log_weights is None else some.log_weights.exp()[..., None]
            for own, of_chain in zip(temperatures, totals, strict=True):
                divisors = own if len(own) == 1 else own[asked]
                powers = (gaps / divisors).exp_() if len(chains) > 1 else gaps.div_(divisors).exp_()
                for sums in of_chain:
                    if sums is not of_chain[0]:
                        powers.square_()
                    sums.append(powers.sum(2) if weights is None else (powers @ weights)[..., 0])
        pairs, distances, counts = self._hits
        found = []
        for own, of_chain in zip(temperatures, totals, strict=True):
            divisors = own if len(own) == 1 else own[self._asked[pairs]]
            powers = ((near[pairs] - distances) / divisors).exp_()
            found.append(list[Tensor]())
            for sums in of_chain:
                if sums is not of_chain[0]:
                    powers.square_()
                total = _in_a_row(sums, near.device)
                gold = torch.zeros_like(total).index_add_(0, pairs, powers * counts)
                found[-1].append(torch.stack([total, gold]))
        return found

    def _shares(self, temperatures: Tensor, sums: Tensor, gaps: Tensor) -> Tensor:
        """What the records with the token that came have of all, and all others; see `Shares.weights`.

        Args:
            temperatures: shape (1,) or (n + 1,).
            sums: with them, shape (2, pairs); see `_chained`.
            gaps: see there.
        """
        divisors = temperatures if len(temperatures) == 1 else temperatures[self._asked]
        parts = sums * (gaps / divisors).exp_()
        total, gold = self._zero.new_zeros(2, len(self._zero)).index_add_(1, self._asked, parts)
        share = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
        return torch.stack([share, (total > 0).float() - share], 1)[:-1].cpu()

    def _gaps(self, among: Tensor | None = None) -> Tensor:
        """How much nearer a query's nearest record is than that of each cell, at most 0, shape (pairs,).

        -inf for cells that do not count: where `among`, bool, shape (pairs,), is False.
        """
        near = self._near if among is None else self._near.where(among, torch.inf)
        return torch.where(near.isfinite(), self._nearest_of(near)[self._asked] - near, -torch.inf)

    def _nearest_of(self, distances: Tensor) -> Tensor:
        """The least of what is given for each pair of a query and a cell, for each query, shape (n + 1,)."""
        nearest = distances.new_full((len(self._gold),), torch.inf)
        return nearest.scatter_reduce_(0, self._asked, distances, "amin")

    @cached_property
    def _hits(self) -> Hits:
        return hits_of(self._cells, self._asked, self._gold)

    def _with(self, *of_pairs: Tensor) -> Iterator[tuple[Any, ...]]:
        """The cells, each with what is known of the queries that visit it, shape (b, m, 1)."""
        sizes = [some.queries.numel() for some in self._cells]
        columns = [torch.split(one, sizes) for one in of_pairs]
        for some, *parts in zip(self._cells, *columns, strict=True):
            yield some, *(part.view(*some.queries.shape, 1) for part in parts)


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

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Know nothing ahead: there is a sum for each token."""

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to each token, float32, shape (n, v)."""
        return self._visited.by_token(temperature, self._vocabulary).to(self._device)


def _in_a_row(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers of shapes (b, m), one after another."""
    if not parts:
        return torch.empty(0, device=device)
    if all(len(part) == 1 for part in parts):  # a thousand small ones, as on a processor
        return torch.cat(list(parts), 1)[0]
    return torch.cat([part.flatten() for part in parts])


def halving(temperatures: Iterable[float]) -> list[list[float]]:
    """Put temperatures into chains, in which each is half of the one before it."""
    chains: list[list[float]] = []
    for one in sorted(temperatures, reverse=True):
        for chain in chains:
            if math.isclose(chain[-1], 2 * one, rel_tol=_SAME):
                chain.append(one)
                break
        else:
            chains.append([one])
    return chains
