"""The model with a store, as transformers knows models."""

from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.model.opening import create, load
from knnstore.lm.model.registering import register

__all__ = ["KNNLMForCausalLM", "create", "load"]

register(KNNLMForCausalLM)
