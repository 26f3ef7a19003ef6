"""Saved settings, files of weights, and the documents that both were fitted on."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.store.fitted.lineage import Lineage
    from knnstore.store.fitted.saved import (
        SavedSettings,
        all_saved,
        drop_damaged_settings,
        drop_traces,
        files_in_use,
        settings_are_sound,
    )
    from knnstore.store.fitted.weight_files import Weights, load_weights, problem_of, save_weights, sweep
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "Lineage",
    "SavedSettings",
    "Weights",
    "all_saved",
    "drop_damaged_settings",
    "drop_traces",
    "files_in_use",
    "load_weights",
    "problem_of",
    "save_weights",
    "settings_are_sound",
    "sweep",
]
