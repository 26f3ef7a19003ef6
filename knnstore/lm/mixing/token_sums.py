"""p_kNN as weighted sums of tokens: what a search found, as far as mixing needs it.

    p_kNN(y) ∝ Σ_{i: token_i = y} exp(-d_i / T)

`TokenSums` is the interface. `NeighborSums` sums over the k nearest records; `CellSums` in `cell_sums` sums
over all records of the probed cells. Which of both is in use depends on the engine, and nothing above here
asks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import Ids
from knnstore.lm.mixing.interpolation import PerQuery, neighbor_weights

DISTINCT_AMONG = 16
"""Different tokens are counted among at most so many nearest neighbors; more tell a gate nothing."""

_NONE = -1
_FEW = 4
"""Queries, for which a dozen operations on tensors take longer than Python does."""


class TokenSums(Protocol):
    """What one search found for n queries."""

    @property
    def distances(self) -> Tensor:
        """To the nearest records, ascending, float32, shape (n, m), m >= 1; +inf where there are fewer."""
        ...

    @property
    def distinct(self) -> Tensor:
        """`distinct_tokens` of the nearest records, int16, shape (n, r)."""
        ...

    @property
    def tokens(self) -> Tensor | None:
        """Token of each place, int64, shape (n, places); None with `hits`, or if all tokens have one."""
        ...

    @property
    def hits(self) -> Tensor | None:
        """Whether each place has the target token, bool, shape (n, places); None where that is not known."""
        ...

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Precompute `weights` for these temperatures."""
        ...

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the probability that p_kNN gives to each place.

        Args:
            temperature: T > 0, for all queries or of shape (n,).

        Returns:
            Float32, shape (n, places). Rows sum to 1, or to 0 when nothing was found.
        """
        ...

    def select_rows(self, rows: slice | Tensor) -> Self:
        """Return what was found for some of the queries."""
        ...


@dataclass(frozen=True, slots=True)
class NeighborSums:
    """The k nearest records of n queries, a place for each; tensors are on one device."""

    distances: Tensor
    """float32, shape (n, k), +inf where a neighbor is missing. The nearest come first, in order: all of them,
    or as many as a mixer looks at."""

    tokens: Tensor | None = None
    """int64, shape (n, k); arbitrary where a neighbor is missing. None where only hits were kept."""

    hits: Tensor | None = None
    """Whether each neighbor has the target token, bool, shape (n, k), in place of `tokens`."""

    ids: Ids | None = None
    """Record ids, int64, shape (n, k), -1 where one is missing; kept where sources are asked for."""

    known_distinct: Tensor | None = None
    """`distinct`, where `tokens` were not kept."""

    _prepared: dict[float, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def nothing(cls, queries: int, device: torch.device | None = None) -> "NeighborSums":
        """Return what is found where nothing is searched: one missing neighbor for each query."""
        distances = torch.full((queries, 1), torch.inf, device=device)
        return cls(distances, torch.zeros_like(distances, dtype=torch.int64))

    @property
    def distinct(self) -> Tensor:
        """`distinct_tokens` of the neighbors."""
        if self.known_distinct is not None:
            return self.known_distinct
        assert self.tokens is not None
        return distinct_tokens(self.tokens, self.distances)

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Precompute `weights` for these temperatures."""
        if not self._prepared.keys() >= set(temperatures):
            every = neighbor_weights(self.distances[:, None], torch.tensor(temperatures))
            self._prepared.update(zip(temperatures, every.unbind(1), strict=True))

    def weights(self, temperature: PerQuery) -> Tensor:
        """Compute the probability that p_kNN gives to each neighbor; see `TokenSums`."""
        if isinstance(temperature, float) and temperature in self._prepared:
            return self._prepared[temperature]
        return neighbor_weights(self.distances, temperature)

    def for_targets(self, targets: Tensor, *, with_distinct: bool) -> "NeighborSums":
        """Keep only whether each neighbor has its query's target token, shape (n,): 5 bytes in place of 12.

        With `with_distinct` a gate can still see how many different tokens the neighbors have.
        """
        assert self.tokens is not None
        distinct = self.distinct if with_distinct else None
        hits = self.tokens == targets[:, None]
        return NeighborSums(self.distances, hits=hits, known_distinct=distinct)

    def nearest(self, k: int) -> "NeighborSums":
        """Return the k nearest records alone, which must be in order; counts of distinct tokens stay."""
        return self._changed(lambda column: column[:, :k])

    def select_rows(self, rows: slice | Tensor) -> "NeighborSums":
        """Return what was found for some of the queries."""
        distinct = None if self.known_distinct is None else self.known_distinct[rows]
        at = (
            rows.numpy() if isinstance(rows, Tensor) else rows
        )  # numpy takes a tensor of one row for a number
        ids = None if self.ids is None else self.ids[at]
        chosen = replace(self, ids=None)._changed(lambda column: column[rows])
        return replace(chosen, known_distinct=distinct, ids=ids)

    @classmethod
    def joined(cls, parts: Sequence["NeighborSums"], k: int = 1) -> "NeighborSums":
        """Put groups of queries one after another, with at least k columns; record ids are dropped."""
        width = max(k, *(part.distances.shape[1] for part in parts))

        def column(name: str, missing: float) -> Any:
            values = [getattr(part, name) for part in parts]
            if all(value is None for value in values):
                return None
            filled = [
                torch.full_like(part.distances, missing) if value is None else value
                for part, value in zip(parts, values, strict=True)
            ]
            return torch.cat([pad(value, (0, width - value.shape[1]), value=missing) for value in filled])

        counts = [part.known_distinct for part in parts if part.known_distinct is not None]
        return cls(
            column("distances", torch.inf),
            column("tokens", 0),
            column("hits", False),
            known_distinct=torch.cat(counts) if counts else None,
        )

    def _changed(self, change: Callable[[Any], Any]) -> "NeighborSums":
        """Return the same with a change to each column of shape (n, k)."""
        names = "distances", "tokens", "hits", "ids"
        values = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: None if value is None else change(value) for name, value in values.items()
        }
        return replace(self, **changed)


def distinct_tokens(tokens: Tensor, distances: Tensor) -> Tensor:
    """Count the different tokens among the nearest 1, 2, 4, ... neighbors, up to `DISTINCT_AMONG`.

    Args:
        tokens: int64, shape (n, k).
        distances: shape (n, k), +inf where a neighbor is missing, which counts as none.

    Returns:
        int16, shape (n, ⌊log₂ min(k, 16)⌋ + 1).
    """
    ranks = powers_up_to(min(tokens.shape[1], DISTINCT_AMONG))
    near = tokens[:, : ranks[-1]].where(distances[:, : ranks[-1]] < torch.inf, _NONE)
    if len(near) <= _FEW:
        counts_of = [[len({*row[:limit]} - {_NONE}) for limit in ranks] for row in near.tolist()]
        return torch.tensor(counts_of, dtype=torch.int16, device=near.device).reshape(-1, len(ranks))
    # Sort by token, and equal tokens by rank: the first of each counts.
    token, rank = near.sort(dim=1, stable=True)
    first = token != _NONE
    first[:, 1:] &= token[:, 1:] != token[:, :-1]
    counts = torch.zeros_like(first).scatter_(1, rank, first).cumsum(1)
    return counts[:, [limit - 1 for limit in ranks]].to(torch.int16)


def powers_up_to(k: int) -> list[int]:
    """Return 1, 2, 4, ... up to k."""
    return [1 << power for power in range(k.bit_length())]
