"""The protocol of a component: a memory whose predictions are mixed with the model's, in one file.

A component looks up its memory at some positions and returns a distribution for each, with a weight λ over
the mixture of the model and all earlier components. A gate, if the settings have one, replaces these weights,
and chooses between several temperatures of each component. A component knows only its own settings.
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
    """The parts of a finding that are kept."""

    DISTRIBUTION = "distribution"
    """The probabilities of all tokens."""
    TARGET = "target"
    """Only the probability of the target token, which the texts hold: much less memory."""
    SOURCES = "sources"
    """The probability of the target token, and the places that it comes from."""


class Found(Protocol):
    """The result of a component's look-up at n positions."""

    @property
    def width(self) -> int:
        """Number of values that are kept for each position."""
        ...

    def rows(self, rows: slice | Tensor) -> Self:
        """Return the findings at some of the positions."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return the same on a device."""
        ...

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Concatenate findings of the same form for several groups of positions."""
        ...


class Place(NamedTuple):
    """A place that a prediction comes from: a record of the store, or an earlier token of the same text."""

    token: int
    """The token there."""
    share: float
    """Its part of the probability that all components give together, between 0 and 1."""
    component: str
    """Name of the component."""
    distance: float | None = None
    """Distance of its key to the query; None where the component has no distances."""
    id: int = -1
    """The record's id; -1 for a place of the same text."""
    matched: int = 0
    """Number of tokens before it that equal the tokens before the position; the beginning of a document
    counts as one."""
    position: int = -1
    """Index in the same text; -1 for a record."""


class Citations(NamedTuple):
    """The places of one component for n tokens."""

    nearest: Sequence[Sequence[Place]]
    """For each token the places whose contexts are nearest, whatever token they have."""
    causes: Sequence[Sequence[Place]]
    """For each token the places that add most to its probability."""


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
    """The positions; their texts hold the tokens."""
    vocabulary: int
    """Number of tokens of the model."""
    factors: tuple[float, ...] = (1.0,)
    """The factors of its temperature with which `Component.contribute` will be called."""
    keys: Tensor | None = None
    """The store's query at each position, float32, shape (n, d); d = 0 in a store without keys. None if the
    question comes from `Component.cite` and the evidence has no keys."""


class Component(Protocol):
    """One kind of memory."""

    @property
    def name(self) -> str:
        """Its name in settings, gates and explanations."""
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
        """Weigh the findings at n positions.

        Args:
            settings: the component's settings.
            found: the findings, see `find_by_name`.
            factor: multiplies the component's temperature.

        Returns:
            The distribution with its λ.
        """
        ...

    def cite(self, question: Question[Any], found: Any, weights: Tensor, most: int) -> Citations | None:
        """Name the places that its prediction of n tokens comes from.

        Args:
            question: the positions of the tokens, and where to look.
            found: the findings, in the form with sources.
            weights: weight of each place of its contribution in the whole mixture, shape (n, places).
            most: largest number of places of each kind for a token.

        Returns:
            The places; None if the component has none.
        """
        ...

    def features(self, found: Any, unit: float) -> Tensor:
        """Compute the component's features for a gate. Called only if the component is in use.

        Args:
            found: the findings at n positions.
            unit: distance that is counted as 1.

        Returns:
            Float32, shape (n, width); arbitrary where nothing was found.
        """
        ...


class Fitting(Protocol):
    """Evidence of n scored tokens by which the settings of one component are fitted."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> Any:
        """Find the component's likeliest settings.

        Args:
            log_probs: log p of each token without the component, float32, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).
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
        """Look up the next tokens at some positions.

        Args:
            question: the positions, and where to look.
            form: how much of the findings is kept.
        """
        ...


KEYS = "keys"
"""The name of the component that searches the store."""


def find_by_name(evidence: Evidence, name: str) -> Any:
    """Return the findings of a component; for `KEYS` the evidence itself, which holds its searches."""
    return evidence if name == KEYS else evidence.found[name]
