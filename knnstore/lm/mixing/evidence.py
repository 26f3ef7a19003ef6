"""The evidence for n positions: what the model and every component know of the next token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Ids
from knnstore.lm.mixing.interpolation import PerQuery
from knnstore.lm.mixing.token_sums import NeighborSums, TokenSums


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of n positions when λ and T are chosen; tensors are on one device.

    `knnstore.lm.components.look_up` makes it.
    """

    lm_max: Tensor
    """log p_LM of the token that the model finds likeliest, float32, shape (n,): its confidence."""

    searches: Sequence[TokenSums] = ()
    """What each search of the store found, in the order of the mixer's `searches`."""

    keys: Tensor | None = None
    """The queries, float32, shape (n, d)."""

    lm_entropy: Tensor | None = None
    """Entropy of p_LM in nats, float32, shape (n,)."""

    found: Mapping[str, Any] = field(default_factory=dict)
    """What each other component found, by its name; only of components in use."""

    def __len__(self) -> int:
        return len(self.lm_max)

    @property
    def distances(self) -> Tensor:
        """To the nearest neighbors, ascending for each search, float32, shape (n, s * k); +inf if missing."""
        return _side_by_side([one.distances for one in self.searches])

    @property
    def distinct(self) -> Tensor:
        """Number of different tokens among the nearest neighbors of the first search, int16, shape (n, r)."""
        return self.searches[0].distinct

    @property
    def tokens(self) -> Tensor | None:
        """Token of each place, int64, shape (n, places); None with `hits`, or if all tokens have one."""
        every = [one.tokens for one in self.searches if one.tokens is not None]
        return _side_by_side(every) if every else None

    @property
    def hits(self) -> Tensor | None:
        """Whether each place has the target token, bool, shape (n, places); None where that is not known."""
        every = [one.hits for one in self.searches if one.hits is not None]
        return _side_by_side(every) if every else None

    @property
    def ids(self) -> Ids:
        """Record ids of the neighbors, int64, shape (n, s * k), -1 if missing; only kept with sources."""
        every = [one.ids for one in self.searches if isinstance(one, NeighborSums) and one.ids is not None]
        return np.concatenate(every, 1)

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Precompute `weights` for these temperatures."""
        for one in self.searches:
            one.prepare(temperatures)

    def weights(self, temperatures: Sequence[PerQuery]) -> Tensor:
        """Compute what p_kNN gives to each place, in each of s searches at a temperature of its own.

        Returns:
            Float32, shape (n, s, places). Rows sum to 1, or to 0 when nothing was found.
        """
        pairs = zip(self.searches, temperatures, strict=True)
        return torch.stack([one.weights(temperature) for one, temperature in pairs], 1)

    def select_rows(self, rows: slice | Tensor) -> Self:
        """Return the evidence for some of the positions."""

        def chosen(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return replace(
            self,
            lm_max=self.lm_max[rows],
            searches=[one.select_rows(rows) for one in self.searches],
            keys=chosen(self.keys),
            lm_entropy=chosen(self.lm_entropy),
            found={name: one.rows(rows) for name, one in self.found.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence["Evidence"], k: int = 1) -> "Evidence":
        """Put the evidence of several groups of positions, with the same components, one after another.

        Every group has one search, which found single neighbors; the result has at least k columns of these.
        """

        def joined(name: str) -> Any:
            columns = [getattr(part, name) for part in parts]
            return None if columns[0] is None else torch.cat(columns)

        of_search = [one for part in parts for one in part.searches if isinstance(one, NeighborSums)]
        return cls(
            joined("lm_max"),
            [NeighborSums.joined(of_search, k)],
            joined("keys"),
            joined("lm_entropy"),
            {name: one.joined([part.found[name] for part in parts]) for name, one in parts[0].found.items()},
        )


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Put columns of the same rows side by side."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], 1)
