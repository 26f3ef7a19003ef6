"""Making keys with a model: places, capture in a forward pass, joining and projection; and fingerprints."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.lm.keys.fingerprints import (
        compute_fingerprint,
        model_fingerprint,
        pair_fingerprint,
        same_model,
        tokenizer_fingerprint,
    )
    from knnstore.lm.keys.key_capture import (
        KeyCapture,
        KeyLocation,
        Source,
        hidden_forward,
        in_full_precision,
        keep_positions,
        key_dim,
        keys_forward,
        make_forward_kwargs,
        model_precision,
        reads_source,
    )
    from knnstore.lm.keys.key_places import AUTO, FINAL_PLACES, LAYER_PLACES, layer_count, locate
    from knnstore.lm.keys.key_vectors import (
        Joining,
        KeyDescription,
        Projection,
        describe_keys,
        fit_projection,
    )
else:
    __getattr__, __dir__ = attach_lazy_imports(__name__)

__all__ = [
    "AUTO",
    "FINAL_PLACES",
    "LAYER_PLACES",
    "Joining",
    "KeyCapture",
    "KeyDescription",
    "KeyLocation",
    "Projection",
    "Source",
    "compute_fingerprint",
    "describe_keys",
    "fit_projection",
    "hidden_forward",
    "in_full_precision",
    "keep_positions",
    "key_dim",
    "keys_forward",
    "layer_count",
    "locate",
    "make_forward_kwargs",
    "model_fingerprint",
    "model_precision",
    "pair_fingerprint",
    "reads_source",
    "same_model",
    "tokenizer_fingerprint",
]
