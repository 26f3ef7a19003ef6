"""The language model: keys, windows, mixing, and a transformers model with a store."""

from knnstore.lm.build import Added
from knnstore.lm.evaluate import Evaluation
from knnstore.lm.explain import Source, TokenExplanation
from knnstore.lm.mixing import FixedLambda, KNNSettings, Mixer, Retrieved
from knnstore.lm.modeling import KNNLMForCausalLM
from knnstore.lm.opening import create, load

__all__ = [
    "Added",
    "Evaluation",
    "FixedLambda",
    "KNNLMForCausalLM",
    "KNNSettings",
    "Mixer",
    "Retrieved",
    "Source",
    "TokenExplanation",
    "create",
    "load",
]
