"""The evidence for n positions, and the mixers, which choose λ and T from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from knnstore.checks import check_numbers, convert_scalars
from knnstore.datastore import Ids
from knnstore.errors import ConfigError
from knnstore.lm.mixing.interpolation import PerQuery
from knnstore.lm.mixing.token_sums import NeighborSums, TokenSums
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class Evidence:
    """Results of the model and of all components at n positions: the input of the mixture.

    A component is a memory whose predictions are mixed with the model's. All tensors are on one device.
    `knnstore.lm.mixture.look_up` creates the object.
    """

    lm_max: Tensor
    """Confidence of the model: the largest log p_LM at each position, float32, shape (n,)."""

    searches: Sequence[TokenSums] = ()
    """The result of each search of the store, in the order of the mixer's `searches`; for example one for
    each domain."""

    keys: Tensor | None = None
    """The query vectors, float32, shape (n, d); None if no gate or citation needs them."""

    lm_entropy: Tensor | None = None
    """Entropy of the model's distribution in nats, float32, shape (n,); None if no gate needs it."""

    found: Mapping[str, Any] = field(default_factory=dict)
    """The result of each other component in use, by its name."""

    def __len__(self) -> int:
        return len(self.lm_max)

    @property
    def distances(self) -> Tensor:
        """Distances of the nearest records of all searches, float32, shape (n, s * m).

        Each of the s searches has m columns, in ascending order. m is the number of records that the searches
        kept, which may differ from the k of the settings. A missing record has +inf.
        """
        return _concatenate_columns([search.distances for search in self.searches])

    @property
    def distinct(self) -> Tensor:
        """Numbers of different tokens among the nearest 1, 2, 4, ... records of each position.

        int16, shape (n, r). Only the records of the first search count.
        """
        return self.searches[0].distinct

    @property
    def tokens(self) -> Tensor | None:
        """Token of each column of `weights`, int64, shape (n, columns).

        None if only `hits` (which columns have the target token) is kept, or if the columns are the whole
        vocabulary.
        """
        every = [search.tokens for search in self.searches if search.tokens is not None]
        return _concatenate_columns(every) if every else None

    @property
    def hits(self) -> Tensor | None:
        """True for columns of `weights` with the target token, bool, shape (n, columns).

        None if `tokens` is kept instead, or if the columns are the whole vocabulary.
        """
        every = [search.hits for search in self.searches if search.hits is not None]
        return _concatenate_columns(every) if every else None

    @property
    def ids(self) -> Ids:
        """Record ids of the k neighbors of n queries in s searches, int64, shape (n, s * k), -1 if missing.

        Raises:
            ValueError: the evidence has no ids, because `look_up` was not called with `Form.SOURCES`.
        """
        neighbors = [search for search in self.searches if isinstance(search, NeighborSums)]
        return np.concatenate([sums.ids for sums in neighbors if sums.ids is not None], 1)

    def precompute_weights(self, temperatures: Sequence[float]) -> None:
        """Compute `weights` of every search for these temperatures, and keep the results for later calls."""
        for search in self.searches:
            search.precompute_weights(temperatures)

    def weights(self, temperatures: Sequence[PerQuery]) -> Tensor:
        """Compute the probability of each column (a record or a token) in each of s searches.

        Args:
            temperatures: T of each search: one value for all queries, or one for each query, shape (n,).

        Returns:
            Float32, shape (n, s, columns). The columns of a query in a search sum to 1, or are 0 if nothing
            was found.
        """
        pairs = zip(self.searches, temperatures, strict=True)
        return torch.stack([search.weights(temperature) for search, temperature in pairs], 1)

    def select_rows(self, rows: slice | Tensor) -> Self:
        """Return what the model and all components found at some of the positions.

        Args:
            rows: a slice; or indices, int64, shape (m,); or a mask, bool, shape (n,).
        """

        def select_from_column(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return replace(
            self,
            lm_max=self.lm_max[rows],
            searches=[search.select_rows(rows) for search in self.searches],
            keys=select_from_column(self.keys),
            lm_entropy=select_from_column(self.lm_entropy),
            found={name: result.select_rows(rows) for name, result in self.found.items()},
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Evidence"], k: int = 1) -> "Evidence":
        """Concatenate the evidence of several groups of positions that have the same components.

        Args:
            parts: the groups, at least one. Every group has one search, of the type `NeighborSums`.
            k: least number of columns of neighbors in the result; missing neighbors are filled in.
        """

        def concatenate_field(name: str) -> Any:
            columns = [getattr(part, name) for part in parts]
            return None if columns[0] is None else torch.cat(columns)

        neighbors = [search for part in parts for search in part.searches if isinstance(search, NeighborSums)]
        found = {
            name: result.concatenate([part.found[name] for part in parts])
            for name, result in parts[0].found.items()
        }
        return cls(
            concatenate_field("lm_max"),
            [NeighborSums.concatenate(neighbors, k)],
            concatenate_field("keys"),
            concatenate_field("lm_entropy"),
            found,
        )


class Chosen(NamedTuple):
    """λ and T of n queries, as a mixer chooses them."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; arbitrary in rows without a neighbor."""

    temperature: PerQuery
    """T > 0, one for all queries or of shape (n,)."""


class Weighed(NamedTuple):
    """The distribution of the retrieved records (p_kNN) for n queries, and its weight λ, from a mixer."""

    weights: Tensor
    """Probability of each column in p_kNN, see `Evidence.weights`, float32, shape (n, columns). Rows sum to
    1, or are 0 if nothing was found."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; arbitrary in rows without a neighbor."""

    temperature: PerQuery
    """Temperature of the weights, for reports."""


class Mixer(Protocol):
    """Chooses the weight λ of the retrieved records, and possibly T, for each query.

    A mixer that needs only one search inherits from `SimpleMixer`.
    """

    @property
    def name(self) -> str:
        """Short name for reports, for example ``fixed``."""
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """True if the mixer chooses by the nearest distance and the model's confidence alone.

        False if it also uses other neighbors or the query vector.
        """
        ...

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return the selections of documents to search, one for each search that the mixer needs.

        Args:
            selection: the stored documents that the user selected.

        Returns:
            A sequence with `selection` itself, or with one selection for each domain. A search of a domain
            that was removed or is not selected finds nothing. Empty if the weight λ is always 0, so that no
            search is needed.
        """
        ...

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Compute the distribution of the retrieved records (p_kNN) and its weight λ for each query.

        Args:
            evidence: the search results for n queries: one result for each selection that `searches`
                returned.
            temperature: T of the settings; a mixer may scale or replace it.
        """
        ...


class SimpleMixer(ABC):
    """A mixer that needs one search. A subclass defines ``__call__``, which chooses λ and T."""

    needs_nearest_only = False

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return a tuple with `selection` alone, because one search is enough."""
        return (selection,)

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Compute the distribution of the records (p_kNN) and its weight λ.

        The method ``__call__`` chooses λ and T.

        Args:
            evidence: the result of one search for n queries.
            temperature: T of the settings.
        """
        lam, temperatures = self(evidence, temperature)
        (search,) = evidence.searches
        return Weighed(search.weights(temperatures), lam, temperatures)

    @abstractmethod
    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose the weight λ and the temperature T for each query.

        Args:
            evidence: the result of one search for n queries, and the model's confidence.
            temperature: T of the settings.
        """


@dataclass(frozen=True, slots=True)
class FixedLambda(SimpleMixer):
    """The mixer with the same λ for every token (Khandelwal et al. 2020)."""

    lam: float
    """λ, between 0 (the model alone) and 1 (retrieval alone)."""

    name = "fixed"
    needs_nearest_only = True

    def __post_init__(self) -> None:
        convert_scalars(self, "lam")
        check_numbers(self, "lam")
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lambda must be between 0 and 1, got {self.lam}")

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return a tuple with `selection` alone, or an empty tuple if the weight λ is 0.

        An empty tuple means that nothing is searched.
        """
        return (selection,) if self.lam > 0 else ()

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Return the fixed weight λ for all queries, float32, shape (n,), and `temperature` unchanged."""
        lam = torch.full((len(evidence.distances),), self.lam, device=evidence.distances.device)
        return Chosen(lam, temperature)


def _concatenate_columns(columns: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices with the same rows along their columns; at least one matrix."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], 1)
