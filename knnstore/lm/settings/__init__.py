"""Settings: their values, which of them are in force (`resolve`), and how they are saved."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.lm.settings.calibration_record import (
        CalibrationRecord,
        Repetition,
        count_records,
        find_trained_settings,
    )
    from knnstore.lm.settings.former_names import (
        completed,
        default_settings,
        overridden,
        own_settings_for,
        saved_for,
        settings_for,
        usable_settings_for,
    )
    from knnstore.lm.settings.model import GeneratingModel, KNNModel, ReadingModel, ReadingParts
    from knnstore.lm.settings.precedence import (
        DEFAULT_NGRAMS,
        DEFAULT_PROBES,
        Overrides,
        Purpose,
        Resolver,
        derive_default,
        find_outdated_components,
        find_saved_settings,
        is_outdated,
        resolve,
        save_default_settings,
    )
    from knnstore.lm.settings.query import KNNSettings, find_traces
    from knnstore.lm.settings.saved import (
        collect_weights,
        create_weights_loader,
        save_settings,
        settings_from_dict,
        settings_to_dict,
    )
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "DEFAULT_NGRAMS",
    "DEFAULT_PROBES",
    "CalibrationRecord",
    "GeneratingModel",
    "KNNModel",
    "KNNSettings",
    "Overrides",
    "Purpose",
    "ReadingModel",
    "ReadingParts",
    "Repetition",
    "Resolver",
    "collect_weights",
    "completed",
    "count_records",
    "create_weights_loader",
    "default_settings",
    "derive_default",
    "find_outdated_components",
    "find_saved_settings",
    "find_traces",
    "find_trained_settings",
    "is_outdated",
    "overridden",
    "own_settings_for",
    "resolve",
    "save_default_settings",
    "save_settings",
    "saved_for",
    "settings_for",
    "settings_from_dict",
    "settings_to_dict",
    "usable_settings_for",
]
