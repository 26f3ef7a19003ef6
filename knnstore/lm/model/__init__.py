"""The model with a store as a transformers model: creating, loading, generating and scoring."""

from knnstore.lm.model.keyless import KeylessText
from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.model.opening import create, load
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.model.prefill import following, likelihoods, read_part
from knnstore.lm.model.registering import register_model
from knnstore.lm.model.text_layer import TextStateLayer

__all__ = [
    "ForwardPass",
    "KNNLMForCausalLM",
    "KeylessText",
    "TextStateLayer",
    "create",
    "following",
    "likelihoods",
    "load",
    "read_part",
]

register_model(KNNLMForCausalLM)
