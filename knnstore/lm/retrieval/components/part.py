"""The protocol of what is mixed with the model."""

from typing import Protocol

from torch import Tensor

from knnstore.lm.mixing import Component, Retrieved
from knnstore.lm.settings import KNNSettings


class Part(Protocol):
    """Says what comes next, and what is known of that before it comes.

    By itself it has a weight of its own over all that lies below; a gate over all parts chooses in place of
    these, and between several temperatures of each.
    """

    @property
    def name(self) -> str:
        """Under which a gate knows it."""
        ...

    @property
    def factors(self) -> tuple[float, ...]:
        """By which its temperature is multiplied, one for each of its experts in a gate."""
        ...

    @property
    def width(self) -> int:
        """How many features it has."""
        ...

    def in_use(self, settings: KNNSettings) -> bool:
        """Whether settings have it."""
        ...

    def component(self, settings: KNNSettings, retrieved: Retrieved, factor: float = 1.0) -> Component | None:
        """What it says of n tokens, with its temperature multiplied and its own λ; None where not in use."""
        ...

    def features(self, retrieved: Retrieved, unit: float) -> Tensor:
        """What a gate sees of it, where it is in use.

        Args:
            retrieved: what is known of n tokens.
            unit: of distances.

        Returns:
            Float32, shape (n, width); anything where the component says nothing.
        """
        ...
