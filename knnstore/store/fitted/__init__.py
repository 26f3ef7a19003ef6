"""What was fitted: saved settings, files of weights, and the documents that these hold traces of."""

from knnstore.store.fitted.lineage import Lineage
from knnstore.store.fitted.saved import SavedSettings, all_saved, drop_traces, files_in_use
from knnstore.store.fitted.weights import Weights, load_weights, problem_of, save_weights, sweep

__all__ = [
    "Lineage", "SavedSettings", "Weights", "all_saved", "drop_traces", "files_in_use", "load_weights",
    "problem_of", "save_weights", "sweep",
]  # fmt: skip
