"""The protocol of a component: something that is mixed with the model, in one file.

A component looks up what its memory knows of some positions, and makes a distribution of it, with a weight
of its own over all that lies below. A gate over all components chooses in place of these weights, and between
several temperatures of each component. A component knows its own settings and no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Contribution, Evidence
from knnstore.store import Reader, Selection

S = TypeVar("S")


class Form(Enum):
    """The part of a finding that is kept, by what will be asked of it."""

    DISTRIBUTION = "distribution"
    """The probability of any token can be asked for."""
    TARGET = "target"
    """Only the probability of the next token, which the texts hold, can be asked for: much less memory."""
    SOURCES = "sources"
    """The probability of the next token, and the places that it comes from."""


class Found(Protocol):
    """The finding of a component for n positions."""

    @property
    def width(self) -> int:
        """Values that are kept for each position."""
        ...

    def rows(self, rows: slice | Tensor) -> Self:
        """Return what was found for some of the positions."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return the same on a device."""
        ...

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Put what was found for several groups of positions, in the same form, one after another."""
        ...


class Place(NamedTuple):
    """A place that a prediction comes from: a record of the store, or an earlier token of the same text."""

    token: int
    """The token there."""
    share: float
    """Its part of what all components give together, between 0 and 1."""
    component: str
    """Name of the component."""
    distance: float | None = None
    """Distance of its key to the query; None where the component has no distances."""
    id: int = -1
    """The record's id; -1 for a place of the same text."""
    matched: int = 0
    """Tokens before it that are those before the position; the beginning of a document counts as one."""
    position: int = -1
    """Index in the same text; -1 for a record."""


class Citations(NamedTuple):
    """The places of one component for n tokens."""

    nearest: Sequence[Sequence[Place]]
    """For each token the places that look most like its context, whatever token they have."""
    causes: Sequence[Sequence[Place]]
    """For each token the places that give most to it."""


@dataclass(frozen=True, slots=True)
class Question(Generic[S]):
    """The input of a component's look-up at n positions, and of its citations."""

    reader: Reader
    """The store."""
    selection: Selection
    """The documents that may be looked at."""
    settings: S
    """The component's own settings."""
    contexts: Contexts
    """The positions, whose texts hold the tokens."""
    vocabulary: int
    """Tokens of the model."""
    factors: tuple[float, ...] = (1.0,)
    """The factors of its temperature with which `Component.contribute` will be called."""


class Component(Protocol):
    """One kind of memory."""

    @property
    def name(self) -> str:
        """The name under which settings, gates and explanations know it."""
        ...

    @property
    def factors(self) -> tuple[float, ...]:
        """Factors of its temperature, one for each of its experts in a gate."""
        ...

    @property
    def width(self) -> int:
        """Number of its features, see `features`."""
        ...

    def contribute(self, settings: Any, found: Any, factor: float = 1.0) -> Contribution:
        """Weigh what was found for n positions.

        Args:
            settings: of the component.
            found: what the component found, see `find_by_name`.
            factor: the component's temperature is multiplied by it.

        Returns:
            The distribution with its λ.
        """
        ...

    def cite(self, question: Question[Any], found: Any, weights: Tensor, most: int) -> Citations | None:
        """Name the places that its prediction of n tokens comes from.

        Args:
            question: about the positions of the tokens.
            found: the answer, with sources.
            weights: of each place of its contribution among all components together, shape (n, places).
            most: places of each kind that are named for a token.

        Returns:
            None where the component knows no places.
        """
        ...

    def features(self, found: Any, unit: float) -> Tensor:
        """Compute what a gate sees of the component, where it is in use.

        Args:
            found: for n positions.
            unit: of distances.

        Returns:
            Float32, shape (n, width); anything where nothing was found.
        """
        ...


class Fitting(Protocol):
    """Evidence of n scored tokens by which the settings of one component are fitted."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> Any:
        """Find the component's likeliest settings.

        Args:
            log_probs: log p of each token without the component, float32, shape (n,).
            wanted: which tokens to fit on, bool, shape (n,).
        """
        ...

    def mix(self, log_probs: Tensor, fitted: Any) -> Tensor:
        """Mix the component into log p of each token, shape (n,), with settings that were fitted."""
        ...

    def lam(self, fitted: Any) -> float:
        """Return λ of fitted settings, for reports."""
        ...


class TextComponent(Component, Protocol):
    """A component that looks at the tokens of a text or at its own past, and not at the query."""

    def look_up(self, question: Question[Any], form: Form) -> Found:
        """Look up what comes next at some positions.

        Args:
            question: about the positions.
            form: how much is kept of what is found.
        """
        ...


KEYS = "keys"
"""The name of the component that searches the store."""


def find_by_name(evidence: Evidence, name: str) -> Any:
    """Return what a component found: for `KEYS` the evidence itself, whose searches it made."""
    return evidence if name == KEYS else evidence.found[name]
