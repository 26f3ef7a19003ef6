"""The texts that are being written, as one left-padded batch: each step adds a token to every one.

A text joins with what the model remembers of its prompt and with its first token, so that all texts, new and
old, give the model one token in each step. Shorter ones are padded on the left and masked there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.memory import Memory
from knnstore.server.engine.prompts import PADDING, Remembered
from knnstore.server.engine.rows import Row


class Batch:
    """The rows that advance together."""

    def __init__(self, lm: KNNLMForCausalLM) -> None:
        self.rows: list[Row] = []
        self._lm = lm
        self._memory = Memory(lm.base.device)

    @torch.inference_mode()
    def join(self, row: Row, remembered: Remembered) -> None:
        """Take in a row, which has one token more than was read."""
        self._memory.join(row.tokens[: remembered.length], remembered.layers)
        self.rows.append(row)

    @torch.inference_mode()
    def leave(self, gone: Sequence[Row]) -> None:
        """Let rows go."""
        for row in list(gone):  # which may be `rows`
            at = self.rows.index(row)
            self._memory.leave(at)
            self.rows[at] = self.rows[-1]
            self.rows.pop()

    def step(self, settings: Sequence[KNNSettings], *, keep: bool = True) -> Tensor:
        """Let the model read the last token of each row; after an error it may be called again.

        Args:
            settings: of each row.
            keep: whether these tokens are read from now on; else the same step is still to come.

        Returns:
            log p of the next token, float32, shape (b, v).
        """
        with torch.inference_mode():
            texts, cache = self._memory.step([row.tokens[-1] for row in self.rows])
            output = self._lm(
                input_ids=texts[:, -1:],
                attention_mask=(texts != PADDING).long(),
                position_ids=torch.tensor(self._memory.lengths, device=texts.device)[:, None],
                past_key_values=cache,
                use_cache=True,
                knn=settings,
                sequence_ids=texts,
            )
            if keep:
                self._memory.keep()
            log_probs: Tensor = output.logits[:, -1].float().log_softmax(-1)
            return log_probs
