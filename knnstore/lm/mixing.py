"""How much to trust retrieval: the settings of a query, and the protocol that chooses λ and T."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.interpolation import PerQuery, neighbor_weights
from knnstore.store.selection import EVERYTHING, Selection

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that what was not retrieved remains possible."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What is known about n queries when λ is chosen; tensors are on one device."""

    distances: Tensor
    """float32, shape (n, k), ascending in each row; +inf where a neighbour is missing."""

    lm_max: Tensor
    """log p_LM of the token that the model finds likeliest, float32, shape (n,): its confidence."""

    tokens: Tensor | None = None
    """int64, shape (n, k); anything where a neighbour is missing. Not kept by `ScoredText`."""

    keys: Tensor | None = None
    """The queries themselves, float32, shape (n, d). Not kept by `ScoredText`."""


class Chosen(NamedTuple):
    """What a mixer chose for n queries."""

    lam: Tensor
    """λ, float32, shape (n,), between 0 and 1; rows without a neighbour do not matter."""

    temperature: PerQuery
    """T > 0, one for all or of shape (n,)."""


class Mixer(Protocol):
    """A way to choose λ, and if it likes T, for each query."""

    @property
    def name(self) -> str:
        """A short name for reports, e.g. ``fixed``."""
        ...

    def __call__(self, retrieved: Retrieved, temperature: float) -> Chosen:
        """Choose for each query.

        Args:
            retrieved: what is known.
            temperature: that of the settings, for a mixer that has no better one or scales it.
        """
        ...


MIXERS: dict[str, Callable[..., Mixer]] = {}
"""The mixers that settings can be saved with, by name: dataclasses whose fields are JSON values."""

M = TypeVar("M", bound=Callable[..., Mixer])


def savable(mixer: M) -> M:
    """Enter a class of mixers in `MIXERS`, under its ``name``."""
    MIXERS[mixer.name] = mixer  # type: ignore[attr-defined]
    return mixer


@savable
@dataclass(frozen=True, slots=True)
class FixedLambda:
    """The same λ everywhere (Khandelwal et al. 2020)."""

    lam: float
    """Between 0 (the model alone) and 1 (retrieval alone)."""

    name = "fixed"

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"lambda must be between 0 and 1, got {self.lam}")

    def __call__(self, retrieved: Retrieved, temperature: float) -> Chosen:
        """Choose λ and the temperature given."""
        lam = torch.full((len(retrieved.distances),), self.lam, device=retrieved.distances.device)
        return Chosen(lam, temperature)


class Weighed(NamedTuple):
    """The settings applied to n queries."""

    weights: Tensor
    """p_kNN of each neighbour, see `neighbor_weights`; shape (n, k)."""

    lam: Tensor
    """λ, shape (n,)."""

    temperature: PerQuery
    """T in force."""


@dataclass(frozen=True, slots=True)
class KNNSettings:
    """How a language model uses a store. The defaults are those of Khandelwal et al. 2020.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int = 1024
    """Neighbours of each query, >= 1."""

    temperature: float = 1.0
    """T > 0, in the unit of the distances; larger gives far neighbours more weight."""

    mixer: Mixer = FixedLambda(0.25)
    """Chooses λ for each query; some scale T as well."""

    selection: Selection = EVERYTHING
    """Which documents are retrieved from."""

    lam: InitVar[float | None] = None
    """Short for ``mixer=FixedLambda(lam)``; not kept as an attribute."""

    def __post_init__(self, lam: float | None) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ConfigError(f"k must be an integer of at least 1, got {self.k!r}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be above 0 and finite, got {self.temperature}")
        if lam is not None:
            object.__setattr__(self, "mixer", FixedLambda(lam))

    @property
    def retrieves(self) -> bool:
        """Whether a search can make any difference: False when λ is 0 everywhere."""
        return not (isinstance(self.mixer, FixedLambda) and self.mixer.lam == 0)

    def weigh(self, retrieved: Retrieved) -> "Weighed":
        """Apply the mixer.

        Args:
            retrieved: n queries with k neighbours each.
        """
        lam, temperature = self.mixer(retrieved, self.temperature)
        return Weighed(neighbor_weights(retrieved.distances, temperature), lam, temperature)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON.

        Raises:
            ConfigError: the mixer is none of `MIXERS`.
        """
        mixer: Any = self.mixer
        if mixer.name not in MIXERS:
            raise ConfigError(f"settings with the mixer {mixer.name!r} cannot be written as values")
        return {
            "k": self.k,
            "temperature": self.temperature,
            "mixer": {"name": mixer.name, **dataclasses.asdict(mixer)},
            "selection": dataclasses.asdict(self.selection),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make settings from what `to_dict` returned; what is absent has its default.

        ``lambda`` is short for a fixed mixer.

        Raises:
            ConfigError: a name is unknown or a value is out of range.
        """
        known = {name: name for name in ("k", "temperature", "mixer", "selection")} | {"lambda": "lam"}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
        given = {known[name]: value for name, value in values.items()}
        if "mixer" in given:
            given["mixer"] = _mixer_of(given["mixer"])
        if "selection" in given:
            parts = {field.name for field in dataclasses.fields(Selection)}
            if not set(given["selection"]) <= parts:
                raise ConfigError(
                    f"unknown part of a selection in {given['selection']}; known: {sorted(parts)}"
                )
            given["selection"] = Selection(
                **{
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in given["selection"].items()
                }
            )
        return cls(**given)


def _mixer_of(values: Mapping[str, Any]) -> Mixer:
    fields = dict(values)
    name = fields.pop("name", None)
    if name not in MIXERS:
        raise ConfigError(f"unknown mixer {name!r}; known: {', '.join(MIXERS)}")
    try:
        return MIXERS[name](**fields)
    except TypeError as error:
        raise ConfigError(f"the mixer {name!r} has other settings: {error}") from error
