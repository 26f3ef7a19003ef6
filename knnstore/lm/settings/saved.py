"""What is saved of settings: each payload with its type, to and from values for JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.keys import described
from knnstore.lm.mixing import JointGate, Skipping, is_registered, mixer_of
from knnstore.lm.settings.parts import CacheSettings, NGramSettings, PointerSettings, Substitute
from knnstore.lm.settings.query import KNNSettings
from knnstore.lm.settings.repetition import Repetition
from knnstore.store import (
    EVERYTHING,
    KNNStore,
    Lineage,
    Reader,
    SavedSettings,
    Selection,
    Weights,
    load_weights,
)

STALE_GROWTH = 1.25
"""Settings are stale when the records retrieved from have grown or shrunk by more than this factor."""
STALE_GONE = 0.2
"""And when more than this share of the documents was removed or replaced."""

LoadWeights = Callable[[str], Weights]
"""Reads the weights that settings name."""

T = TypeVar("T")


def settings_to_dict(settings: KNNSettings) -> dict[str, Any]:
    """The settings as values for JSON; weights are named by their files.

    Raises:
        ConfigError: the mixer is not registered; see `register_mixer`.
    """
    mixer: Any = settings.mixer
    if not is_registered(mixer):
        raise ConfigError(
            f"settings with the mixer {mixer.name!r} cannot be saved: call knnstore.lm.register_mixer first"
        )
    values = {
        name: value for name, value in _values(settings).items() if name not in (*settings.unset, "unset")
    }
    if not values.get("others"):
        values.pop("others", None)
    if "mixer" in values:
        values["mixer"] = {"name": mixer.name, **values["mixer"]}
    return values


def settings_from_dict(values: Mapping[str, Any], load: LoadWeights | None = None) -> KNNSettings:
    """Make settings from what `settings_to_dict` returned; what is absent is unset.

    ``lambda`` is short for a fixed mixer.

    Args:
        values: the settings as values.
        load: reads the weights that they name, see `weights_for`; needed by a gate.

    Raises:
        ConfigError: a name is unknown or a value is out of range.
    """
    makers: dict[str, Callable[[Any], Any]] = {
        "mixer": lambda part: mixer_of(_loaded(part, load)),
        "selection": _selection_of,
        "cache": lambda part: part and _made(CacheSettings, part),
        "ngrams": lambda part: part and _made(NGramSettings, part),
        "gate": lambda part: part and _made(JointGate, _loaded(part, load)),
        "skip": lambda part: part and _made(Skipping, _loaded(part, load)),
        "pointers": lambda part: part and _made(PointerSettings, part),
        "substitute": lambda part: part and substitute_of(part),
    }
    known = [*(field.name for field in fields(KNNSettings) if field.name != "unset"), "lambda"]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
    given = {name: makers[name](value) if name in makers else value for name, value in values.items()}
    return KNNSettings(**{"lam" if name == "lambda" else name: value for name, value in given.items()})


def save_settings(
    store: KNNStore,
    settings: KNNSettings,
    domains: Sequence[str] = (),
    calibration: "CalibrationRecord | None" = None,
    derived: Lineage | None = None,
) -> None:
    """Save settings, which are in force from then on where exactly these domains are selected.

    Args:
        store: opened for writing.
        settings: but for their selection.
        domains: none is the whole store, and every selection for which nothing is saved.
        calibration: how they were found.
        derived: from whose keys they were computed; once one of these is removed, they go.

    Raises:
        ConfigError: the mixer is not registered; see `register_mixer`.
        ReadOnlyError: the store was opened for reading.
    """
    values = settings_to_dict(settings)
    del values["selection"]
    for weights in weights_of(settings):
        store.save_weights(weights.tensors, weights.metadata)
    before = store.settings(domains) or SavedSettings()
    found = None if calibration is None else asdict(calibration)
    origin = None if derived is None else asdict(derived)
    store.save_settings(replace(before, query=values, calibration=found, derived=origin), domains)


def weights_of(settings: KNNSettings) -> list[Weights]:
    """What `settings_to_dict` only names: to be saved before its values are."""
    parts = (getattr(part, "weights", None) for part in (settings.mixer, settings.gate, settings.skip))
    return [part for part in parts if isinstance(part, Weights)]


def weights_for(store: Reader, folder: Path | None = None) -> LoadWeights:
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


def saved_for(store: Reader, selection: Selection = EVERYTHING) -> SavedSettings | None:
    """What is saved for the domains selected, else for the whole store, where that has settings at all."""
    for domains in (selection.domains or (), ()):
        saved = store.settings(domains)
        if saved is not None and saved.query:
            return saved
    return None


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
    skipped: float = 0.0
    """Share of searches that they leave out of the held-out text."""
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
        """The record of the settings that `settings_for` returns; None when they were not calibrated."""
        saved = saved_for(store, selection)
        if saved is None or saved.calibration is None:
            return None
        values = dict(saved.calibration)
        stored = Lineage.from_dict(values["stored"]) if values.get("stored") else None
        several = {name: tuple(values.get(name, ())) for name in ("domains", "held_out")}
        written = tuple(Repetition(**one) for one in values.get("written", ()))
        return cls(**{**values, **several, "stored": stored, "written": written})

    def growth(self, store: Reader) -> float:
        """By which factor the records have become more since."""
        return records_of(store, self.domains) / self.records

    def gone(self, store: Reader) -> float:
        """The share of the documents that were removed or replaced since."""
        return store.gone(self.stored) if self.stored else 0.0

    def is_stale(self, store: Reader) -> bool:
        """Whether the store has changed so much that other settings will be better."""
        grown = not 1 / STALE_GROWTH <= self.growth(store) <= STALE_GROWTH
        return grown or self.gone(store) > STALE_GONE


@dataclass(frozen=True, slots=True)
class TrainedSubstitute:
    """A substitute and how it was made."""

    substitute: Substitute
    rows: int
    """Of each token."""
    tokens: int
    """How many tokens of the vocabulary have rows: all that the documents hold."""
    records: int
    """Trained on."""
    epochs: int
    """Until the loss of the held-out documents was lowest."""
    held_out_tokens: int
    """In the documents of the store that were kept from training."""
    held_out_base_ppl: float
    """Of the model alone on these."""
    held_out_ppl: float
    """Of model and substitute together."""
    date: str
    """ISO 8601, UTC."""
    seconds: float


def trained_for(store: Reader, selection: Selection) -> Substitute | None:
    """The substitute that was trained on exactly the domains selected, or on the whole store, if any.

    None too where the selection is by more than domains, which no substitute can follow.
    """
    saved = store.settings(selection.domains or ())
    if saved is None or saved.trained_substitute is None:
        return None
    trained = substitute_of(saved.trained_substitute["substitute"])
    return trained if trained.traces.are_within(selection) else None


def substitute_of(values: Mapping[str, Any]) -> Substitute:
    """Make a substitute from its values.

    Raises:
        ConfigError: something is missing or unknown.
    """
    try:
        return Substitute(**{**values, "traces": Lineage.from_dict(values["traces"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not the settings of a substitute: {error}") from error


def records_of(store: Reader, domains: Sequence[str]) -> int:
    """Records stored under these domains, or under all when none is named; tokens where no keys are kept."""
    chosen = [domain for domain in store.domains() if not domains or domain.name in domains]
    return sum(domain.tokens if store.is_keyless else domain.records for domain in chosen)


def _values(part: Any) -> Any:
    """Settings or a part of them as values: weights as the name of their file."""
    if isinstance(part, Weights):
        return part.name
    if not is_dataclass(part):
        return part
    return {field.name: _values(getattr(part, field.name)) for field in fields(part) if field.init}


def _loaded(values: Mapping[str, Any], load: LoadWeights | None) -> Mapping[str, Any]:
    """Undo `_values` for the weights that some values name."""
    if "weights" not in values:
        return values
    if load is None:
        raise ConfigError(
            f"these settings need {values['weights']} of a store: read them with its load_weights"
        )
    return {**values, "weights": load(values["weights"])}


def _made(part: Callable[..., T], values: Mapping[str, Any]) -> T:
    try:
        return part(**values)
    except TypeError as error:
        raise ConfigError(f"{part.__name__} has other settings: {error}") from error


def _selection_of(values: Mapping[str, Any]) -> Selection:
    known = {field.name for field in fields(Selection)}
    if not set(values) <= known:
        raise ConfigError(f"unknown part of a selection in {values}; known: {sorted(known)}")
    return Selection(**values)
