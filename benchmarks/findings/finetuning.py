"""Fine-tuning the base model on a store's text: a plain loop, what a store is compared with."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from texts import reader_of
from torch.nn.functional import cross_entropy

from knnstore.documents import TextDocument

LEARNING_RATE = 1e-3
WARMUP = 0.05
"""Share of the steps in which the learning rate rises; then it falls linearly to 0."""
BATCH_TOKENS = 2_048


def fine_tune(model: str, documents: Sequence[TextDocument], epochs: int, out: Path) -> float:
    """Train all weights on some documents with AdamW, and save the model.

    Every token is predicted once an epoch, from the window that it falls in; windows do not overlap, as is
    usual in training, which makes this up to twice as fast as storing's windows would be.

    Args:
        model: folder of the model to begin with.
        documents: the text.
        epochs: how many times it is read.
        out: folder to save in.

    Returns:
        Seconds of training.
    """
    torch.manual_seed(0)
    order = np.random.default_rng(0)
    reader = reader_of(model)
    lm = reader.encoder.model
    started = time.perf_counter()
    apart = replace(reader, stride=reader.max_length - 1, batch_tokens=BATCH_TOKENS)
    batches = list(apart.batches(apart.tokenized(documents)))
    weights = list(lm.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
    )
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1.0, WARMUP * steps), 1 - step / steps)
    )
    lm.train()
    for _ in range(epochs):
        for at in order.permutation(len(batches)).tolist():
            batch = batches[at]
            logits = lm(torch.from_numpy(batch.input_ids), use_cache=False).logits.flatten(0, 1)
            loss = cross_entropy(logits[torch.from_numpy(batch.at)].float(), torch.from_numpy(batch.gold))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if not math.isfinite(loss.item()):
                raise RuntimeError("fine-tuning diverged")
    seconds = time.perf_counter() - started
    lm.eval().save_pretrained(out)
    reader.tokenizer.save_pretrained(out)
    return seconds
