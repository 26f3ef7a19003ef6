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
from knnstore.lm.mixing.meetings import Hits, VisitedCells, hits_of

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
        nearest = torch.full((len(gold) + 1,), torch.inf, device=device)
        of_cells = torch.cat([nearest[:0], *(some.distances.amin(2).flatten() for some in self._cells)])
        nearest.scatter_reduce_(0, self._asked, of_cells, "amin")
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
        count, bounds = len(self.nearest), self._bounds(k)
        queries, distances, tokens = [self._gold[:0]], [self._zero[:0]], [self._gold[:0]]
        for some, asked in self._with(self._asked):
            found = (some.distances <= bounds[asked]).nonzero(as_tuple=True)
            queries.append(asked[..., 0][found[:2]])
            distances.append(some.distances[found])
            tokens.append(some.tokens[found[0], found[2]])
        away, asked = torch.cat(distances), torch.cat(queries)
        order = away.argsort()
        asked, then = asked[order].sort(stable=True)
        order, place = order[then], _places(asked)
        chosen = (place < k) & (asked < count)
        near, of_near = self._zero.new_full((count, k), torch.inf), self._gold.new_zeros(count, k)
        at = asked[chosen], place[chosen]
        near[at], of_near[at] = away[order[chosen]], torch.cat(tokens)[order[chosen]]
        return near.cpu(), of_near.cpu()

    def _bounds(self, k: int) -> Tensor:
        """What hardly more than the k nearest of each query are within, shape (n + 1,).

        The records of each cell are divided into k groups. The nearest of each group, of all cells a query
        visits, are a few, and the k-th of these is at least as far as the k-th of all.
        """
        leasts = [self._zero.new_empty(0, k)]
        for some in self._cells:
            whole = some.distances.shape[2] // k * k
            least = some.distances.new_full((*some.distances.shape[:2], k), torch.inf)
            if whole:
                torch.amin(some.distances[..., :whole].reshape(*least.shape[:2], -1, k), 2, out=least)
            rest = some.distances[..., whole:]
            least[..., : rest.shape[2]] = torch.minimum(least[..., : rest.shape[2]], rest)
            leasts.append(least.flatten(0, 1))
        asked, order = self._asked.sort(stable=True)
        there = asked < len(self.nearest)
        asked, place, order = asked[there], _places(asked)[there], order[there]
        cells = int(place.max()) + 1 if len(place) else 1
        table = self._zero.new_full((len(self._zero), cells, k), torch.inf)
        table[asked, place] = torch.cat(leasts)[order]
        bounds = table.flatten(1).topk(k, largest=False, sorted=False).values.amax(1)
        return bounds.clamp(max=torch.finfo(bounds.dtype).max)  # what is missing is beyond it

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

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Go over all records once for some temperatures: `weights` with one of them is known then.

        No exponential is computed for one that is half of another: e^(-2d/T) is the square of e^(-d/T).
        """
        chains = halving(set(temperatures) - self._weights.keys())
        if chains:
            found = self._summed([self._zero.new_tensor(chain[:1]) for chain in chains], chains)
            for chain, of_chain in zip(chains, found, strict=True):
                self._weights |= zip(chain, of_chain, strict=True)

    def weights(self, temperature: PerQuery) -> Tensor:
        """What p_kNN gives to the records with the token that came, and to all others; see `Shares`."""
        if isinstance(temperature, Tensor) and temperature.ndim:
            own = pad(temperature.float(), (0, 1), value=1.0).to(self._zero.device)
            return self._summed([own], [[1.0]])[0][0]
        self.prepare([float(temperature)])
        return self._weights[float(temperature)]

    def _summed(
        self, temperatures: Sequence[Tensor], chains: Sequence[Sequence[float]]
    ) -> list[list[Tensor]]:
        """The weights along some chains, each of which begins with temperatures, shape (1,) or (n + 1,)."""
        totals = [[[self._zero[:0]] for _ in chain] for chain in chains]
        for some, zero, asked in self._with(self._zero[self._asked], self._asked):
            gaps = zero - some.distances  # the nearest is taken as zero, as in `neighbor_weights`
            weights = None if some.log_weights is None else some.log_weights.exp()[..., None]
            for own, of_chain in zip(temperatures, totals, strict=True):
                divisors = own if len(own) == 1 else own[asked]
                powers = (gaps / divisors).exp_() if len(chains) > 1 else gaps.div_(divisors).exp_()
                for sums in of_chain:
                    if sums is not of_chain[0]:
                        powers.square_()
                    sums.append((powers.sum(2) if weights is None else powers @ weights).flatten())
        asked, distances, counts = self._hits
        gaps = self._zero[asked] - distances
        found = []
        for own, of_chain in zip(temperatures, totals, strict=True):
            powers = (gaps / (own if len(own) == 1 else own[asked])).exp_()
            found.append(list[Tensor]())
            for sums in of_chain:
                if sums is not of_chain[0]:
                    powers.square_()
                total, gold = self._zero.new_zeros(2, len(self._zero))
                total.index_add_(0, self._asked, torch.cat(sums))
                gold.index_add_(0, asked, powers * counts)
                share = (gold / total.clamp(min=LEAST_PROBABILITY)).clamp_(max=1.0)
                found[-1].append(torch.stack([share, (total > 0).float() - share], 1)[:-1].cpu())
        return found

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


def _places(owners: Tensor) -> Tensor:
    """The how many-th of its owner's each is; owners ascend; shape (n,)."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)
