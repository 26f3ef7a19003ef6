"""`resolve` decides which settings are in force. Nothing else does.

The order of precedence, for each field of the settings:

1. The values that the caller sets: fields of `KNNSettings`, or values of `Overrides`. If the caller sets λ or
   a mixer, this is the only weight in force: cache, n-grams, gate and components of other packages are off
   unless the caller sets them too. If the caller sets a weight of the cache or of n-grams, the gate is off.
2. The settings that are saved for exactly the selected domains.
3. The settings that are saved for the whole store. With ``only_selected`` they are ignored, because they
   depend on other documents.
4. The derived default: n-grams in a store without keys; otherwise T and λ from the variance of the store's
   keys, with ``only_selected`` from the keys of the selected domains alone.

Then two rules switch components off:

5. A saved component is off if it was trained on documents outside the selection, or on documents that were
   removed. If no other component is saved, the derived default is used.
6. With `Purpose.GENERATION` the components that the settings use in scoring only are off, unless the caller
   sets a value of the component.

If a network of the saved settings is missing, damaged or fitted for other keys, an error is raised. If the
caller sets λ or a mixer, no network is needed, and the derived default replaces the saved settings instead.

This module also has `Resolver` (a cache of resolved settings), `find_saved_settings` (the record that steps
2 and 3 use), `save_default_settings` and `find_outdated_components`.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from knnstore.datastore import Metric
from knnstore.errors import ConfigError, CorruptWeightsError, FingerprintMismatchError
from knnstore.lm.components import CacheSettings, NGramSettings
from knnstore.lm.mixing import BinnedLambda, FixedLambda, Mixer
from knnstore.lm.settings.query import KNNSettings, find_traces
from knnstore.lm.settings.saved import (
    create_weights_loader,
    is_mixer_removed,
    save_settings,
    settings_from_dict,
)
from knnstore.store import EVERYTHING, KNNStore, Reader, SavedSettings, Selection

DEFAULT_PROBES = 16
"""Default number of cells (groups of records with near keys) that are searched for each query."""

_DEFAULT_K = 1024
_DEFAULT_LAMBDA = 0.25
"""The λ of Khandelwal et al. 2020, used with inner products, and if all keys are equal."""
DEFAULT_NGRAMS = NGramSettings(lam=0.25, by_length=(0.01, 0.06, 0.14, 0.26, 0.36, 0.42, 0.55))
"""Default of a store without keys."""
_DISTANCE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_LAMBDAS = (0.9, 0.83, 0.7, 0.57, 0.4, 0.28, 0.12, 0.04, 0.005)
"""λ in each bin of the distance to the nearest record; `_DISTANCE_EDGES` has the edges of the bins.

The unit of the edges is the variance of the keys. For text like the stored text, the nearest record is
typically within 0.3 to 0.8; for other text it is beyond 0.6 or 1.2. The bins suit weak and strong models, and
text like and unlike the stored text: see "Before and after calibration" in docs/benchmarks.md.
"""
_TEMPERATURE_SHARE = 0.1
_SAMPLE_RECORDS = 8192

_KEY_FIELDS = {"mixer", "k", "temperature"}
_ASKED_BY = {"cache": {"cache"}, "n-grams": {"ngrams"}, "keys": _KEY_FIELDS}
"""For each component, fields of `KNNSettings` that ask for it. If the caller sets one of the fields, the
component is used in generation, even if the saved settings use it in scoring only (rule 6)."""

_CACHED_SETTINGS = 64

_logger = logging.getLogger(__name__)


class Purpose(Enum):
    """The use that settings are resolved for: scoring or generation.

    Settings may use some components in scoring only; `KNNSettings.scoring_only` names them.
    """

    SCORING = "scoring"
    """The text is known: evaluation, scoring, explanation, forward passes."""
    GENERATION = "generation"
    """The model generates the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Single values that replace values of the settings in force, for commands and requests.

    `KNNSettings` replaces all settings of a component; `Overrides` can change one value: with
    ``cache_lam=0.3`` the saved cache keeps its size and temperature. None keeps the value in force.

    Raises:
        ConfigError: `k`, `probes`, `temperature` or `lam` is out of range, or k is given with probes.
    """

    selection: Selection = EVERYTHING
    """The stored documents to search."""
    k: int | None = None
    """Number of neighbors for each query."""
    probes: int | None = None
    """Number of cells (groups of records with near keys) that are searched for each query. 0 searches for
    the k nearest records, also in a store with cells."""
    temperature: float | None = None
    """T of the softmax over distances of the keys."""
    lam: float | None = None
    """Weight λ of the keys. All other components are then off, unless one of their values is set too."""
    cache_size: int | None = None
    """Number of preceding tokens that the continuous cache compares; 0 switches the cache off."""
    cache_temperature: float | None = None
    """T of the softmax over distances in the continuous cache."""
    cache_lam: float | None = None
    """Weight λ of the continuous cache."""
    ngram_order: int | None = None
    """Number of tokens of the longest n-grams; 0 switches n-grams off."""
    ngram_lam: float | None = None
    """Weight λ of the n-grams, one value for all contexts, in place of one λ for each length of match."""
    others: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """Settings of components of other packages, by name; None switches a component off."""

    def __post_init__(self) -> None:
        if self.probes and self.k is not None:
            raise ConfigError(
                "give k or probes, not both: with probes, every record of the searched cells is used"
            )
        probes = self.probes or None
        KNNSettings(**_select_given(k=self.k, probes=probes, temperature=self.temperature, lam=self.lam))


def resolve(
    store: Reader,
    asked: KNNSettings | Overrides | None = None,
    purpose: Purpose = Purpose.SCORING,
    *,
    only_selected: bool = False,
    default_if_unusable: bool = False,
) -> KNNSettings:
    """Fill in the settings of a call from the store, and return the settings in force, with no unset field.

    Values of the caller come first, then settings saved for the selected domains, then settings saved for the
    whole store, then a default that is derived from the store's keys. The module's docstring has the exact
    order. Settings without unset fields are returned without reading the store.

    Args:
        store: the store that has saved settings, and from whose keys the default is derived.
        asked: values that the caller sets. ``KNNSettings(selection=...)`` sets only a selection; None selects
            the whole store and sets nothing.
        purpose: scoring or generation.
        only_selected: True to ignore saved settings and keys that depend on documents outside the selected
            domains.
        default_if_unusable: True to log a warning and use the derived default, instead of raising an error,
            if a network of the saved settings cannot be used.

    Raises:
        CorruptWeightsError: the file of a network in the saved settings is missing or damaged.
        FingerprintMismatchError: a network in the saved settings was fitted for other keys.
        ConfigError: `asked` has another type, or its values are not valid together with the saved settings.
    """
    if asked is None:
        asked = KNNSettings()
    if not isinstance(asked, KNNSettings | Overrides):
        raise ConfigError(f"settings must be KNNSettings(...), not {type(asked).__name__}")
    if isinstance(asked, KNNSettings) and not asked.unset:
        return _restrict_to_purpose(asked, purpose)
    asks_for_weight = asked.lam is not None if isinstance(asked, Overrides) else "mixer" not in asked.unset
    stored = _load_saved_or_default(
        store, asked.selection, only_selected, default_if_unusable or asks_for_weight
    )
    if isinstance(asked, Overrides):
        settings = _override_values(stored, asked, is_keyless=store.is_keyless)
    else:
        settings = _fill_unset_fields(asked, stored)
    return _restrict_to_purpose(settings, purpose)


class Resolver:
    """Calls `resolve` for one store, and caches the results until the store's content changes.

    Calls with the same object `asked` get the same result object, so that rows of a batch with the same
    settings are searched together. Not safe for several threads.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._latest: OrderedDict[tuple[int, Purpose], tuple[int | None, KNNSettings, KNNSettings]]
        self._latest = OrderedDict()

    def __call__(self, asked: KNNSettings, purpose: Purpose) -> KNNSettings:
        """Return the settings in force for a call; the same object for the same object `asked`.

        Args:
            asked: the settings of the call; unset fields are filled in from the store.
            purpose: scoring or generation; some components are used in scoring only.
        """
        is_complete = isinstance(asked, KNNSettings) and not asked.unset
        if is_complete and (purpose is Purpose.SCORING or not asked.scoring_only):
            return asked
        key, revision = (id(asked), purpose), None if is_complete else self._store.revision()
        cached = self._latest.get(key)
        if cached is None or cached[:2] != (revision, asked):
            cached = self._latest[key] = revision, asked, resolve(self._store, asked, purpose)
            if len(self._latest) > _CACHED_SETTINGS:
                self._latest.popitem(last=False)
        return cached[2]


def find_saved_settings(
    store: Reader, selection: Selection = EVERYTHING, *, exact: bool = False
) -> SavedSettings | None:
    """Return the settings saved for exactly the selected domains, else the settings of the whole store.

    Saved settings are ignored if their mixer (the rule that chooses λ) does not exist any more.

    Args:
        store: the store.
        selection: the selection; only its domains matter.
        exact: True to ignore the settings of the whole store if domains are selected.

    Returns:
        The saved values; None if no settings are saved.
    """
    for domains in (selection.domains or (),) if exact else (selection.domains or (), ()):
        saved = store.settings(domains)
        if saved is not None and saved.query and not is_mixer_removed(saved.query):
            return saved
    return None


def save_default_settings(store: KNNStore) -> bool:
    """Save the derived default for the whole store, so that documents that are added later do not change it.

    Args:
        store: the store, opened for writing.

    Returns:
        True if the default was saved. False if settings are saved for the whole store already; then nothing
        is changed.
    """
    if find_saved_settings(store) is not None:
        return False
    save_settings(store, derive_default(store), derived=store.lineage())
    return True


def find_outdated_components(store: Reader, selection: Selection = EVERYTHING) -> tuple[str, ...]:
    """Return the names of saved components that are off, because their training documents were removed.

    Args:
        store: the store.
        selection: the selection whose saved settings are checked; only its domains matter.
    """
    saved = find_saved_settings(store, selection)
    components = saved.trained_components() if saved else {}
    return tuple(name for name, values in components.items() if is_outdated(store, values))


def is_outdated(store: Reader, component: Mapping[str, Any]) -> bool:
    """Check whether a document that a component was trained on was removed or replaced since.

    Args:
        store: the store.
        component: settings of the component. If they name no documents, the result is False.
    """
    lineage = find_traces(component)
    return lineage is not None and store.removed_share(lineage) > 0


def derive_default(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings:
    """Compute default settings from the variance of the keys of selected documents.

    The variance is computed from the first records. Twice the variance is the mean squared distance between
    two keys. The best temperature grows with the scale of the distances, which differs between models by
    orders of magnitude. In the domains of docs/benchmarks.md, a tenth of the variance is near the best
    temperature, and T=1 is far from it. The weight λ is small if the nearest record is many variances away,
    so that retrieval hardly hurts on text unlike the stored text. Calibration on held-out text gives better
    settings.

    Args:
        store: the store.
        selection: the documents whose keys are used.

    Returns:
        Settings whose selection is all documents. In a store without keys they use only n-grams.
    """
    if store.is_keyless:
        return KNNSettings(k=1, lam=0.0, ngrams=DEFAULT_NGRAMS)
    sample = next(store.records(selection, batch_size=_SAMPLE_RECORDS), None)
    variance = float(sample.keys.var(axis=0).sum()) if sample else 0.0
    probes = DEFAULT_PROBES if store.has_cells else None
    if variance == 0:
        return KNNSettings(k=_DEFAULT_K, lam=_DEFAULT_LAMBDA, probes=probes)
    # d² = |q|² + |x|² - 2 q·x: an inner product moves half as far as a squared distance.
    scale = variance if store.identity.metric == Metric.L2 else variance / 2
    temperature = _TEMPERATURE_SHARE * scale
    mixer: Mixer = FixedLambda(_DEFAULT_LAMBDA)
    if store.identity.metric == Metric.L2:  # an inner product does not say what is near
        mixer = BinnedLambda(tuple(near * variance for near in _DISTANCE_EDGES), _LAMBDAS)
    return KNNSettings(k=_DEFAULT_K, temperature=temperature, mixer=mixer, probes=probes)


def override_keys(settings: KNNSettings, asked: Overrides) -> KNNSettings:
    """Return a copy of settings with the k, number of searched cells, T and weight λ that `asked` sets.

    If `asked` sets λ, all components other than the keys are switched off.

    Args:
        settings: settings without unset fields.
        asked: the values that the caller sets; values that are None change nothing.
    """
    values = _select_given(k=asked.k, temperature=asked.temperature, lam=asked.lam)
    if values or asked.probes:
        values["scoring_only"] = tuple(name for name in settings.scoring_only if name != "keys")
    if asked.lam is not None:
        values |= dict.fromkeys(("cache", "ngrams", "gate")) | {"others": {}}
    if asked.probes is not None or asked.k is not None:
        values["probes"] = asked.probes or None
    return replace(settings, **values)


def _load_saved_or_default(
    store: Reader, selection: Selection, only_selected: bool, default_if_unusable: bool
) -> KNNSettings:
    """Return the store's settings for a selection, saved or default.

    The settings saved for exactly the selected domains come first, then the settings saved for the whole
    store, then the derived default. Components that were trained on documents outside the selection, or on
    removed documents, are left out.

    Args:
        store: the store.
        selection: the selection of the result.
        only_selected: True to ignore saved settings and keys that depend on documents outside the selected
            domains.
        default_if_unusable: True to log a warning and use the default, instead of raising an error, if a
            network of the saved settings cannot be used.
    """

    def derive_settings() -> KNNSettings:
        """Derive the default from the keys that the settings may depend on."""
        return derive_default(store, Selection(domains=selection.domains) if only_selected else EVERYTHING)

    # Steps 2 and 3: what is saved.
    try:
        settings = _load_saved(store, selection, exact=only_selected)
    except (CorruptWeightsError, FingerprintMismatchError) as error:
        if not default_if_unusable:
            raise
        _logger.warning("the saved settings are not used: %s", error)
        settings = None
    # Step 4: the default.
    if settings is None:
        return replace(derive_settings(), selection=selection)
    # Step 5: leave out components that were trained on other documents, or on removed ones.
    lineages = {name: find_traces(values) for name, values in settings.others.items()}
    left_out = [
        name
        for name, lineage in lineages.items()
        if lineage is not None
        and not (lineage.is_within_selection(selection) and store.removed_share(lineage) == 0)
    ]
    if left_out:
        settings = settings.without_components(*left_out)
        if settings.is_model_alone:
            settings = derive_settings()
    return replace(settings, selection=selection)


def _load_saved(store: Reader, selection: Selection, *, exact: bool) -> KNNSettings | None:
    """Load the saved settings of a selection with their networks; return None if no settings are saved.

    Another process may replace the settings and remove their network while they are loaded. Then the new
    settings are loaded.

    Args:
        store: the store.
        selection: the selection; only its domains matter.
        exact: True to ignore the settings of the whole store if domains are selected.

    Raises:
        CorruptWeightsError: the file of a network is missing or damaged.
        FingerprintMismatchError: a network was fitted for other keys.
    """
    saved = find_saved_settings(store, selection, exact=exact)
    if saved is None:
        return None
    try:
        settings = settings_from_dict(saved.query, create_weights_loader(store))
    except CorruptWeightsError:
        again = find_saved_settings(store, selection, exact=exact)
        if again is None or again.query == saved.query:
            raise
        settings = settings_from_dict(again.query, create_weights_loader(store))
    return replace(settings, unset=frozenset())  # an earlier version did not have the absent fields


def _fill_unset_fields(asked: KNNSettings, stored: KNNSettings) -> KNNSettings:
    """Return a copy of `asked` in which each unset field has the value of `stored`.

    A component that the caller sets is used in generation, even if `stored` names it in `scoring_only`.

    Args:
        asked: the settings of the caller.
        stored: the store's settings, without unset fields.
    """
    values = {name: getattr(stored, name) for name in asked.unset}
    if "scoring_only" in values:
        values["scoring_only"] = tuple(
            name for name in stored.scoring_only if _ASKED_BY.get(name, {"others"}) <= asked.unset
        )
    return replace(asked, **values, unset=frozenset())


def _override_values(stored: KNNSettings, asked: Overrides, *, is_keyless: bool) -> KNNSettings:
    """Return a copy of the store's settings with the values that `asked` sets.

    A cache of size 0 is removed, and so are n-grams of order 0. A λ of the cache or of n-grams removes the
    gate, which would choose another λ.

    Args:
        stored: the store's settings.
        asked: the values that the caller sets; None keeps a value.
        is_keyless: True if the store has no keys.

    Raises:
        ConfigError: a value is out of range, or the temperature of the cache is unknown. It is known if
            `asked` sets it, if the store has a saved cache, or if the store has keys.
    """
    settings = override_keys(stored, asked)
    cache, ngrams = settings.cache, settings.ngrams
    # The saved cache and n-grams are changed even if a λ of the keys has switched them off.
    values = _select_given(size=asked.cache_size, temperature=asked.cache_temperature, lam=asked.cache_lam)
    if asked.cache_size == 0:
        cache = None
    elif values:
        if asked.cache_size and stored.cache is None and asked.cache_temperature is None and is_keyless:
            raise ConfigError(
                "the store keeps no keys, so the temperature of the cache is unknown: give one "
                "(--cache-temperature), or run knnstore calibrate"
            )
        cache = replace(stored.cache or CacheSettings(temperature=settings.temperature), **values)
    values = _select_given(order=asked.ngram_order, lam=asked.ngram_lam)
    if asked.ngram_order == 0:
        ngrams = None
    elif values:
        if asked.ngram_lam is not None:
            values["by_length"] = None
        ngrams = replace(stored.ngrams or NGramSettings(), **values)
    others = {**settings.others, **asked.others}
    is_asked_for = {"cache": cache is not settings.cache, "n-grams": ngrams is not settings.ngrams}
    has_weight_of_text = asked.cache_lam is not None or asked.ngram_lam is not None
    return replace(
        settings,
        cache=cache,
        ngrams=ngrams,
        others={name: values for name, values in others.items() if values is not None},
        gate=None if has_weight_of_text else settings.gate,
        scoring_only=tuple(name for name in settings.scoring_only if not is_asked_for.get(name)),
    )


def _restrict_to_purpose(settings: KNNSettings, purpose: Purpose) -> KNNSettings:
    """Return settings for a purpose: for generation, without the components in ``scoring_only``.

    For scoring, the same object is returned.

    Args:
        settings: settings without unset fields.
        purpose: scoring or generation.
    """
    return settings.without_components(*settings.scoring_only) if purpose is Purpose.GENERATION else settings


def _select_given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}
