"""Fine-tuning a model on a store's text: a plain loop, what a store is compared with."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader, WindowBatch, chunk_documents

WARMUP = 0.05
"""Share of the steps in which the learning rate rises; then it falls linearly to 0."""
BATCH_TOKENS = 2_048


def fine_tune(
    reader: TextReader,
    documents: Sequence[TextDocument],
    epochs: int,
    rate: float,
    *,
    batch_tokens: int = BATCH_TOKENS,
    in_bfloat16: bool = False,
    after_epoch: Callable[[], None] | None = None,
) -> float:
    """Train all weights that are not frozen on some documents with AdamW.

    Every token is predicted once an epoch, from the window that it falls in; windows do not overlap, as is
    usual in training, which makes this up to twice as fast as storing's windows would be.

    Args:
        reader: whose model is trained where it is.
        documents: the text.
        epochs: how many times it is read.
        rate: the highest learning rate.
        batch_tokens: number of tokens in a step, padding included.
        in_bfloat16: True to multiply matrices in bfloat16; weights and optimizer stay in single precision.
        after_epoch: called at the end of each epoch, with the model in evaluation mode.

    Returns:
        Seconds of training, with those of `after_epoch`.

    Raises:
        RuntimeError: it diverged.
    """
    torch.manual_seed(0)
    order = np.random.default_rng(0)
    lm = reader.encoder.model
    started = time.perf_counter()
    apart = replace(reader, stride=reader.max_length - 1, batch_tokens=batch_tokens)
    batches = list(apart.batch_windows(apart.tokenize_documents(documents)))
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
    )
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1.0, WARMUP * steps), 1 - step / steps)
    )
    for _ in range(epochs):
        lm.train()
        for at in order.permutation(len(batches)).tolist():
            with torch.autocast(lm.device.type, torch.bfloat16, enabled=in_bfloat16):
                loss = cross_entropy(*_predicted(lm, batches[at]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"fine-tuning diverged at a learning rate of {rate}")
        lm.eval()
        if after_epoch is not None:
            after_epoch()
    return time.perf_counter() - started


def perplexity(reader: TextReader, documents: Sequence[TextDocument]) -> float:
    """Of the model alone, each token predicted once with the context that a store would give it."""
    losses = [cross_entropy(*batch, reduction="sum").double() for batch in predictions(reader, documents)]
    return math.exp(float(torch.stack(losses).sum()) / reader.count_predicted(documents))


def saved(reader: TextReader, folder: Path) -> Path:
    """Return the folder, with the model and its tokenizer in it."""
    reader.encoder.model.save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    return folder


def predictions(reader: TextReader, documents: Sequence[TextDocument]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits, shape (n, vocabulary), and the tokens that came, shape (n,), in the order of scoring."""
    with torch.inference_mode():
        for ahead in chunk_documents(documents):
            for batch in reader.batch_windows(reader.tokenize_documents(ahead)):
                yield _predicted(reader.encoder.model, batch)


def _predicted(lm: PreTrainedModel, batch: WindowBatch) -> tuple[Tensor, Tensor]:
    logits = lm(torch.from_numpy(batch.input_ids).to(lm.device), use_cache=False).logits.flatten(0, 1)
    at, gold = (torch.from_numpy(one).to(lm.device) for one in (batch.at, batch.gold))
    return logits[at].float(), gold
