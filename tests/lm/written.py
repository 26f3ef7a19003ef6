"""Texts of a forward pass, from tokens alone."""

import torch

from knnstore.lm import TextState
from knnstore.lm.text_state import TextBatch


def batch_of(ids: torch.Tensor, new: int) -> TextBatch:
    """Return the batch of a pass over the last `new` positions of texts; -1 is padding, shape (b, n)."""
    texts = []
    for row in ids.numpy():
        text = TextState()
        text.append(row[row >= 0], torch.zeros(int((row >= 0).sum()), 1), None)
        texts.append(text)
    return TextBatch(texts, [text.length for text in texts], (ids[:, -new:] >= 0).numpy())
