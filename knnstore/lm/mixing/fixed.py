"""The mixer with the same λ everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from knnstore.errors import ConfigError
from knnstore.lm.mixing.evidence import Evidence
from knnstore.lm.mixing.mixer import Chosen, SimpleMixer
from knnstore.store import Selection


@dataclass(frozen=True, slots=True)
class FixedLambda(SimpleMixer):
    """The same λ everywhere (Khandelwal et al. 2020)."""

    lam: float
    """Between 0 (the model alone) and 1 (retrieval alone)."""

    name = "fixed"
    needs_nearest_only = True

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lambda must be between 0 and 1, got {self.lam}")

    def searches(self, selection: Selection) -> Sequence[Selection]:
        """All that is selected, or nothing where λ is 0."""
        return (selection,) if self.lam > 0 else ()

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ and the temperature given."""
        lam = torch.full((len(evidence.distances),), self.lam, device=evidence.distances.device)
        return Chosen(lam, temperature)
