"""Components of other packages: the list of them, and the check of their settings.

A package offers a component as an entry point of the group `knnstore.components`. Settings use the
component's attribute `name`; the name of the entry point is ignored. See
`knnstore.lm.components.DistributionComponent`.
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
    """Register a component class in this process, without an entry point, and return the class.

    A component is one kind of memory whose predictions are mixed with the model's. The function can be used
    as a decorator. It creates one instance of the class.

    Args:
        component: a class whose constructor takes no arguments; see
            `knnstore.lm.components.DistributionComponent`.

    Raises:
        ConfigError: another component has the same name.
    """
    _add_instance(_registered, component, component.__name__)
    return component


def load_plugin_components() -> Mapping[str, Any]:
    """Return the components that other packages offer: one instance of each class, by name.

    A component is one kind of memory whose predictions are mixed with the model's. Classes come from
    installed packages' entry points and from `register_component`.

    Raises:
        ConfigError: an entry point cannot be loaded, or two components have the same name.
    """
    return {**_load_installed_components(), **_registered}


def check_others(others: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check the settings of components of other packages; fill in default values, and return the settings.

    Args:
        others: settings of each component, by the component's name.

    Raises:
        ConfigError: a component is not installed or cannot be loaded, two components have the same name, or a
            component refuses its settings.
    """
    checked = {}
    for name, values in others.items():
        component = load_plugin_components().get(name)
        if component is None:
            known = ", ".join(load_plugin_components()) or "none"
            raise ConfigError(
                f"no component {name!r} is installed (installed: {known}): install the package that has it, "
                "or leave it out of the settings"
            )
        checked[name] = component.check_settings({**component.default_settings, **values})
    return checked


@cache
def _load_installed_components() -> dict[str, Any]:
    """Load the components that installed packages offer, and return one instance of each, by name.

    The result is cached, so entry points are loaded once in a process.

    Raises:
        ConfigError: an entry point cannot be loaded, or a component has the name of another component.
    """
    found: dict[str, Any] = {}
    for entry in entry_points(group=GROUP):
        try:
            component = entry.load()
        except Exception as error:
            raise ConfigError(f"the component {entry.value} cannot be loaded: {error}") from error
        _add_instance(found, component, entry.value)
    return found


def _add_instance(components: dict[str, Any], component: type, source: str) -> None:
    """Create an instance of a component class, and add it to `components` under its name.

    Args:
        components: instances by name; the new instance is added.
        component: the class.
        source: name of the class or of the entry point, for the error message.

    Raises:
        ConfigError: another component has the same name.
    """
    made = component()
    if made.name in _BUILT_IN or made.name in components:
        raise ConfigError(
            f"{source} names its component {made.name!r}, but another component has this name: choose "
            "another name"
        )
    components[made.name] = made
