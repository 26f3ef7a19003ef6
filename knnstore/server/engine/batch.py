"""The texts that are being written, as one left-padded batch: each step adds a token to every one.

A text joins with what the model remembers of its prompt and with its first token, so that all texts, new and
old, give the model one token in each step. Shorter ones are padded on the left and masked there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache

from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.prompts import Layers, Remembered, layers_of
from knnstore.server.engine.rows import Row

_PADDING = -1  # in `sequence_ids`


class Batch:
    """The rows that advance together."""

    def __init__(self, lm: KNNLMForCausalLM) -> None:
        self.rows: list[Row] = []
        self._lm = lm
        self._layers: Layers = []
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=lm.base.device)

    def join(self, row: Row, remembered: Remembered) -> None:
        """Take in a row."""
        width = max(self._mask.shape[1], remembered.length)
        old, new = self._layers, remembered.layers
        if width:
            old = old or [_nothing(part, len(self.rows)) for part in new]
            new = new or [_nothing(part, 1) for part in old]
            self._layers = [
                (_stacked(keys, others, width), _stacked(values, more, width))
                for (keys, values), (others, more) in zip(old, new, strict=True)
            ]
        mask = self._mask.new_ones((1, remembered.length))
        self._mask = torch.cat([_padded(self._mask, width, -1), _padded(mask, width, -1)])
        self.rows.append(row)

    def leave(self, gone: Sequence[Row]) -> None:
        """Let rows go, and the padding that only they made necessary."""
        staying = [at for at, row in enumerate(self.rows) if row not in gone]
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[at] for at in staying]
        self._mask = self._mask[staying]
        first = self._mask.shape[1] - int(self._mask.sum(1).max()) if staying else self._mask.shape[1]
        self._mask = self._mask[:, first:]
        self._layers = [
            (keys[staying, :, first:], values[staying, :, first:]) for keys, values in self._layers
        ]
        if not self._mask.numel():
            self._layers = []

    def step(self, settings: Sequence[KNNSettings], *, keep: bool = True) -> Tensor:
        """Let the model read the last token of each row; after an error it may be called again.

        Args:
            settings: of each row.
            keep: whether these tokens are read from now on; else the same step is still to come.

        Returns:
            log p of the next token, float32, shape (b, v).
        """
        mask = pad(self._mask, (0, 1), value=1)
        cache = DynamicCache(self._layers) if self._layers else DynamicCache()
        with torch.inference_mode():
            output = self._lm(
                input_ids=torch.tensor([row.tokens[-1:] for row in self.rows], device=mask.device),
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
                knn=settings,
                sequence_ids=self._texts(mask),
            )
            if keep:
                self._mask, self._layers = mask, layers_of(cache)
            log_probs: Tensor = output.logits[:, -1].float().log_softmax(-1)
            return log_probs

    def _texts(self, mask: Tensor) -> Tensor:
        """The rows' tokens as `KNNLMForCausalLM.forward` takes them, shape (b, t)."""
        texts = torch.full_like(mask, _PADDING)
        for text, row in zip(texts, self.rows, strict=True):
            text[-len(row.tokens) :] = torch.tensor(row.tokens, device=texts.device)
        return texts


def _nothing(part: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    keys, values = part
    return keys.new_empty((rows, keys.shape[1], 0, keys.shape[3])), values.new_empty(
        (rows, values.shape[1], 0, values.shape[3])
    )


def _stacked(rows: Tensor, more: Tensor, width: int) -> Tensor:
    return torch.cat([_padded(rows, width, -2), _padded(more, width, -2)])


def _padded(rows: Tensor, width: int, dim: int) -> Tensor:
    """Lengthen a dimension on the left, with zeros."""
    return pad(rows, (0, 0) * (-dim - 1) + (width - rows.shape[dim], 0))
