"""The language model: keys, windows, mixing, and a transformers model with a store."""

from knnstore.lm.calibration import Calibration, Comparison, Probe, Probed, probe_keys
from knnstore.lm.explanation import (
    DocumentEffect,
    Explanation,
    Part,
    Source,
    TokenExplanation,
    explain_tokens,
)
from knnstore.lm.mixing import (
    BinnedLambda,
    Chosen,
    DomainWeights,
    FixedLambda,
    GateLambda,
    JointGate,
    Mixer,
    NearnessLambda,
    RelativeConfidence,
    Retrieved,
    SimpleMixer,
    Skipping,
    register_mixer,
)
from knnstore.lm.model import KNNLMForCausalLM, create, load
from knnstore.lm.reading import Added, Detokenizer, Synced, TextReader, decoded, load_model
from knnstore.lm.scoring import (
    Audit,
    Check,
    DocumentScore,
    Evaluation,
    GroupScore,
    Interval,
    Passage,
    PruningCost,
    SizePoint,
    TextNeighbors,
    TokenTable,
    replacing,
)
from knnstore.lm.settings import (
    CacheSettings,
    CalibrationRecord,
    KNNSettings,
    NGramSettings,
    PointerSettings,
    Repetition,
    Substitute,
    TrainedSubstitute,
    completed,
    default_settings,
    is_substitute_outdated,
    overridden,
    own_settings_for,
    save_settings,
    saved_for,
    settings_for,
    settings_from_dict,
    settings_to_dict,
    trained_for,
    usable_settings_for,
)

__all__ = [
    "Added", "Audit", "BinnedLambda", "CacheSettings", "Calibration", "CalibrationRecord", "Check", "Chosen",
    "Comparison", "Detokenizer", "DocumentEffect", "DocumentScore", "DomainWeights", "Evaluation",
    "Explanation", "FixedLambda", "GateLambda", "GroupScore", "Interval", "JointGate", "KNNLMForCausalLM",
    "KNNSettings", "Mixer", "NGramSettings", "NearnessLambda", "Part", "Passage", "PointerSettings", "Probe",
    "Probed", "PruningCost", "RelativeConfidence", "Repetition", "Retrieved", "SimpleMixer", "SizePoint",
    "Skipping", "Source", "Substitute", "Synced", "TextNeighbors", "TextReader", "TokenExplanation",
    "TokenTable", "TrainedSubstitute", "completed", "create", "decoded", "default_settings", "explain_tokens",
    "is_substitute_outdated", "load", "load_model", "overridden", "own_settings_for", "probe_keys",
    "register_mixer", "replacing", "save_settings", "saved_for", "settings_for", "settings_from_dict",
    "settings_to_dict", "trained_for", "usable_settings_for",
]  # fmt: skip
