"""The parts of settings: what is chosen beside k, T and λ. Values only."""

from dataclasses import dataclass

from knnstore.errors import ConfigError
from knnstore.store import Lineage, Reader


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
