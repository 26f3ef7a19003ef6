"""How saved settings and trained substitutes were found, as it is kept beside them in the store."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from knnstore.lm.settings.parts import Substitute
from knnstore.lm.settings.precedence import find_saved_settings
from knnstore.lm.settings.repetition import Repetition
from knnstore.lm.settings.saved import substitute_of
from knnstore.store import EVERYTHING, Lineage, Reader, Selection

STALE_GROWTH = 1.25
"""Settings are stale if the number of records retrieved from has changed by more than this factor."""
STALE_GONE = 0.2
"""Settings are stale if more than this share of the documents was removed or replaced."""


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """How saved settings were found."""

    date: str
    """ISO 8601, UTC."""
    mixer: str
    """Name of the candidate."""
    documents: int
    tokens: int
    """Of the held-out text."""
    text_hash: str
    """SHA-256 over `held_out`, in order."""
    revision: int
    """Of the store."""
    records: int
    """How many were retrieved from, when they were found or last compared with others."""
    base_ppl: float
    knn_ppl: float
    """Expected: of documents that were neither fitted on nor chosen by; see `Comparison.expected`."""
    domains: tuple[str, ...]
    """What the settings were found for; none is the whole store."""
    stored: Lineage | None = None
    """The documents that were retrieved from; None in records of earlier versions."""
    held_out: tuple[str, ...] = ()
    """Content hashes of the documents, and of stored ones that have their text: once one of these is
    removed, the settings go."""
    written: tuple[Repetition, ...] = ()
    """How much continuations of the held-out text repeat themselves: by it `KNNSettings.scoring_only` was
    chosen. Empty where nothing was measured."""

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


@dataclass(frozen=True, slots=True)
class TrainedSubstitute:
    """A substitute and how it was made."""

    substitute: Substitute
    rows: int
    """Rows of each token."""
    tokens: int
    """How many tokens of the vocabulary have rows: all that the documents hold."""
    records: int
    """Records that it was trained on."""
    epochs: int
    """Epochs until the loss of the held-out documents was lowest."""
    held_out_tokens: int
    """Tokens in the documents of the store that were kept from training."""
    held_out_base_ppl: float
    """Perplexity of the model alone on these documents."""
    held_out_ppl: float
    """Perplexity of model and substitute together."""
    date: str
    """ISO 8601, UTC."""
    seconds: float


def find_trained_substitute(store: Reader, selection: Selection) -> Substitute | None:
    """Return the substitute that was trained on exactly the selected domains, whether it is in use or not.

    Without domains in the selection it is that of the whole store. None if there is none, or if the selection
    is by more than domains, which no substitute can follow.
    """
    saved = store.settings(selection.domains or ())
    if saved is None or saved.trained_substitute is None:
        return None
    trained = substitute_of(saved.trained_substitute["substitute"])
    return trained if trained.traces.are_within(selection) else None


def count_records(store: Reader, domains: Sequence[str]) -> int:
    """Count the records of some domains, or of all if none is named; in a store without keys, the tokens."""
    chosen = [domain for domain in store.domains() if not domains or domain.name in domains]
    return sum(domain.tokens if store.is_keyless else domain.records for domain in chosen)
