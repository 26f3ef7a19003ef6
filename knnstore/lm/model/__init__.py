"""The model with a store, as transformers knows models."""

from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.model.opening import create, load

__all__ = ["KNNLMForCausalLM", "create", "load"]
