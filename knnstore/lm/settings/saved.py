"""Converting settings to values for JSON and back, and saving them in a store."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.components import CacheSettings, NGramSettings
from knnstore.lm.keys import describe_keys
from knnstore.lm.mixing import JointGate, is_registered, load_mixer, load_plugin_mixers
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import (
    KNNStore,
    Lineage,
    Reader,
    SavedSettings,
    Selection,
    Weights,
    load_weights,
)

LoadWeights = Callable[[str], Weights]
"""A function that loads weights by the name that saved settings contain."""

T = TypeVar("T")

_REMOVED = {"skip": "searches that are left out", "pointers": "searches that pointers save"}
"""Settings of earlier versions that have no effect any more: their names, and nouns for messages."""

_REMOVED_MIXERS = ("sk-mt", "relative-confidence")
"""Mixers of earlier versions that are in the package knnstore-research now."""

_logger = logging.getLogger(__name__)


def settings_to_dict(settings: KNNSettings) -> dict[str, Any]:
    """Convert settings to values for JSON, without unset fields.

    A network is converted to the name of its file of weights; `collect_weights` returns the weights.

    Raises:
        ConfigError: the mixer's class is not registered; `register_mixer` registers it.
    """
    mixer: Any = settings.mixer
    if not is_registered(mixer):
        raise ConfigError(
            f"settings with the mixer {mixer.name!r} cannot be saved: call knnstore.lm.register_mixer first"
        )
    values = {
        name: value
        for name, value in _convert_to_values(settings).items()
        if name not in (*settings.unset, "unset")
    }
    if not values.get("others"):
        values.pop("others", None)
    if "mixer" in values:
        values["mixer"] = {"name": mixer.name, **values["mixer"]}
    return values


def settings_from_dict(values: Mapping[str, Any], load: LoadWeights | None = None) -> KNNSettings:
    """Create settings from the values of `settings_to_dict`; absent fields are unset.

    The name ``lambda`` sets the mixer with one fixed λ. Settings that only earlier versions had are ignored,
    with a warning in the log once in a process. A trained component that an earlier version had built in
    becomes one of `KNNSettings.others`.

    Args:
        values: the values.
        load: function that loads weights by name, as `create_weights_loader` returns it. It is needed only if
        the
            values name the weights of a network.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or `load` is needed and None.
    """
    makers: dict[str, Callable[[Any], Any]] = {
        "mixer": lambda part: load_mixer(_load_named_weights(part, load)),
        "selection": _construct_selection,
        "cache": lambda part: part and _construct(CacheSettings, part),
        "ngrams": lambda part: part and _construct(NGramSettings, part),
        "gate": lambda part: part and _construct(JointGate, _load_named_weights(part, load)),
    }
    removed = tuple(name for name in _REMOVED if values.get(name) is not None)
    if removed:
        _warn_of_ignored_settings(removed)
    values = {name: value for name, value in values.items() if name not in _REMOVED}
    known = [*(field.name for field in fields(KNNSettings) if field.name != "unset"), "lambda"]
    values = _move_former_components(values, known)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
    given = {name: makers[name](value) if name in makers else value for name, value in values.items()}
    return KNNSettings(**{"lam" if name == "lambda" else name: value for name, value in given.items()})


def save_settings(
    store: KNNStore,
    settings: KNNSettings,
    domains: Sequence[str] = (),
    calibration: Any = None,
    derived: Lineage | None = None,
) -> None:
    """Save settings in the store; they are in force from then on for selections of exactly `domains`.

    Args:
        store: a store opened for writing.
        settings: the settings; their selection is not saved.
        domains: names of the domains. Settings without domains are in force for the whole store, and for
            every selection that has no saved settings.
        calibration: the `CalibrationRecord` of the settings; None if they were not calibrated.
        derived: the documents from whose keys the settings were computed; None if the settings were not
            computed from keys. When one of the documents is removed, the settings are deleted.

    Raises:
        ConfigError: the mixer's class is not registered; `register_mixer` registers it.
        ReadOnlyError: the store was opened for reading.
    """
    values = settings_to_dict(settings)
    del values["selection"]
    for weights in collect_weights(settings):
        store.save_weights(weights.tensors, weights.metadata)
    before = store.settings(domains) or SavedSettings()
    found = None if calibration is None else asdict(calibration)
    origin = None if derived is None else asdict(derived)
    store.save_settings(replace(before, query=values, calibration=found, derived=origin), domains)


def collect_weights(settings: KNNSettings) -> list[Weights]:
    """Return the weights of the networks in settings, the mixer's first; empty without networks.

    `settings_to_dict` has only the names of these weights, so they must be saved first.
    """
    networks = (getattr(part, "weights", None) for part in (settings.mixer, settings.gate))
    return [weights for weights in networks if isinstance(weights, Weights)]


def create_weights_loader(store: Reader, folder: Path | None = None) -> LoadWeights:
    """Return a function that loads weights by name and checks that they fit a store's keys.

    Args:
        store: the store whose keys the weights are used with.
        folder: folder of the weights; default is the store's home.

    Returns:
        The function. It raises `CorruptWeightsError` if the file is missing or damaged, and
        `FingerprintMismatchError` if the weights are for another model, place in it, metric or dimension.
    """

    def load_checked_weights(name: str) -> Weights:
        """Load a file of weights. Raises FingerprintMismatchError if they were fitted for other keys."""
        found = store.load_weights(name) if folder is None else load_weights(folder, name)
        expected = describe_keys(store.identity)
        known = {key: found.metadata.get(key) for key in expected}
        if known != expected:
            raise FingerprintMismatchError(
                f"the weights {name} were fitted for {known}, but the store's keys are {expected}: run "
                "knnstore calibrate again"
            )
        return found

    return load_checked_weights


def is_mixer_removed(query: Mapping[str, Any]) -> bool:
    """Check whether saved settings use a mixer of an earlier version that no installed package has.

    A mixer is a rule that chooses the weight λ of each token. If the result is True, a warning is logged,
    once in a process for each mixer.

    Args:
        query: the saved values of the settings.
    """
    name = (query.get("mixer") or {}).get("name")
    is_removed = name in _REMOVED_MIXERS and name not in load_plugin_mixers()
    if is_removed:
        _warn_of_removed_mixer(name)
    return is_removed


def _move_former_components(values: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return saved values with the trained components of an earlier version moved to ``others``.

    An earlier version saved each trained component under a separate name. Unknown names with the value null
    are dropped. If a component is moved, a warning is logged, once in a process.

    Args:
        values: the saved values.
        known: names that this version knows.
    """
    former = {name: value for name, value in values.items() if name not in known}
    moved = {
        name: value for name, value in former.items() if isinstance(value, Mapping) and "traces" in value
    }
    kept = {
        name: value
        for name, value in values.items()
        if name in known or (value is not None and name not in moved)
    }
    if moved:
        kept["others"] = {**moved, **(kept.get("others") or {})}
        _warn_of_former_components(tuple(moved))
    return kept


@cache
def _warn_of_former_components(names: tuple[str, ...]) -> None:
    """Log a warning that components of an earlier version are mixed in another order.

    The warning is logged once in a process for the same names.

    Args:
        names: names of the components.
    """
    _logger.warning(
        "the saved settings come from an earlier version, which mixed %s with the model first and then "
        "with the store; now the weight applies to the whole mixture: run knnstore calibrate again",
        ", ".join(names),
    )


@cache
def _warn_of_ignored_settings(names: tuple[str, ...]) -> None:
    """Log a warning that settings of an earlier version are ignored, once in a process for the same names.

    Args:
        names: names of the ignored settings, keys of `_REMOVED`.
    """
    _logger.warning(
        "the saved settings contain %s, which this version ignores: run knnstore calibrate to make new "
        "settings",
        ", ".join(f"{name} ({_REMOVED[name]})" for name in names),
    )


@cache
def _warn_of_removed_mixer(name: str) -> None:
    """Log a warning that saved settings with a removed mixer are not used, once in a process for each name.

    Args:
        name: name of the mixer (the rule that chooses λ), which this version does not have.
    """
    _logger.warning(
        "the saved settings are not used, because their mixer %r has moved to the package "
        "knnstore-research: install it, or run knnstore calibrate to make new settings",
        name,
    )


def _convert_to_values(part: Any) -> Any:
    """Convert a dataclass to a dict, recursively; `Weights` become the name of their file.

    Other values are returned unchanged.
    """
    if isinstance(part, Weights):
        return part.name
    if not is_dataclass(part):
        return part
    return {field.name: _convert_to_values(getattr(part, field.name)) for field in fields(part) if field.init}


def _load_named_weights(values: Mapping[str, Any], load: LoadWeights | None) -> Mapping[str, Any]:
    """Return a copy of saved values in which ``weights`` has the loaded weights, not their name.

    Values without ``weights`` are returned unchanged.

    Args:
        values: the saved values of a part of the settings that may have a network.
        load: function that loads weights by name; None if weights cannot be loaded.

    Raises:
        ConfigError: `load` is None, and there are weights to load.
    """
    if "weights" not in values:
        return values
    if load is None:
        raise ConfigError(
            f"these settings need the weights {values['weights']} of a store: load them with the "
            "store's load_weights"
        )
    return {**values, "weights": load(values["weights"])}


def _construct(part: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Create an object of a class, with the values as keyword arguments.

    Args:
        part: the class.
        values: the keyword arguments.

    Raises:
        ConfigError: a name is unknown or missing.
    """
    try:
        return part(**values)
    except TypeError as error:
        raise ConfigError(f"the settings of {part.__name__} are invalid: {error}") from error


def _construct_selection(values: Mapping[str, Any]) -> Selection:
    """Create a selection (a choice of stored documents) from its saved fields.

    Args:
        values: saved values by name of the field; fields that are left out have their defaults.

    Raises:
        ConfigError: a field is unknown, or a value is not allowed.
    """
    known = {field.name for field in fields(Selection)}
    if not set(values) <= known:
        raise ConfigError(f"a selection has an unknown field in {values}; known: {sorted(known)}")
    return Selection(**values)
