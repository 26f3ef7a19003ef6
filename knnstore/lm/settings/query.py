"""The settings of a query, values only: how many neighbors, how far they count, how much λ is."""

import math
from dataclasses import InitVar, dataclass

from knnstore.errors import ConfigError
from knnstore.lm.mixing import FixedLambda, JointGate, Mixer, RelativeConfidence, Skipping
from knnstore.lm.settings.parts import (
    LEAST_TEMPERATURE,
    CacheSettings,
    NGramSettings,
    PointerSettings,
    Substitute,
)
from knnstore.store import EVERYTHING, Selection

_KHANDELWAL = FixedLambda(0.25)


@dataclass(frozen=True, slots=True)
class KNNSettings:
    """How a language model uses a store. The defaults are those of Khandelwal et al. 2020.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int = 1024
    """Neighbors of each query, >= 1."""

    temperature: float = 1.0
    """T > 0, in the unit of the distances; larger gives far neighbors more weight."""

    mixer: Mixer = _KHANDELWAL
    """Chooses λ for each query; some scale T as well."""

    selection: Selection = EVERYTHING
    """Which documents are retrieved from."""

    cache: CacheSettings | None = None
    """How far the text itself counts that is being read; None is not at all."""

    ngrams: NGramSettings | None = None
    """How much the n-grams of the selected documents count; None is not at all."""

    gate: JointGate | None = None
    """Chooses the weights of all components for each token, in place of their own; None is each its own."""

    skip: Skipping | None = None
    """For which queries no search is made; None searches for all."""

    pointers: PointerSettings | None = None
    """When what was retrieved for the token before takes the place of a search; None is never."""

    substitute: Substitute | None = None
    """A trained substitute, mixed with the model before the store is; alone with ``lam=0``."""

    probes: int | None = None
    """Cells that each query visits, >= 1, in a store that has cells: all their records count, and `k` does
    not. None searches for the k nearest there too."""

    lam: InitVar[float | None] = None
    """Short for ``mixer=FixedLambda(lam)``; not kept as an attribute."""

    def __post_init__(self, lam: float | None) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ConfigError(f"k must be an integer of at least 1, got {self.k!r}")
        if self.probes is not None and not (type(self.probes) is int and self.probes >= 1):
            raise ConfigError(f"probes must be an integer of at least 1, or none, got {self.probes!r}")
        if not (self.temperature >= LEAST_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature must be above 0 (at least {LEAST_TEMPERATURE}) and finite, "
                f"got {self.temperature}"
            )
        if self.substitute is not None and not self.substitute.traces.are_within(self.selection):
            raise ConfigError(
                "the selection leaves out documents that the substitute was trained on: train one on the "
                "domains selected, or use none"
            )
        if lam is not None:
            object.__setattr__(self, "mixer", FixedLambda(lam))
        if self.probes is not None and isinstance(self.mixer, RelativeConfidence):
            raise ConfigError(
                f"the mixer {self.mixer.name!r} goes by the farthest of the k nearest and does not go with "
                "probes: choose another, or give k"
            )
        searches = self.mixer.searches(self.selection)
        if self.gate is not None and any(one is not self.selection for one in searches):
            raise ConfigError(
                f"a gate over all components does not go with the mixer {self.mixer.name!r}, which makes "
                "searches of its own: choose another"
            )
        if self.pointers is not None and any(one is not self.selection for one in searches):
            raise ConfigError(
                f"pointers do not go with the mixer {self.mixer.name!r}, which makes searches of its own: "
                "choose another"
            )

    @property
    def needs_nearest_only(self) -> bool:
        """Whether the nearest distance and the model's confidence are enough to choose all weights."""
        return self.mixer.needs_nearest_only and self.gate is None

    @property
    def retrieves(self) -> bool:
        """Whether a search can make any difference: False when λ is 0 everywhere."""
        return bool(self.mixer.searches(self.selection))

    @property
    def is_model_alone(self) -> bool:
        """Whether nothing at all is mixed with the model."""
        others = self.cache, self.ngrams, self.substitute
        return not self.retrieves and all(one is None for one in others)

    @property
    def needs_text(self) -> bool:
        """Whether it counts which tokens come before: the keys do not tell."""
        return self.cache is not None or self.ngrams is not None
