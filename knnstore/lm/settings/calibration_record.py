"""The record of how saved settings were found, and the components that were trained for a selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from knnstore.lm.settings.precedence import find_saved_settings
from knnstore.lm.settings.query import find_traces
from knnstore.store import EVERYTHING, Lineage, Reader, Selection

STALE_GROWTH = 1.25
"""Settings are stale if the number of searched records has changed by more than this factor."""
STALE_GONE = 0.2
"""Settings are stale if more than this share of the documents was removed or replaced."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Measured repetition of generated continuations; each figure is a mean over the continuations."""

    of: str
    """Source of the continuations: "text" (the documents), "model" (the model alone), "all" (all components
    of the settings), or "all but ..."."""
    distinct_bigrams: float
    """Number of different bigrams of a continuation, divided by the number of its bigrams."""
    repeated_4grams: float
    """Share of a continuation's 4-grams that occur earlier in it."""
    continuations: int
    """Number of continuations."""


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A record of the calibration that found saved settings; it is saved together with the settings."""

    date: str
    """Date and time of the calibration, ISO 8601, UTC."""
    mixer: str
    """Name of the chosen candidate, for example ``bins 8 + n-grams``."""
    documents: int
    """Number of documents of the held-out text."""
    tokens: int
    """Number of tokens of the held-out text."""
    text_hash: str
    """SHA-256 over `held_out`, in order."""
    revision: int
    """Revision of the store at the calibration."""
    records: int
    """Number of records that were searched when the settings were found or last compared."""
    base_ppl: float
    """Perplexity of the model alone on the held-out text."""
    knn_ppl: float
    """Expected perplexity on documents that were used neither to fit nor to choose the settings."""
    domains: tuple[str, ...]
    """Domains that the settings were found for; empty for the whole store."""
    stored: Lineage | None = None
    """The documents that were searched; None in records of earlier versions."""
    held_out: tuple[str, ...] = ()
    """Content hashes of the held-out documents, and of stored documents with the same text. The settings are
    deleted when one of these is removed."""
    written: tuple[Repetition, ...] = ()
    """Measured repetition of continuations of the held-out text, by which `KNNSettings.scoring_only` was
    chosen. Empty if nothing was measured."""

    @classmethod
    def for_selection(cls, store: Reader, selection: Selection = EVERYTHING) -> Self | None:
        """Return the record of the saved settings that `resolve` uses for a selection.

        None if no settings are saved, or if the saved settings were not calibrated.
        """
        saved = find_saved_settings(store, selection)
        if saved is None or saved.calibration is None:
            return None
        known = {field.name for field in fields(cls)}  # an earlier version may have saved more fields
        values = {name: value for name, value in saved.calibration.items() if name in known}
        stored = Lineage.from_dict(values["stored"]) if values.get("stored") else None
        several = {name: tuple(values.get(name, ())) for name in ("domains", "held_out")}
        written = tuple(Repetition(**repetition) for repetition in values.get("written", ()))
        return cls(**{**values, **several, "stored": stored, "written": written})

    def record_growth(self, store: Reader) -> float:
        """Return the number of records in the searched domains now, divided by the number at calibration."""
        return count_records(store, self.domains) / self.records

    def removed_share(self, store: Reader) -> float:
        """Return the fraction of the searched documents that were removed or replaced since the calibration.

        0.0 if the searched documents are not known.
        """
        return store.removed_share(self.stored) if self.stored else 0.0

    def is_stale(self, store: Reader) -> bool:
        """Check whether the store has changed so much that calibrating again is advisable.

        True if the number of records changed by more than `STALE_GROWTH`, or if more than `STALE_GONE` of the
        documents were removed or replaced.
        """
        grown = not 1 / STALE_GROWTH <= self.record_growth(store) <= STALE_GROWTH
        return grown or self.removed_share(store) > STALE_GONE


def find_trained_settings(store: Reader, selection: Selection, component: str) -> Mapping[str, Any] | None:
    """Return the settings of a component that was trained on exactly the selected domains.

    A component is one kind of memory whose predictions are mixed with the model's; it need not be in use. If
    the selection has no domains, the component must have been trained on the whole store.

    Args:
        store: the store.
        selection: the selection.
        component: name of the component.

    Returns:
        The settings. None if the component was not trained on these domains, or if the selection has other
        conditions than domains, because a trained component cannot leave out single documents.
    """
    saved = store.settings(selection.domains or ())
    if saved is None or component not in saved.trained:
        return None
    settings: Mapping[str, Any] = saved.trained[component][component]
    lineage = find_traces(settings)
    return settings if lineage is None or lineage.is_within_selection(selection) else None


def count_records(store: Reader, domains: Sequence[str]) -> int:
    """Return the number of records in some domains; in a store without keys the number of tokens.

    Args:
        store: the store.
        domains: names of domains; empty for all domains. Unknown names count 0.
    """
    chosen = [domain for domain in store.domains() if not domains or domain.name in domains]
    return sum(domain.tokens if store.is_keyless else domain.records for domain in chosen)
