"""How much to trust retrieval: the protocol that chooses λ and T for each query."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from knnstore.lm.mixing.interpolation import PerQuery, neighbor_weights
from knnstore.lm.mixing.meetings import Shares
from knnstore.store import Selection

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that what was not retrieved remains possible."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What is known about n queries when λ is chosen; tensors are on one device."""

    distances: Tensor
    """float32, shape (n, k), ascending in each row; +inf where a neighbor is missing."""

    lm_max: Tensor
    """log p_LM of the token that the model finds likeliest, float32, shape (n,): its confidence."""

    tokens: Tensor | None = None
    """int64, shape (n, k); anything where a neighbor is missing. Not kept by `ScoredText`."""

    keys: Tensor | None = None
    """The queries themselves, float32, shape (n, d). Not kept by `ScoredText`."""

    lm_entropy: Tensor | None = None
    """Entropy of p_LM in nats, float32, shape (n,)."""

    distinct: Tensor | None = None
    """`distinct_tokens`, where `tokens` were not kept."""

    log_weights: Tensor | None = None
    """The log of how many records each neighbor stands for, float32, shape (n, k); None where each stands
    for itself, as in a store that was not pruned."""

    found: Mapping[str, Any] = field(default_factory=dict)
    """What each other component found, by its name; only of those in use. See `knnstore.lm.components`."""

    hits: Tensor | None = None
    """Whether each neighbor carries the token that came, bool, shape (n, k), if `tokens` are not known."""

    visited: Sequence[Shares] | None = None
    """All records of the cells visited, for each search: these count, and `distances` and `tokens` are only
    of the nearest of them."""

    _known: dict[float, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `weights` gives at temperatures that were prepared, where neighbors count."""

    def prepare(self, temperatures: Sequence[float]) -> None:
        """Hear for which temperatures, among others, one search will be asked for `weights`: see `Shares`."""
        for visited in self.visited or ():
            visited.prepare(temperatures)
        if self.visited is None and not self._known.keys() >= set(temperatures):
            log_weights = None if self.log_weights is None else self.log_weights[:, None]
            every = neighbor_weights(self.distances[:, None], torch.tensor(temperatures), log_weights)
            self._known.update(zip(temperatures, every.unbind(1), strict=True))

    def weights(self, temperatures: Sequence[PerQuery]) -> Tensor:
        """What p_kNN gives to each place, in each of s searches at a temperature of its own.

        Returns:
            Float32, shape (n, s, places): the neighbors of each search, or the places of what was visited.
            Rows sum to 1, or to 0 when nothing was found.
        """
        if self.visited is not None:
            found = zip(self.visited, temperatures, strict=True)
            return torch.stack([visited.weights(temperature) for visited, temperature in found], 1)
        if len(temperatures) == 1:
            (one,) = temperatures
            if isinstance(one, float) and one in self._known:
                return self._known[one][:, None]
            return neighbor_weights(self.distances, one, self.log_weights)[:, None]
        count, shape = len(temperatures), (len(self.distances) * len(temperatures), -1)
        rows = torch.stack([torch.as_tensor(one).expand(len(self.distances)) for one in temperatures], 1)
        log_weights = None if self.log_weights is None else self.log_weights.reshape(shape)
        weights = neighbor_weights(self.distances.reshape(shape), rows.flatten(), log_weights)
        return weights.reshape(len(self.distances), count, -1)

    @property
    def has_token(self) -> Tensor | None:
        """Whether each place has the token that came, bool, (n, places of all searches), if that is known."""
        if self.visited is None:
            return self.hits
        hits = self.visited[0].hits if self.visited else ()
        if hits is None:
            return None
        return torch.tensor([[*hits] * len(self.visited)]).expand(len(self.distances), -1)


class Chosen(NamedTuple):
    """λ and T for n queries."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; rows without a neighbor do not matter."""

    temperature: PerQuery
    """T > 0, one for all or of shape (n,)."""


class Weighed(NamedTuple):
    """What a mixer makes of n queries with their neighbors."""

    weights: Tensor
    """p_kNN of each place, see `Retrieved.weights`, float32, shape (n, places); rows sum to 1, or to 0 when
    nothing was found."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; rows without a neighbor do not matter."""

    temperature: PerQuery
    """T in force, for reports."""


class Mixer(Protocol):
    """A way to choose λ, and if it likes T, for each query. Whoever searches once inherits `SimpleMixer`."""

    @property
    def name(self) -> str:
        """A short name for reports, e.g. ``fixed``."""
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """Whether it looks at no more than the nearest distance and the model's confidence."""
        ...

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Say where to search.

        Args:
            selection: of the settings.

        Returns:
            `selection` itself, or parts of it by domains: the k nearest of each are put side by side, in
            columns, and a domain that is gone or not selected finds nothing. None where retrieval makes no
            difference.
        """
        ...

    def weigh(self, retrieved: Retrieved, temperature: float) -> Weighed:
        """Weigh the neighbors of n queries.

        Args:
            retrieved: what was found by `searches`.
            temperature: that of the settings, for a mixer that has no better one or scales it.
        """
        ...


class SimpleMixer(ABC):
    """A mixer that searches once; what is left to it is to choose λ and T by ``__call__``."""

    needs_nearest_only = False

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """All that is selected, in one search."""
        return (selection,)

    def weigh(self, retrieved: Retrieved, temperature: float) -> Weighed:
        """Weigh each neighbor by its distance and the T chosen."""
        lam, temperatures = self(retrieved, temperature)
        return Weighed(retrieved.weights([temperatures])[:, 0], lam, temperatures)

    @abstractmethod
    def __call__(self, retrieved: Retrieved, temperature: float) -> Chosen:
        """Choose λ and T for each query; the arguments are those of `weigh`."""
