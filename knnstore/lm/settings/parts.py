"""The parts of settings: what is chosen beside k, T and λ. Values only."""

import math
from dataclasses import dataclass

from knnstore.errors import ConfigError
from knnstore.store import LONGEST_NGRAM, Lineage, Reader

LEAST_TEMPERATURE = 1e-12
"""Below it a distance in units of the temperature may have no number."""


@dataclass(frozen=True, slots=True)
class NGramSettings:
    """How much counts of n-grams weigh; of the selected documents: see `knnstore.store.ngrams`.

    Raises:
        ConfigError: a value is out of range.
    """

    order: int = 7
    """Tokens of the longest n-grams, between 2 and 8: one more than the contexts have."""

    lam: float = 0.25
    """λ, between 0 and 1: the weight of the counts against the mixture of model and store."""

    by_length: tuple[float, ...] | None = None
    """λ where the longest end of the context that was found has 0, 1, ... tokens, the last one for all that
    are longer: then `lam` is only their mean. None is `lam` everywhere."""

    def __post_init__(self) -> None:
        if self.by_length is not None:
            object.__setattr__(self, "by_length", tuple(self.by_length))
        if type(self.order) is not int or not 2 <= self.order <= LONGEST_NGRAM:
            raise ConfigError(
                f"n-grams of 2 to {LONGEST_NGRAM} tokens are counted, their order cannot be {self.order!r}"
            )
        for lam in (self.lam, *(self.by_length or ())):
            if not 0 <= lam <= 1:
                raise ConfigError(f"lambda of n-grams must be between 0 and 1, got {lam}")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How much the text that is being read counts; it is mixed with all the rest.

    Raises:
        ConfigError: a value is out of range.
    """

    size: int = 500
    """M >= 1: how many tokens back it reaches; published values are between 100 and 2,000."""

    temperature: float = 1.0
    """T > 0, in the unit of the distances."""

    lam: float = 0.1
    """λ, between 0 and 1: the weight of the cache against the mixture of model and store."""

    ngrams: NGramSettings | None = None
    """How much the own n-grams of the text count, of all that was read of it, against all the rest; None is
    not at all."""

    def __post_init__(self) -> None:
        if isinstance(self.ngrams, dict):  # as it is saved
            object.__setattr__(self, "ngrams", NGramSettings(**self.ngrams))
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"the cache's size must be an integer of at least 1, got {self.size!r}")
        if not (self.temperature >= LEAST_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"the cache's temperature must be above 0 (at least {LEAST_TEMPERATURE}) and finite, "
                f"got {self.temperature}"
            )
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"the cache's lambda must be between 0 and 1, got {self.lam}")


@dataclass(frozen=True, slots=True)
class Substitute:
    """A trained substitute as settings name it."""

    weights: str
    """The file in the store's home."""
    lam: float
    """λ, its weight beside the model: above 0 and at most 1."""
    traces: Lineage
    """The documents that it was trained on."""

    def __post_init__(self) -> None:
        if not 0 < self.lam <= 1:
            raise ConfigError(f"lambda of a substitute must be above 0 and at most 1, got {self.lam}")

    def is_outdated(self, store: Reader) -> bool:
        """Whether a document that it was trained on was removed or replaced since."""
        return store.gone(self.traces) > 0
