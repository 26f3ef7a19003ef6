"""The protocol of a component (`Component`): a memory whose predictions are mixed with the model's.

A component looks up its memory at some positions. For each position it returns a distribution over tokens,
and a weight λ for the distribution in the mixture with the model and all earlier components. If the settings
have a gate, the gate replaces the weights, and chooses between several temperatures of each component. A
component receives only its own settings.
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
    """The part of a look-up's result that is kept."""

    DISTRIBUTION = "distribution"
    """The probabilities of all tokens, to generate text."""
    TARGET = "target"
    """Only the probability of the target token, to score text. Takes much less memory."""
    SOURCES = "sources"
    """The probability of the target token, and the places that it comes from, to explain text."""


class Found(Protocol):
    """The result of a component's look-up at n positions."""

    @property
    def width(self) -> int:
        """Number of values that are kept for each position, e.g. k for k neighbors."""
        ...

    def select_rows(self, rows: slice | Tensor) -> Self:
        """Return the results at m of the n positions.

        Args:
            rows: a slice; or indices, int64, shape (m,); or a mask, bool, shape (n,).
        """
        ...

    def to(self, device: torch.device) -> Self:
        """Return the results with all tensors on a device."""
        ...

    @classmethod
    def concatenate(cls, parts: list[Self]) -> Self:
        """Concatenate the results of several groups of positions; all results have the same `Form`.

        Args:
            parts: the result for each group of positions, at least one.
        """
        ...


class Place(NamedTuple):
    """A place that a prediction comes from: a record of the store, or an earlier token of the same text."""

    token: int
    """The token at the place, which the place predicts."""
    share: float
    """Share of the place among the places of all components, between 0 and 1. The place adds the probability
    share · λ to its token, where λ is the weight of all components together."""
    component: str
    """Name of the component that found the place."""
    distance: float | None = None
    """Distance of the place's key to the query; None if the component has no distances."""
    id: int = -1
    """Id of the record; -1 for a place in the same text."""
    matched: int = 0
    """Number of tokens before the place that equal the tokens before the predicted position. The beginning of
    a document counts as one matched token."""
    position: int = -1
    """Index of the token in the same text; -1 for a record."""


class Citations(NamedTuple):
    """The places that one component's predictions of n tokens come from."""

    nearest: Sequence[Sequence[Place]]
    """For each of the n tokens, the places whose contexts are most similar. They may predict other tokens."""
    causes: Sequence[Sequence[Place]]
    """For each of the n tokens, the places that add most to the probability of this token."""


@dataclass(frozen=True, slots=True)
class Question(Generic[S]):
    """The input of a component's methods `look_up` and `cite`, for n positions."""

    reader: Reader
    """The store."""
    selection: Selection
    """The stored documents that may be used."""
    settings: S
    """The settings of the component."""
    contexts: Contexts
    """The positions, with the tokens of their texts."""
    vocabulary: int
    """Number of tokens that the model predicts."""
    factors: tuple[float, ...] = (1.0,)
    """Factors of the component's temperature. `Component.contribute` will be called with each of these
    factors for the result of the look-up."""
    features: int | None = None
    """Number of the component's features that the gate takes, `Component.width` or less if an earlier version
    fitted it; None if there is no gate."""
    keys: Tensor | None = None
    """Query vector of each position, float32, shape (n, d); d = 0 in a store without keys. None if `cite` is
    called and the query vectors are not known."""


class Component(Protocol):
    """One kind of memory whose predictions are mixed with the model's, such as the stored keys or n-grams."""

    @property
    def name(self) -> str:
        """Name of the component in settings, gates and explanations."""
        ...

    @property
    def factors(self) -> tuple[float, ...]:
        """Factors by which a gate multiplies the component's temperature.

        A gate is a network that weighs all components. It gives the component a weight of its own at each of
        these temperatures.
        """
        ...

    @property
    def width(self) -> int:
        """Number of values that `features` returns for each position."""
        ...

    def contribute(self, settings: Any, found: Any, factor: float = 1.0) -> Contribution:
        """Convert the result of a look-up at n positions to distributions over tokens, each with a weight λ.

        Args:
            settings: the component's settings.
            found: the result of the component's look-up at the n positions.
            factor: factor by which the component's temperature is multiplied.

        Returns:
            The distribution and λ of each position. A position where the look-up found nothing has weights 0.
        """
        ...

    def cite(self, question: Question[Any], found: Any, weights: Tensor, most: int) -> Citations | None:
        """List the places that the component's predictions of n tokens come from.

        A place is a record of the store, or an earlier token of the same text.

        Args:
            question: the input of the look-up; its contexts contain the tokens.
            found: the result of the look-up with `Form.SOURCES`.
            weights: weight of each column of the component's `Contribution`, float32, shape (n, columns). A
                weight is between 0 and 1; the columns of all components together sum to 1.
            most: for each token, the largest number of places in `Citations.nearest`, and in
                `Citations.causes`. A component may return more causes.

        Returns:
            The places of each token; None if the component cannot name any.
        """
        ...

    def features(self, found: Any, unit: float) -> Tensor:
        """Compute the component's inputs for a gate, the network that chooses all components' weights.

        Called only if the component is in use.

        Args:
            found: the result of the look-up at n positions.
            unit: a typical distance, e.g. the median distance to the nearest neighbor. Distances are divided
                by it, so that features do not depend on the scale of the model's keys.

        Returns:
            Float32, shape (n, width); arbitrary where nothing was found.
        """
        ...


class Fitting(Protocol):
    """Fits the settings of one component on the results of its look-ups for n scored tokens."""

    def fit(self, log_probs: Tensor, wanted: Tensor) -> Any:
        """Return the settings that give the tokens the largest likelihood.

        The weight λ is 0 if nothing was found.

        Args:
            log_probs: log p of each token in the mixture without the component, float32, shape (n,).
            wanted: True for the tokens to fit on, bool, shape (n,).
        """
        ...

    def mix(self, log_probs: Tensor, fitted: Any) -> Tensor:
        """Return log p of each token in the mixture with the component, float32, shape (n,).

        Args:
            log_probs: log p of each token in the mixture without the component, float32, shape (n,).
            fitted: settings from `fit`.
        """
        ...

    def lam(self, fitted: Any) -> float:
        """Return the weight λ of settings that `fit` returned, for reports.

        If the settings have several weights, their mean is returned.
        """
        ...


class TextComponent(Component, Protocol):
    """A component that uses the earlier tokens of a text or their keys; all components except the keys."""

    def look_up(self, question: Question[Any], form: Form) -> Found:
        """Look up predictions of the next token at n positions.

        Args:
            question: the positions, the store and the settings.
            form: the part of the result that is kept.

        Returns:
            The result for all n positions, including padding and positions without a prediction.
        """
        ...


KEYS = "keys"
"""Name of the component that searches the store for records near the query."""


def find_by_name(evidence: Evidence, name: str) -> Any:
    """Return the look-up result of one component.

    Args:
        evidence: the look-up results of all components at n positions.
        name: name of the component.

    Returns:
        The result that `look_up` of the component returned. For the component `KEYS` it is `evidence` itself,
        which holds the searches for keys.

    Raises:
        KeyError: the component was not looked up.
    """
    return evidence if name == KEYS else evidence.found[name]
