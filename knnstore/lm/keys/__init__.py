"""Making keys with a model: places, capture in a forward pass, joining, projection; and fingerprints."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.lm.keys.capture import (
        KeyCapture,
        KeyLocation,
        hidden_forward,
        keep_positions,
        key_dim,
        keys_forward,
    )
    from knnstore.lm.keys.fingerprint import model_fingerprint, same_model, tokenizer_fingerprint
    from knnstore.lm.keys.joining import Joining
    from knnstore.lm.keys.places import AUTO, FINAL_PLACES, LAYER_PLACES, layer_count, locate
    from knnstore.lm.keys.precision import full_precision, in_full_precision, model_precision
    from knnstore.lm.keys.projection import Projection, described, fit_projection
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "AUTO", "FINAL_PLACES", "LAYER_PLACES", "Joining", "KeyCapture", "KeyLocation", "Projection", "described",
    "fit_projection", "full_precision", "hidden_forward", "in_full_precision", "keep_positions", "key_dim",
    "keys_forward", "layer_count", "locate", "model_fingerprint", "model_precision", "same_model",
    "tokenizer_fingerprint",
]  # fmt: skip
