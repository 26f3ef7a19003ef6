"""The language model: keys, windows, mixing, and a transformers model with a store."""

from knnstore.lm.calibration import (
    Calibration,
    CalibrationRecord,
    Comparison,
    Interval,
    Probe,
    Probed,
    probe_keys,
)
from knnstore.lm.mixing import (
    BinnedLambda,
    Chosen,
    DomainWeights,
    FixedLambda,
    Mixer,
    NearnessLambda,
    RelativeConfidence,
    Retrieved,
)
from knnstore.lm.model import KNNLMForCausalLM, create, load
from knnstore.lm.reading import Added, load_model
from knnstore.lm.scoring import Evaluation, PruningCost, Source, TokenExplanation, TokenTable, replacing
from knnstore.lm.settings import (
    CacheSettings,
    KNNSettings,
    PointerSettings,
    Substitute,
    default_settings,
    saved_for,
    settings_for,
    trained_for,
    usable_settings_for,
)
from knnstore.lm.substitute import TrainedSubstitute

__all__ = [
    "Added",
    "BinnedLambda",
    "CacheSettings",
    "Calibration",
    "CalibrationRecord",
    "Chosen",
    "Comparison",
    "DomainWeights",
    "Evaluation",
    "FixedLambda",
    "Interval",
    "KNNLMForCausalLM",
    "KNNSettings",
    "Mixer",
    "NearnessLambda",
    "PointerSettings",
    "Probe",
    "Probed",
    "PruningCost",
    "RelativeConfidence",
    "Retrieved",
    "Source",
    "Substitute",
    "TokenExplanation",
    "TokenTable",
    "TrainedSubstitute",
    "create",
    "default_settings",
    "load",
    "load_model",
    "probe_keys",
    "replacing",
    "saved_for",
    "settings_for",
    "trained_for",
    "usable_settings_for",
]
