"""The evidence for n positions, and the mixers, which choose λ and T from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Ids
from knnstore.errors import ConfigError
from knnstore.lm.mixing.interpolation import PerQuery
from knnstore.lm.mixing.token_sums import NeighborSums, TokenSums
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class Evidence:
    """The results of the model and of all components at n positions; tensors are on one device.

    `knnstore.lm.components.look_up` creates it.
    """

    lm_max: Tensor
    """Confidence of the model: the largest log p_LM at each position, float32, shape (n,)."""

    searches: Sequence[TokenSums] = ()
    """The result of each search of the store, in the order of the mixer's `searches`."""

    keys: Tensor | None = None
    """The queries, float32, shape (n, d)."""

    lm_entropy: Tensor | None = None
    """Entropy of p_LM in nats, float32, shape (n,)."""

    found: Mapping[str, Any] = field(default_factory=dict)
    """The result of each other component in use, by its name."""

    def __len__(self) -> int:
        return len(self.lm_max)

    @property
    def distances(self) -> Tensor:
        """Distances of the neighbors, ascending for each of s searches; float32, shape (n, s * k).

        The distance of a missing neighbor is +inf.
        """
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
        """True where a place has the target token, bool, shape (n, places); None if `tokens` are kept."""
        every = [one.hits for one in self.searches if one.hits is not None]
        return _side_by_side(every) if every else None

    @property
    def ids(self) -> Ids:
        """Record ids of the neighbors, int64, shape (n, s * k), -1 if missing; only if sources are kept."""
        every = [one.ids for one in self.searches if isinstance(one, NeighborSums) and one.ids is not None]
        return np.concatenate(every, 1)

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Precompute `weights` for these temperatures."""
        for one in self.searches:
            one.prepare(temperatures)

    def weights(self, temperatures: Sequence[PerQuery]) -> Tensor:
        """Compute the probability of each place in p_kNN, with a temperature for each of s searches.

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
        """Concatenate the evidence of several groups of positions that have the same components.

        Every group has one search, which found single neighbors. The result has at least k columns of
        neighbors.
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


class Chosen(NamedTuple):
    """λ and T of n queries, as a mixer chooses them."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; arbitrary in rows without a neighbor."""

    temperature: PerQuery
    """T > 0, one for all queries or of shape (n,)."""


class Weighed(NamedTuple):
    """p_kNN of n queries and its weight."""

    weights: Tensor
    """Probability of each place in p_kNN, see `Evidence.weights`, float32, shape (n, places). Rows sum to 1,
    or to 0 if nothing was found."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; arbitrary in rows without a neighbor."""

    temperature: PerQuery
    """Temperature of the weights, for reports."""


class Mixer(Protocol):
    """Chooses λ, and possibly T, for each query. A mixer with a single search inherits `SimpleMixer`."""

    @property
    def name(self) -> str:
        """Short name for reports, for example ``fixed``."""
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """True if the mixer uses only the nearest distance and the model's confidence."""
        ...

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return the selections to search, one for each search.

        Args:
            selection: the selection of the settings.

        Returns:
            `selection` itself, or one selection for each domain. A domain that was removed or is not selected
            finds nothing. Empty if a search would make no difference.
        """
        ...

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Weigh the results of the searches.

        Args:
            evidence: the evidence for n queries; its searches are those of `searches`.
            temperature: T of the settings; a mixer may scale or replace it.
        """
        ...


class SimpleMixer(ABC):
    """A mixer with one search. A subclass defines ``__call__``, which chooses λ and T."""

    needs_nearest_only = False

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return the selection, to be searched once."""
        return (selection,)

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Weigh each neighbor by its distance and the chosen T."""
        lam, temperatures = self(evidence, temperature)
        return Weighed(evidence.weights([temperatures])[:, 0], lam, temperatures)

    @abstractmethod
    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and T for each query; the arguments are those of `weigh`."""


@dataclass(frozen=True, slots=True)
class FixedLambda(SimpleMixer):
    """The mixer with the same λ for every token (Khandelwal et al. 2020)."""

    lam: float
    """λ, between 0 (the model alone) and 1 (retrieval alone)."""

    name = "fixed"
    needs_nearest_only = True

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lambda must be between 0 and 1, got {self.lam}")

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return the selection, or nothing if λ is 0."""
        return (selection,) if self.lam > 0 else ()

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ, and the given temperature."""
        lam = torch.full((len(evidence.distances),), self.lam, device=evidence.distances.device)
        return Chosen(lam, temperature)


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """Concatenate columns of the same rows."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], 1)
