"""How much to trust retrieval: the protocol that chooses λ and T for each query."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.interpolation import PerQuery
from knnstore.store import Selection

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that what was not retrieved remains possible."""


class Chosen(NamedTuple):
    """λ and T for n queries."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; rows without a neighbor do not matter."""

    temperature: PerQuery
    """T > 0, one for all or of shape (n,)."""


class Weighed(NamedTuple):
    """p_kNN of n queries and its weight."""

    weights: Tensor
    """p_kNN of each place, see `Evidence.weights`, float32, shape (n, places); rows sum to 1, or to 0 when
    nothing was found."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; rows without a neighbor do not matter."""

    temperature: PerQuery
    """T in force, for reports."""


class Mixer(Protocol):
    """A way to choose λ, and possibly T, for each query; inherit `SimpleMixer` for a single search."""

    @property
    def name(self) -> str:
        """A short name for reports, e.g. ``fixed``."""
        ...

    @property
    def needs_nearest_only(self) -> bool:
        """Whether it looks at no more than the nearest distance and the model's confidence."""
        ...

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return where to search.

        Args:
            selection: of the settings.

        Returns:
            `selection` itself, or parts of it by domains, each a search of its own; a domain that is gone or
            not selected finds nothing. Empty where retrieval makes no difference.
        """
        ...

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Weigh what the searches of n queries found.

        Args:
            evidence: with an entry for each of `searches`.
            temperature: of the settings; a mixer may scale or replace it.
        """
        ...


class SimpleMixer(ABC):
    """A mixer that searches once; a subclass chooses λ and T by ``__call__``."""

    needs_nearest_only = False

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """Return all that is selected, in one search."""
        return (selection,)

    def weigh(self, evidence: Evidence, temperature: float) -> Weighed:
        """Weigh each neighbor by its distance and the T chosen."""
        lam, temperatures = self(evidence, temperature)
        return Weighed(evidence.weights([temperatures])[:, 0], lam, temperatures)

    @abstractmethod
    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and T for each query; the arguments are those of `weigh`."""
