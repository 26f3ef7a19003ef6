"""What a query is made with: values, and how they are saved."""

from knnstore.lm.settings.parts import CacheSettings, PointerSettings, Substitute
from knnstore.lm.settings.query import KNNSettings
from knnstore.lm.settings.saved import (
    TRAINED,
    default_settings,
    save_default_settings,
    saved_for,
    settings_for,
    trained_for,
    usable_settings_for,
    weights_for,
)

__all__ = [
    "TRAINED",
    "CacheSettings",
    "KNNSettings",
    "PointerSettings",
    "Substitute",
    "default_settings",
    "save_default_settings",
    "saved_for",
    "settings_for",
    "trained_for",
    "usable_settings_for",
    "weights_for",
]
