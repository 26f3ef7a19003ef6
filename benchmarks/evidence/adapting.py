"""Models that were trained on a text: by LoRA (Hu et al. 2021) or with all weights."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from texts import reader_of
from torch import Tensor
from training import fine_tune, perplexity, saved

from knnstore.documents import TextDocument

LORA, FULL = "LoRA", "fine-tuned"
_RANK = 16
_STEP_TOKENS = 1_024


def adapt(
    kind: str,
    model: str,
    documents: Sequence[TextDocument],
    dev: Sequence[TextDocument],
    rate: float,
    epochs: int,
    folder: Path,
) -> dict[str, Any]:
    """Train a model on documents, and save it as it was after its best epoch.

    The learning rate falls to 0 at the end of the last epoch. Adapters are merged into the saved weights.

    Args:
        kind: `LORA` for adapters of rank 16 on all linear layers, `FULL` for all weights.
        model: folder of the model to begin with.
        documents: the text to train on.
        dev: text to choose the epoch and the learning rate on.
        rate: the highest learning rate.
        epochs: number of epochs.
        folder: folder of the new model.

    Returns:
        The rate, perplexity on `dev` of the best epoch and of each one, processor seconds of all epochs
        without `dev`, and bytes of what must be kept beside the original model.
    """
    reader = reader_of(model)
    tuned = reader.encoder.model
    torch.manual_seed(0)  # adapters begin at random
    adapter = None
    if kind == LORA:
        config = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        adapter = get_peft_model(tuned, config)
    trained = [weight for weight in tuned.parameters() if weight.requires_grad]
    by_epoch: list[float] = []
    best: list[Tensor] = []
    judging = 0.0

    def judge_epoch() -> None:
        nonlocal judging
        before = time.process_time()
        by_epoch.append(perplexity(reader, dev))
        if by_epoch[-1] == min(by_epoch):
            best[:] = [weight.detach().clone() for weight in trained]
        judging += time.process_time() - before

    started = time.process_time()
    windows = replace(reader, max_length=min(_STEP_TOKENS, reader.max_length))
    fine_tune(
        windows, documents, epochs, rate,
        batch_tokens=_STEP_TOKENS, in_bfloat16=True, after_epoch=judge_epoch,
    )  # fmt: skip
    seconds = time.process_time() - started - judging
    with torch.no_grad():
        for weight, value in zip(trained, best, strict=True):
            weight.copy_(value)
    if adapter is not None:
        adapter.merge_and_unload()
    saved(reader, folder)
    size = sum(weight.nbytes for weight in trained)
    return {"rate": rate, "dev": min(by_epoch), "by_epoch": by_epoch, "seconds": seconds, "bytes": size}
