"""The model with a store, as transformers knows models."""

from knnstore.lm.model.given import following, keep_keys, likelihoods, read_part
from knnstore.lm.model.keyless import KeylessText
from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.model.opening import create, load
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.model.registering import register

__all__ = [
    "ForwardPass",
    "KNNLMForCausalLM",
    "KeylessText",
    "create",
    "following",
    "keep_keys",
    "likelihoods",
    "load",
    "read_part",
]

register(KNNLMForCausalLM)
