"""The settings of a query: how many neighbours, how far they count, how much retrieval is trusted."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.interpolation import PerQuery, neighbor_weights
from knnstore.lm.mixing import MIXERS, FixedLambda, Mixer, Retrieved, mixer_of
from knnstore.store.selection import EVERYTHING, Selection

_KHANDELWAL = FixedLambda(0.25)


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

    mixer: Mixer = _KHANDELWAL
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
        weights = neighbor_weights(retrieved.distances, temperature, retrieved.log_weights)
        return Weighed(weights, lam, temperature)

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
            given["mixer"] = mixer_of(given["mixer"])
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
