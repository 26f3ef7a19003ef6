"""Components of other packages: their list, and the check of their settings.

A package offers a component as an entry point of the group `knnstore.components`. The entry point's own name
is not used; the component's `name` is. See `knnstore.lm.components.DistributionComponent`.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from knnstore.errors import ConfigError

GROUP = "knnstore.components"

C = TypeVar("C", bound=type)

_BUILT_IN = frozenset({"cache", "keys", "n-grams", "own n-grams", "model"})
_registered: dict[str, Any] = {}


def register_component(component: C) -> C:
    """Register a component in this process, without an entry point; usable as a decorator.

    Args:
        component: a class whose constructor takes no arguments; see
            `knnstore.lm.components.DistributionComponent`.

    Raises:
        ConfigError: another component has the same name.
    """
    _add(_registered, component, component.__name__)
    return component


def other_components() -> Mapping[str, Any]:
    """Return an instance of each component of other packages, by name.

    Raises:
        ConfigError: an entry point cannot be loaded, or two components have the same name.
    """
    return {**_installed(), **_registered}


def check_others(others: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of components of other packages, completed by their defaults.

    Raises:
        ConfigError: a component is not installed, or refuses its settings.
    """
    checked = {}
    for name, values in others.items():
        component = other_components().get(name)
        if component is None:
            known = ", ".join(other_components()) or "none"
            raise ConfigError(
                f"no component {name!r} of another package is installed (there is {known}): install the "
                "package that has it, or leave it out of the settings"
            )
        checked[name] = component.check_settings({**component.default_settings, **values})
    return checked


@cache
def _installed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entry_points(group=GROUP):
        try:
            component = entry.load()
        except Exception as error:
            raise ConfigError(f"the component {entry.value} cannot be loaded: {error}") from error
        _add(found, component, entry.value)
    return found


def _add(components: dict[str, Any], component: type, source: str) -> None:
    """Add an instance of a component to `components`. Raises ConfigError if its name is taken."""
    made = component()
    if made.name in _BUILT_IN or made.name in components:
        raise ConfigError(f"{source} names its component {made.name!r}, which is the name of another one")
    components[made.name] = made
