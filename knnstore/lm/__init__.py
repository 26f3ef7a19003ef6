"""The language model: keys, windows, mixing, and a transformers model with a store."""

from knnstore.lm.bins import BinnedLambda
from knnstore.lm.build import Added
from knnstore.lm.calibrate import Calibration, CalibrationRecord
from knnstore.lm.closed_forms import NearnessLambda, RelativeConfidence
from knnstore.lm.domain_weights import DomainWeights
from knnstore.lm.evaluate import Evaluation
from knnstore.lm.explain import Source, TokenExplanation
from knnstore.lm.mixing import Chosen, FixedLambda, Mixer, Retrieved
from knnstore.lm.modeling import KNNLMForCausalLM
from knnstore.lm.opening import create, load
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Substitute
from knnstore.lm.substitute_training import TrainedSubstitute
from knnstore.lm.token_table import TokenTable

__all__ = [
    "Added",
    "BinnedLambda",
    "Calibration",
    "CalibrationRecord",
    "Chosen",
    "DomainWeights",
    "Evaluation",
    "FixedLambda",
    "KNNLMForCausalLM",
    "KNNSettings",
    "Mixer",
    "NearnessLambda",
    "RelativeConfidence",
    "Retrieved",
    "Source",
    "Substitute",
    "TokenExplanation",
    "TokenTable",
    "TrainedSubstitute",
    "create",
    "load",
]
