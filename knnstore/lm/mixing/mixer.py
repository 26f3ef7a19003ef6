"""How much to trust retrieval: the protocol that chooses λ and T for each query."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.mixing.interpolation import PerQuery
from knnstore.store import Weights

MAX_LAMBDA = 0.999
"""The largest λ that is fitted or computed, so that what was not retrieved remains possible."""


class Recent(NamedTuple):
    """What n queries find before them in their own texts: m tokens each, the latest in the last column."""

    distances: Tensor
    """float32, shape (n, m), +inf where the text had not begun."""

    tokens: Tensor
    """int64, shape (n, m); anything where the text had not begun."""

    def rows(self, rows: slice | Tensor) -> "Recent":
        """Some of the queries."""
        return Recent(self.distances[rows], self.tokens[rows])

    def to(self, device: torch.device) -> "Recent":
        """The same on a device."""
        return Recent(self.distances.to(device), self.tokens.to(device))


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

    lm_entropy: Tensor | None = None
    """Entropy of p_LM in nats, float32, shape (n,)."""

    distinct: Tensor | None = None
    """`distinct_tokens`, where `tokens` were not kept."""

    log_weights: Tensor | None = None
    """The log of how many records each neighbour stands for, float32, shape (n, k); None where each stands
    for itself, as in a store that was not pruned."""

    recent: Recent | None = None
    """What stands before in the same text; None where no cache is in use."""


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
"""The mixers that settings can be saved with, by name: dataclasses whose fields are JSON values, or `Weights`
under the name ``weights``."""

LoadWeights = Callable[[str], Weights]
"""Reads the weights that settings name."""

M = TypeVar("M", bound=Callable[..., Mixer])


def savable(mixer: M) -> M:
    """Enter a class of mixers in `MIXERS`, under its ``name``."""
    MIXERS[mixer.name] = mixer  # type: ignore[attr-defined]
    return mixer


def plain(part: Any) -> dict[str, Any]:
    """The fields of a part of settings as values for JSON: weights as the name of their file."""
    values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return {name: value.name if isinstance(value, Weights) else value for name, value in values.items()}


def with_weights(values: Mapping[str, Any], load: LoadWeights | None) -> dict[str, Any]:
    """Undo `plain` for the weights that some values name.

    Raises:
        ConfigError: they name weights, and there is nothing to load them with.
    """
    given = dict(values)
    if "weights" in given:
        if load is None:
            raise ConfigError(
                f"these settings need {given['weights']} of a store: read them with its load_weights"
            )
        given["weights"] = load(given["weights"])
    return given


def mixer_of(values: Mapping[str, Any], load: LoadWeights | None = None) -> Mixer:
    """Make a mixer from its ``name`` and its fields.

    Args:
        values: as `plain` gives them, with the name.
        load: reads the weights of a mixer that has some.

    Raises:
        ConfigError: there is none of this name, or it has other fields.
    """
    given = with_weights(values, load)
    name = given.pop("name", None)
    if name not in MIXERS:
        raise ConfigError(f"unknown mixer {name!r}; known: {', '.join(MIXERS)}")
    try:
        return MIXERS[name](**given)
    except TypeError as error:
        raise ConfigError(f"the mixer {name!r} has other settings: {error}") from error
