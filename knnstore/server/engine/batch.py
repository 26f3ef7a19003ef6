"""The texts that are being decoded, as one left-padded batch. Each step adds a token to every text.

A text joins after its prefill, with the KV cache of its prompt and its first token. So each text, new or old,
gives the model one token in a step. Shorter texts are padded on the left and masked there. If the batch has
only one text, the step also reads draft tokens (speculative decoding): as long as the chosen tokens equal the
draft, they need no further step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knnstore.lm import Drafts, KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.kv_cache import Memory
from knnstore.server.engine.prompts import Remembered
from knnstore.server.engine.rows import Row


class Step(NamedTuple):
    """Result of one forward pass over the last token of each row."""

    draft_tokens: list[int]
    """Draft tokens that the pass read after the last token of a single row; empty if there are several
    rows."""

    log_probs: Tensor
    """log p of the token after the last one, and after each draft token, float32, shape (b, 1 + ahead, v)."""


class _RowDrafts(NamedTuple):
    """The draft model of one row, made for one revision of the store."""

    row: Row
    revision: int
    drafts: Drafts

    def propose_tokens(self) -> list[int]:
        """Return draft tokens that may follow the row's last token; possibly none.

        They are at most one less than the number of tokens that the text may still get.
        """
        tokens: list[int] = self.drafts.propose(np.array(self.row.tokens), self.row.tokens_left - 1).tolist()
        return tokens


class Batch:
    """The rows that get their next tokens in the same decoding steps, with their common KV cache."""

    def __init__(self, lm: KNNLMForCausalLM) -> None:
        self.rows: list[Row] = []
        self._lm = lm
        self._memory = Memory()
        self._row_drafts: _RowDrafts | None = None

    @torch.inference_mode()
    def add_row(self, row: Row, remembered: Remembered) -> None:
        """Add a row to the batch.

        Args:
            row: the row; its last token is not in the KV cache yet, because the next step reads it.
            remembered: the state after all tokens of the row but the last one. It is copied.
        """
        self._memory.add_row(remembered.layers, remembered.text.fork())
        self.rows.append(row)

    @torch.inference_mode()
    def remove_rows(self, finished: Sequence[Row]) -> None:
        """Remove rows from the batch. For each removed row, the last row takes its index."""
        for row in list(finished):  # a copy: `finished` may be `self.rows`
            index = self.rows.index(row)
            self._memory.remove_row(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
        if not self.rows:
            self._row_drafts = None  # frees its n-gram counts

    def predict_next(self, settings: Sequence[KNNSettings]) -> Step:
        """Run one forward pass over the last token of each row, which predicts the next token.

        If the batch has a single row whose settings use n-grams, the pass also reads draft tokens. The step
        is kept only when `keep_tokens` is called, so a failed step can be repeated. There must be a row.

        Args:
            settings: the retrieval settings of each row, in the order of `rows`.
        """
        self._row_drafts = self._get_row_drafts(self.rows[0], settings[0]) if len(self.rows) == 1 else None
        draft_tokens = [] if self._row_drafts is None else self._row_drafts.propose_tokens()
        count, device = 1 + len(draft_tokens), self._lm.base.device
        with torch.inference_mode():
            cache = self._memory.begin_step(count)
            lengths = torch.tensor(self._memory.lengths, device=device)
            columns = torch.arange(max(self._memory.lengths) + count, device=device)
            output = self._lm(
                input_ids=torch.tensor([[row.tokens[-1], *draft_tokens] for row in self.rows], device=device),
                attention_mask=(columns >= lengths.amax() - lengths[:, None]).long(),
                position_ids=lengths[:, None] + torch.arange(count, device=device),
                cache=cache,
                use_cache=True,
                knn=settings,
            )
            return Step(draft_tokens, output.logits.float().log_softmax(-1))

    def keep_tokens(self, step: Step, taken: int) -> None:
        """Keep the KV cache of a step, and tell the draft model how many of its tokens were right.

        Args:
            step: the last step.
            taken: number of tokens that each row has taken from the step, at least 1. The cache of all
                further tokens of the step is dropped.
        """
        self._memory.keep_tokens(taken)
        if self._row_drafts is not None:
            self._row_drafts.drafts.learn(len(step.draft_tokens), taken - 1)

    def _get_row_drafts(self, row: Row, settings: KNNSettings) -> _RowDrafts | None:
        """Return the draft model of a row at the store's current revision: the last one if it still fits.

        Returns None if the settings use no n-grams, because drafts need the suffix array of the n-grams.
        """
        if settings.ngrams is None:
            return None
        current, revision = self._row_drafts, self._lm.store.revision()
        if current is not None and current.row is row and current.revision == revision:
            return current
        return _RowDrafts(row, revision, Drafts(self._lm.store, settings))
