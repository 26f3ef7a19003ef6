"""The mixers by name. Saved settings have a mixer's name and its fields.

Another package offers a mixer class as an entry point of the group ``knnstore.mixers``; a process may also
register one. Settings use the mixer's attribute `name`; the name of the entry point is ignored. If the class
has a classmethod ``fit`` (see `knnstore.lm.calibration.FittableMixer`), `calibrate` tries the mixer too.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from knnstore.errors import ConfigError
from knnstore.lm.mixing.bins import BinnedLambda
from knnstore.lm.mixing.domain_weights import DomainWeights
from knnstore.lm.mixing.gate_network import GateLambda
from knnstore.lm.mixing.mixer import FixedLambda, Mixer

GROUP = "knnstore.mixers"

M = TypeVar("M", bound=Callable[..., Mixer])

_BUILT_IN: dict[str, Callable[..., Mixer]] = {
    mixer.name: mixer for mixer in (FixedLambda, BinnedLambda, GateLambda, DomainWeights)
}
_registered: dict[str, Callable[..., Mixer]] = {}


def register_mixer(mixer: M) -> M:
    """Register a mixer class, so that settings with it can be saved and loaded, and return the class.

    A mixer is a rule that chooses the weight λ and the temperature of each token. Can be used as a decorator.
    A registered mixer of the same name is replaced.

    A process that loads settings with this mixer must register the class too.

    Args:
        mixer: a dataclass with a unique ``name``. Its fields are JSON values; a field ``weights`` may be
            `Weights`.

    Raises:
        ConfigError: a mixer of knnstore has the same name.
    """
    if mixer.name in _BUILT_IN:  # type: ignore[attr-defined]
        raise ConfigError(f"{mixer!r} has the name of a mixer of knnstore: give it another")
    _registered[mixer.name] = mixer  # type: ignore[attr-defined]
    return mixer


def load_plugin_mixers() -> Mapping[str, Callable[..., Mixer]]:
    """Return the mixer classes of other packages, and all registered mixer classes, by name.

    A mixer is a rule that chooses λ and the temperature of each token.

    Raises:
        ConfigError: an entry point cannot be loaded, or two mixers have the same name.
    """
    return {**_load_installed_mixers(), **_registered}


def is_registered(mixer: Mixer) -> bool:
    """Check whether the name of a mixer is known, so that settings with the mixer can be saved and loaded.

    A mixer is a rule that chooses the weight λ and the temperature of each token. Its name is known if the
    mixer is part of knnstore, comes from an installed package, or was registered in this process.
    """
    return mixer.name in _BUILT_IN or mixer.name in load_plugin_mixers()


def load_mixer(values: Mapping[str, Any]) -> Mixer:
    """Create a mixer (a rule that chooses the weight λ of each token) from saved values.

    Args:
        values: the ``name`` of the mixer's class, and the fields of the class.

    Raises:
        ConfigError: no mixer has this name, the mixer has other fields, or a value is out of range.
    """
    given = dict(values)
    name = given.pop("name", None)
    made = _BUILT_IN.get(name) or load_plugin_mixers().get(name)
    if made is None:
        known = ", ".join((*_BUILT_IN, *load_plugin_mixers()))
        raise ConfigError(
            f"no mixer {name!r} is known (there is {known}): install the package that has it, or run "
            "knnstore calibrate"
        )
    try:
        return made(**given)
    except TypeError as error:
        raise ConfigError(f"the mixer {name!r} has other settings: {error}") from error


@cache
def _load_installed_mixers() -> dict[str, Callable[..., Mixer]]:
    """Load the mixer classes that installed packages offer, and return them by name.

    A mixer is a rule that chooses the weight λ of each token. The result is cached.

    Raises:
        ConfigError: an entry point cannot be loaded, or two mixers have the same name.
    """
    found: dict[str, Callable[..., Mixer]] = {}
    for entry in entry_points(group=GROUP):
        try:
            mixer = entry.load()
        except Exception as error:
            raise ConfigError(f"the mixer {entry.value} cannot be loaded: {error}") from error
        if mixer.name in _BUILT_IN or mixer.name in found:
            raise ConfigError(
                f"{entry.value} names its mixer {mixer.name!r}, which is the name of another one"
            )
        found[mixer.name] = mixer
    return found
