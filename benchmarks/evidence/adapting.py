"""Models that were trained on a text: by LoRA (Hu et al. 2021) or with all weights."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from texts import reader_of
from training import fine_tune, perplexity, saved

from knnstore.documents import TextDocument

LORA, FULL = "LoRA", "fine-tuned"
_RANK = 16
_STEP_TOKENS = 1_024
_EPOCHS = 1


def adapt(
    kind: str,
    model: str,
    documents: Sequence[TextDocument],
    dev: Sequence[TextDocument],
    rate: float,
    folder: Path,
) -> dict[str, Any]:
    """Train a model on documents for one epoch, and save it with its adapter merged into the weights.

    Args:
        kind: `LORA` for adapters of rank 16 on all linear layers, `FULL` for all weights.
        model: folder of the model to begin with.
        documents: the text to train on.
        dev: text to choose the learning rate on.
        rate: the highest learning rate.
        folder: folder of the new model.

    Returns:
        The rate, perplexity on `dev`, processor seconds of training, and bytes of what must be kept beside
        the original model.
    """
    reader = reader_of(model)
    tuned = reader.encoder.model
    torch.manual_seed(0)  # adapters begin at random
    adapter = None
    if kind == LORA:
        config = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        adapter = get_peft_model(tuned, config)
    started = time.process_time()
    windows = replace(reader, max_length=min(_STEP_TOKENS, reader.max_length))
    fine_tune(windows, documents, _EPOCHS, rate, batch_tokens=_STEP_TOKENS, in_bfloat16=True)
    seconds = time.process_time() - started
    kept = list(tuned.parameters()) if adapter is None else [w for w in tuned.parameters() if w.requires_grad]
    size = sum(weight.nbytes for weight in kept)
    if adapter is not None:
        adapter.merge_and_unload()
    saved(reader, folder)
    return {"rate": rate, "dev": perplexity(reader, dev), "seconds": seconds, "bytes": size}
