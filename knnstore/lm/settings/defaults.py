"""The settings in force: those saved for a selection, else those of the store, else derived from its keys."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from knnstore.datastore import Metric
from knnstore.errors import ConfigError, CorruptWeightsError, FingerprintMismatchError
from knnstore.lm.mixing import BinnedLambda, FixedLambda, Mixer
from knnstore.lm.settings.parts import NGramSettings
from knnstore.lm.settings.query import KNNSettings
from knnstore.lm.settings.saved import (
    save_settings,
    saved_for,
    settings_from_dict,
    substitute_of,
    weights_for,
)
from knnstore.store import EVERYTHING, KNNStore, Reader, Selection

DEFAULT_K = 1024
DEFAULT_PROBES = 16
"""In a store that has cells."""
DEFAULT_LAMBDA = 0.25
"""The published one; where it is not known what is near."""
DEFAULT_NGRAMS = NGramSettings(lam=0.25, by_length=(0.01, 0.06, 0.14, 0.26, 0.36, 0.42, 0.55))
"""In a store without keys."""
_NEAR = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_LAMBDAS = (0.9, 0.83, 0.7, 0.57, 0.4, 0.28, 0.12, 0.04, 0.005)
"""λ by how far the nearest record is, in variances of the keys: text like the stored finds one within 0.3 to
0.8, other text beyond 0.6 or 1.2. Both fit weak and strong models, text like the stored and other text: see
"Before and after calibration" in docs/benchmarks.md."""

_logger = logging.getLogger(__name__)

_TEMPERATURE_SHARE = 0.1
_SAMPLE = 8192


def default_settings(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings:
    """Settings for a store that none were fitted for, from the spread of the first keys selected.

    The best temperature grows with the scale of the distances, which differs between models by
    orders of magnitude. Twice the keys' variance is the mean squared distance between two of
    them; a tenth of the variance is near the optimum in the domains of docs/benchmarks.md, T=1 far
    from it. λ falls with the distance in the same unit, so that text unlike the stored loses next to nothing.
    Fitting on held-out text is better still. A store without keys has its n-grams.
    """
    if store.is_keyless:
        return KNNSettings(k=1, lam=0.0, ngrams=DEFAULT_NGRAMS)
    sample = next(store.records(selection, batch_size=_SAMPLE), None)
    variance = float(sample.keys.var(axis=0).sum()) if sample else 0.0
    probes = DEFAULT_PROBES if store.has_cells else None
    if variance == 0:
        return KNNSettings(k=DEFAULT_K, lam=DEFAULT_LAMBDA, probes=probes)
    # d² = |q|² + |x|² - 2 q·x: an inner product moves half as far as a squared distance.
    scale = variance if store.identity.metric == Metric.L2 else variance / 2
    temperature = _TEMPERATURE_SHARE * scale
    mixer: Mixer = FixedLambda(DEFAULT_LAMBDA)
    if store.identity.metric == Metric.L2:  # a product does not tell what is near
        mixer = BinnedLambda(tuple(near * variance for near in _NEAR), _LAMBDAS)
    return KNNSettings(k=DEFAULT_K, temperature=temperature, mixer=mixer, probes=probes)


def keep_defaults(store: KNNStore) -> bool:
    """Save the default settings of the documents there, so that later ones do not change them.

    Returns:
        Whether they were; not where any are saved.
    """
    saved = store.settings()
    if saved is not None and saved.query:
        return False
    save_settings(store, default_settings(store), derived=store.lineage())
    return True


def settings_for(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings:
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
    if saved is None:
        return replace(default_settings(store), selection=selection)
    try:
        settings = _whole(saved.query, store)
    except CorruptWeightsError:  # or they were replaced between the two
        again = saved_for(store, selection)
        if again is None or again.query == saved.query:
            raise
        settings = _whole(again.query, store)
    substitute = settings.substitute
    if substitute and (not substitute.traces.are_within(selection) or substitute.is_outdated(store)):
        alone = replace(settings, substitute=None)
        settings = default_settings(store) if alone.is_model_alone else alone
    return replace(settings, selection=selection)


def _whole(values: Mapping[str, Any], store: Reader) -> KNNSettings:
    """Saved settings; what they do not name, an earlier version did not have."""
    return replace(settings_from_dict(values, weights_for(store)), unset=frozenset())


def own_settings_for(store: Reader, selection: Selection) -> KNNSettings:
    """The settings saved for exactly the domains selected, else those derived from their keys alone.

    Nothing that is known of other documents goes into them; the arguments are those of `settings_for`.
    """
    saved = store.settings(selection.domains or ())
    if saved is not None and saved.query:
        return settings_for(store, selection)
    domains = Selection(domains=selection.domains)
    return replace(default_settings(store, domains), selection=selection)


def overridden(
    settings: KNNSettings,
    *,
    k: int | None = None,
    probes: int | None = None,
    temperature: float | None = None,
    lam: float | None = None,
) -> KNNSettings:
    """Put what was given in place of what is saved; None is not given, and 0 probes are none.

    A λ that was given is the only one in force, and everywhere: cache, n-grams, gate, substitute and what
    saves searches go. Whatever is given about keys, they count in writing too.

    Raises:
        ConfigError: a value is out of range, or k is given with probes.
    """
    if probes and k is not None:
        raise ConfigError("give k or probes, not both: of the cells visited all records count")
    given: dict[str, Any] = {"k": k, "temperature": temperature, "lam": lam}
    given = {name: value for name, value in given.items() if value is not None}
    if given or probes:
        given["scoring_only"] = tuple(name for name in settings.scoring_only if name != "keys")
    if lam is not None:
        given |= {"skip": None, "substitute": None, "cache": None, "ngrams": None, "gate": None, "others": {}}
    if probes is not None or k is not None:
        given["probes"] = probes or None
    return replace(settings, **given)


def usable_settings_for(store: Reader, selection: Selection = EVERYTHING) -> KNNSettings | None:
    """`settings_for`; None, with a warning, where a network that they need cannot be used."""
    try:
        return settings_for(store, selection)
    except (CorruptWeightsError, FingerprintMismatchError) as error:
        _logger.warning("the saved settings are not used: %s", error)
        return None


def is_substitute_outdated(store: Reader, selection: Selection = EVERYTHING) -> bool:
    """Whether the settings saved for a selection name a substitute that is used no more."""
    saved = saved_for(store, selection)
    named = saved.query.get("substitute") if saved else None
    return named is not None and substitute_of(named).is_outdated(store)
