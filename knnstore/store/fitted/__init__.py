"""Saved settings, files of fitted weights, and the documents on which settings and weights were fitted."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.store.fitted.lineage import Lineage
    from knnstore.store.fitted.saved import (
        SavedSettings,
        convert_damage_errors,
        drop_damaged_settings,
        drop_settings_of_removed,
        find_files_in_use,
        load_all_settings,
    )
    from knnstore.store.fitted.weight_files import (
        Weights,
        find_file_problem,
        load_weights,
        remove_unused_files,
        save_weights,
    )
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "Lineage",
    "SavedSettings",
    "Weights",
    "convert_damage_errors",
    "drop_damaged_settings",
    "drop_settings_of_removed",
    "find_file_problem",
    "find_files_in_use",
    "load_all_settings",
    "load_weights",
    "remove_unused_files",
    "save_weights",
]
