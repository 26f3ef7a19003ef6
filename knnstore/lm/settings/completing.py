"""Settings that leave something open, completed by what a store has."""

from collections import OrderedDict
from dataclasses import replace

from knnstore.errors import ConfigError
from knnstore.lm.settings.defaults import default_settings, settings_for, usable_settings_for
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import Reader

_KEPT = 64
_GIVEN_BY = {
    "cache": {"cache"},
    "n-grams": {"ngrams"},
    "keys": {"mixer", "k", "temperature"},
    "substitute": {"substitute"},
}
"""What counts in scoring only in the store counts in writing too where one of these is given."""


def completed(store: Reader, settings: KNNSettings) -> KNNSettings:
    """Settings in which what was unset is what the store has for their selection; see `settings_for`.

    Raises:
        CorruptWeightsError, FingerprintMismatchError: a network that they need cannot be used.
        ConfigError: what was given is of another type, or does not go with what is saved.
    """
    if not isinstance(settings, KNNSettings):
        raise ConfigError(f"settings are KNNSettings(...), not {type(settings).__name__}")
    if not settings.unset:
        return settings
    if "mixer" in settings.unset:
        saved = settings_for(store, settings.selection)
    else:  # a network that is missing is not needed
        saved = usable_settings_for(store, settings.selection) or default_settings(store)
    taken = {name: getattr(saved, name) for name in settings.unset}
    if "scoring_only" in taken:
        taken["scoring_only"] = tuple(
            name for name in saved.scoring_only if _GIVEN_BY.get(name, {"others"}) <= settings.unset
        )
    return replace(settings, **taken, unset=frozenset())


class Completing:
    """Completes settings of a store, and remembers the latest: the same object while nothing has changed."""

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._latest: OrderedDict[int, tuple[int, KNNSettings, KNNSettings]] = OrderedDict()

    def __call__(self, settings: KNNSettings) -> KNNSettings:
        """See `completed`."""
        if isinstance(settings, KNNSettings) and not settings.unset:
            return settings
        revision = self._store.revision()
        known = self._latest.get(id(settings))
        if known is None or known[:2] != (revision, settings):
            known = self._latest[id(settings)] = revision, settings, completed(self._store, settings)
            if len(self._latest) > _KEPT:
                self._latest.popitem(last=False)
        return known[2]
