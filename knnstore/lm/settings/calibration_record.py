"""The record of how saved settings were found, and the components that were trained for a selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from knnstore.lm.settings.precedence import find_saved_settings
from knnstore.lm.settings.query import find_traces
from knnstore.lm.settings.repetition import Repetition
from knnstore.store import EVERYTHING, Lineage, Reader, Selection

STALE_GROWTH = 1.25
"""Settings are stale if the number of records retrieved from has changed by more than this factor."""
STALE_GONE = 0.2
"""Settings are stale if more than this share of the documents was removed or replaced."""


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A record of the calibration that found the saved settings."""

    date: str
    """ISO 8601, UTC."""
    mixer: str
    """Name of the candidate."""
    documents: int
    tokens: int
    """Number of tokens of the held-out text; `documents` is the number of its documents."""
    text_hash: str
    """SHA-256 over `held_out`, in order."""
    revision: int
    """Revision of the store at the calibration."""
    records: int
    """Number of records that were retrieved from, when the settings were found or last compared."""
    base_ppl: float
    knn_ppl: float
    """Expected perplexity, of documents that were used neither to fit nor to choose; see
    `Comparison.expected`. `base_ppl` is that of the model alone."""
    domains: tuple[str, ...]
    """Domains that the settings were found for; empty for the whole store."""
    stored: Lineage | None = None
    """The documents that were retrieved from; None in records of earlier versions."""
    held_out: tuple[str, ...] = ()
    """Content hashes of the held-out documents, and of stored documents with the same text. The settings are
    deleted when one of these is removed."""
    written: tuple[Repetition, ...] = ()
    """Measured repetition of continuations of the held-out text, by which `KNNSettings.scoring_only` was
    chosen. Empty if nothing was measured."""

    @classmethod
    def of(cls, store: Reader, selection: Selection = EVERYTHING) -> Self | None:
        """Return the record of the saved settings that `resolve` uses; None if they were not calibrated."""
        saved = find_saved_settings(store, selection)
        if saved is None or saved.calibration is None:
            return None
        known = {one.name for one in fields(cls)}  # an earlier version may have kept more
        values = {name: value for name, value in saved.calibration.items() if name in known}
        stored = Lineage.from_dict(values["stored"]) if values.get("stored") else None
        several = {name: tuple(values.get(name, ())) for name in ("domains", "held_out")}
        written = tuple(Repetition(**one) for one in values.get("written", ()))
        return cls(**{**values, **several, "stored": stored, "written": written})

    def growth(self, store: Reader) -> float:
        """Return the number of records now, divided by the number at calibration."""
        return count_records(store, self.domains) / self.records

    def gone(self, store: Reader) -> float:
        """Return the share of the documents that were removed or replaced since."""
        return store.gone(self.stored) if self.stored else 0.0

    def is_stale(self, store: Reader) -> bool:
        """Check whether the store has changed so much that other settings will be better."""
        grown = not 1 / STALE_GROWTH <= self.growth(store) <= STALE_GROWTH
        return grown or self.gone(store) > STALE_GONE


def find_trained_settings(store: Reader, selection: Selection, component: str) -> Mapping[str, Any] | None:
    """Return the settings of a component that was trained on exactly the selected domains, in use or not.

    Without domains in the selection they are those of the whole store. See `SavedSettings.trained`.

    Returns:
        None if it was not trained on these domains, or if the selection is by more than domains: a component
        that was trained cannot leave out single documents.
    """
    saved = store.settings(selection.domains or ())
    if saved is None or component not in saved.trained:
        return None
    settings: Mapping[str, Any] = saved.trained[component][component]
    lineage = find_traces(settings)
    return settings if lineage is None or lineage.are_within(selection) else None


def count_records(store: Reader, domains: Sequence[str]) -> int:
    """Count the records of domains, of all if none is named; in a store without keys, count the tokens."""
    chosen = [domain for domain in store.domains() if not domains or domain.name in domains]
    return sum(domain.tokens if store.is_keyless else domain.records for domain in chosen)
