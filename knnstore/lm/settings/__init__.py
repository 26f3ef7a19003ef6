"""What a query is made with: values, and how they are saved."""

from knnstore.lm.settings.completing import Completing, completed
from knnstore.lm.settings.defaults import (
    DEFAULT_PROBES,
    default_settings,
    is_substitute_outdated,
    keep_defaults,
    overridden,
    own_settings_for,
    settings_for,
    usable_settings_for,
)
from knnstore.lm.settings.model import KNNModel, ReadingModel, ReadingParts, WritingModel
from knnstore.lm.settings.others import other_components, register_component
from knnstore.lm.settings.parts import CacheSettings, NGramSettings, PointerSettings, Substitute
from knnstore.lm.settings.query import KNNSettings
from knnstore.lm.settings.repetition import Repetition
from knnstore.lm.settings.saved import (
    CalibrationRecord,
    TrainedSubstitute,
    records_of,
    save_settings,
    saved_for,
    settings_from_dict,
    settings_to_dict,
    trained_for,
    weights_for,
    weights_of,
)

__all__ = [
    "DEFAULT_PROBES",
    "CacheSettings",
    "CalibrationRecord",
    "Completing",
    "KNNModel",
    "KNNSettings",
    "NGramSettings",
    "PointerSettings",
    "ReadingModel",
    "ReadingParts",
    "Repetition",
    "Substitute",
    "TrainedSubstitute",
    "WritingModel",
    "completed",
    "default_settings",
    "is_substitute_outdated",
    "keep_defaults",
    "other_components",
    "overridden",
    "own_settings_for",
    "records_of",
    "register_component",
    "save_settings",
    "saved_for",
    "settings_for",
    "settings_from_dict",
    "settings_to_dict",
    "trained_for",
    "usable_settings_for",
    "weights_for",
    "weights_of",
]
