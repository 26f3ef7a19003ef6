"""Former names of what `resolve` does, kept for one release. Nothing in knnstore uses them.

Below, ``asked`` is ``KNNSettings(selection=selection)``.

| former name | now |
|---|---|
| ``settings_for(store, selection)`` | ``resolve(store, asked)`` |
| ``usable_settings_for(store, selection)`` | ``resolve(store, asked, default_if_unusable=True)`` |
| ``own_settings_for(store, selection)`` | ``resolve(store, asked, only_selected=True)`` |
| ``completed(store, settings)`` | ``resolve(store, settings)`` |
| ``overridden(settings, k=...)`` | ``resolve(store, Overrides(k=...))`` |
| ``settings.for_writing`` | ``resolve(store, settings, Purpose.GENERATION)`` |
| ``settings.writes_alone`` | ``settings.model_generates_alone`` |
| ``default_settings(store)`` | ``derive_default(store)``; saved settings do not count in it |
| ``saved_for(store, selection)`` | ``find_saved_settings(store, selection)`` |
"""

import logging

from knnstore.errors import CorruptWeightsError, FingerprintMismatchError
from knnstore.lm.settings.precedence import (
    Overrides,
    derive_default,
    find_saved_settings,
    override_keys,
    resolve,
)
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import EVERYTHING, Reader, Selection

_logger = logging.getLogger(__name__)

default_settings = derive_default
saved_for = find_saved_settings


def settings_for(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings:
    """Return the settings in force for a selection: the saved settings, else the default settings."""
    return resolve(store, KNNSettings(selection=selection))


def usable_settings_for(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings | None:
    """Return the settings that are used for a selection: saved settings, else default settings.

    Saved settings can name networks (small models with fitted weights). If the file of such a network is
    missing or damaged, or the network was fitted for other keys, the function logs a warning and returns
    None.
    """
    try:
        return resolve(store, KNNSettings(selection=selection))
    except (CorruptWeightsError, FingerprintMismatchError) as error:
        _logger.warning("the saved settings are not used: %s", error)
        return None


def own_settings_for(store: Reader, selection: Selection) -> KNNSettings:
    """Return the settings in force for a selection, computed only from documents in its domains."""
    return resolve(store, KNNSettings(selection=selection), only_selected=True)


def completed(store: Reader, settings: KNNSettings) -> KNNSettings:
    """Return a copy of `settings` whose unset fields have the store's values."""
    return resolve(store, settings)


def overridden(
    settings: KNNSettings,
    *,
    k: int | None = None,
    probes: int | None = None,
    temperature: float | None = None,
    lam: float | None = None,
) -> KNNSettings:
    """Return a copy of `settings` with another k, temperature, weight λ or number of cells.

    Values that are None are kept. `probes` is the number of cells (groups of records with near keys) to
    search. If λ is set, all components other than the keys are switched off.
    """
    return override_keys(settings, Overrides(k=k, probes=probes, temperature=temperature, lam=lam))
