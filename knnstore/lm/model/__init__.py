"""The model with a store as a transformers model: creating, loading, generating and scoring."""

from knnstore.lm.model.keyless import KeylessText
from knnstore.lm.model.modeling import KNNLM, KNNLMForCausalLM, KNNLMForSeq2SeqLM, choose_model_class
from knnstore.lm.model.opening import create, load
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.model.prefill import predict_next, read_part, score_targets
from knnstore.lm.model.registering import register_models
from knnstore.lm.model.text_layer import TextStateLayer
from knnstore.lm.model.translation import TranslationScores

__all__ = [
    "KNNLM",
    "ForwardPass",
    "KNNLMForCausalLM",
    "KNNLMForSeq2SeqLM",
    "KeylessText",
    "TextStateLayer",
    "TranslationScores",
    "choose_model_class",
    "create",
    "load",
    "predict_next",
    "read_part",
    "score_targets",
]

register_models(KNNLMForCausalLM, KNNLMForSeq2SeqLM)
