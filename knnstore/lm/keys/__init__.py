"""Making keys with a model: places, capture in a forward pass, joining and projection; and fingerprints."""

from typing import TYPE_CHECKING

from knnstore.lazy_imports import attach_lazy_imports

if TYPE_CHECKING:
    from knnstore.lm.keys.fingerprints import (
        compute_fingerprint,
        describe_same_checkpoint,
        model_fingerprint,
        seq2seq_tokenizer_fingerprint,
        tokenizer_fingerprint,
    )
    from knnstore.lm.keys.key_capture import (
        KeyCapture,
        KeyLocation,
        Source,
        key_dim,
        make_forward_kwargs,
        reads_source,
        restore_autocast,
        run_until_keys,
        run_without_autocast,
        run_without_head,
        select_positions_to_keep,
    )
    from knnstore.lm.keys.key_places import AUTO, FINAL_PLACES, LAYER_PLACES, count_layers, locate
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
    "count_layers",
    "describe_keys",
    "describe_same_checkpoint",
    "fit_projection",
    "key_dim",
    "locate",
    "make_forward_kwargs",
    "model_fingerprint",
    "reads_source",
    "restore_autocast",
    "run_until_keys",
    "run_without_autocast",
    "run_without_head",
    "select_positions_to_keep",
    "seq2seq_tokenizer_fingerprint",
    "tokenizer_fingerprint",
]
