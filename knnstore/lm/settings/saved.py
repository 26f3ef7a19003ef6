"""The settings of a store for which none were fitted."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from knnstore.datastore import Metric
from knnstore.errors import CorruptWeightsError, FingerprintMismatchError
from knnstore.lm.keys import described
from knnstore.lm.mixing import LoadWeights
from knnstore.lm.settings.parts import Substitute
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import CALIBRATION, EVERYTHING, KNNStore, Reader, Selection, Weights, load_weights

DEFAULT_K = 1024
DEFAULT_LAMBDA = 0.5
"""Between the best values published in the model's own domain (0.25) and far from it (0.65 and more)."""

_logger = logging.getLogger(__name__)

_TEMPERATURE_SHARE = 0.1
_SAMPLE = 8192


def default_settings(store: Reader) -> KNNSettings:
    """Settings for a store that none were fitted for, from the spread of its first keys.

    The best temperature grows with the scale of the distances, which differs between models by
    orders of magnitude. Twice the keys' variance is the mean squared distance between two of
    them; a tenth of the variance is near the optimum in the domains of docs/benchmarks.md, T=1 far
    from it. Fitting on held-out text is better still.
    """
    sample = next(store.records(batch_size=_SAMPLE), None)
    variance = float(sample.keys.var(axis=0).sum()) if sample else 0.0
    if variance == 0:
        return KNNSettings(k=DEFAULT_K, lam=DEFAULT_LAMBDA)
    # d² = |q|² + |x|² - 2 q·x: an inner product moves half as far as a squared distance.
    scale = variance if store.identity.metric == Metric.L2 else variance / 2
    return KNNSettings(k=DEFAULT_K, temperature=_TEMPERATURE_SHARE * scale, lam=DEFAULT_LAMBDA)


def save_default_settings(store: KNNStore) -> None:
    """Save the default settings of a whole store, so that what is added later does not change them."""
    values = default_settings(store).to_dict()
    store.save_settings({name: value for name, value in values.items() if name != "selection"})


def saved_for(store: KNNStore, selection: Selection = EVERYTHING) -> dict[str, Any] | None:
    """What is saved for the domains selected, else for the whole store, if anything.

    Beside the values of `KNNSettings.to_dict` it may hold a record of `knnstore.lm.calibration`.
    """
    for domains in (selection.domains or (), ()):
        saved = {name: value for name, value in (store.settings(domains) or {}).items() if name != TRAINED}
        if saved:
            return saved
    return None


def settings_for(store: KNNStore, selection: Selection = EVERYTHING) -> KNNSettings:
    """The settings saved for the domains selected, else those of the whole store, else the default.

    A substitute is left out that may not be used for the selection, or that was trained on documents
    which are gone.

    Args:
        store: where they are saved.
        selection: becomes part of the settings.

    Raises:
        CorruptWeightsError: the file of a network that they need is missing or damaged.
        FingerprintMismatchError: it was fitted for other keys.
    """
    saved = saved_for(store, selection)
    if saved:
        saved.pop(CALIBRATION, None)
    if not saved:
        return replace(default_settings(store), selection=selection)
    try:
        settings = KNNSettings.from_dict(saved, weights_for(store))
    except CorruptWeightsError:  # or they were replaced between the two
        again = saved_for(store, selection) or {}
        again.pop(CALIBRATION, None)
        if again == saved:
            raise
        settings = KNNSettings.from_dict(again, weights_for(store))
    substitute = settings.substitute
    if substitute and (not substitute.traces.are_within(selection) or substitute.is_outdated(store)):
        works_alone = settings.retrieves or settings.cache is not None
        settings = replace(settings, substitute=None) if works_alone else default_settings(store)
    return replace(settings, selection=selection)


def usable_settings_for(store: KNNStore, selection: Selection = EVERYTHING) -> KNNSettings | None:
    """`settings_for`; None, with a warning, where a network that they need cannot be used."""
    try:
        return settings_for(store, selection)
    except (CorruptWeightsError, FingerprintMismatchError) as error:
        _logger.warning("the saved settings are not used: %s", error)
        return None


def weights_for(store: KNNStore, folder: Path | None = None) -> LoadWeights:
    """Read weights that saved settings name, and refuse what was not fitted for a store's keys.

    Args:
        store: which keys they are to be used with.
        folder: where they are; default is the store's home.

    Returns:
        A function of their name; it raises `CorruptWeightsError` when their file is missing or damaged,
        and `FingerprintMismatchError` when they are for another model, place in it, metric or dimension.
    """

    def load(name: str) -> Weights:
        found = store.load_weights(name) if folder is None else load_weights(folder, name)
        expected = described(store.identity)
        known = {key: found.metadata.get(key) for key in expected}
        if known != expected:
            raise FingerprintMismatchError(
                f"the weights {name} were fitted for {known}, the store's keys are {expected}: run "
                "knnstore calibrate again"
            )
        return found

    return load


TRAINED = "trained_substitute"
"""Under this name the settings saved for some domains hold the substitute that was trained on these."""


def trained_for(store: KNNStore, selection: Selection) -> Substitute | None:
    """The substitute that was trained on exactly the domains selected, or on the whole store, if any.

    None too where the selection is by more than domains, which no substitute can follow.
    """
    saved = (store.settings(selection.domains or ()) or {}).get(TRAINED)
    trained = Substitute.from_dict(saved["substitute"]) if saved else None
    return trained if trained is not None and trained.traces.are_within(selection) else None
