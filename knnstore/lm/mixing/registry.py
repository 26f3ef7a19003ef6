"""The mixers that settings can be saved with, by name."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from knnstore.errors import ConfigError
from knnstore.lm.mixing.bins import BinnedLambda
from knnstore.lm.mixing.domains import DomainWeights
from knnstore.lm.mixing.formulas import FixedLambda, NearnessLambda, RelativeConfidence
from knnstore.lm.mixing.gate import GateLambda
from knnstore.lm.mixing.mixer import Mixer

M = TypeVar("M", bound=Callable[..., Mixer])

_BUILT_IN = (FixedLambda, BinnedLambda, NearnessLambda, RelativeConfidence, GateLambda, DomainWeights)
_MIXERS: dict[str, Callable[..., Mixer]] = {mixer.name: mixer for mixer in _BUILT_IN}


def register_mixer(mixer: M) -> M:
    """Let settings with a mixer of this class be saved and read again; usable as a decorator.

    Args:
        mixer: a dataclass with a ``name`` of its own, whose fields are JSON values, or `Weights` under the
            name ``weights``. Whoever reads the settings must have registered it too.
    """
    _MIXERS[mixer.name] = mixer  # type: ignore[attr-defined]
    return mixer


def is_registered(mixer: Mixer) -> bool:
    """Whether settings with this mixer can be saved."""
    return mixer.name in _MIXERS


def mixer_of(values: Mapping[str, Any]) -> Mixer:
    """Make a mixer from its ``name`` and its fields.

    Raises:
        ConfigError: there is none of this name, or it has other fields.
    """
    given = dict(values)
    name = given.pop("name", None)
    if name not in _MIXERS:
        raise ConfigError(f"unknown mixer {name!r}; known: {', '.join(_MIXERS)}")
    try:
        return _MIXERS[name](**given)
    except TypeError as error:
        raise ConfigError(f"the mixer {name!r} has other settings: {error}") from error
