"""The texts that are being written, as one left-padded batch: each step adds a token to every one.

A text joins with what the model remembers of its prompt and with its first token, so that all texts, new and
old, give the model one token in each step. Shorter ones are padded on the left and masked there. A text that
is alone gives it a draft as well: while the tokens chosen are those of the draft, they need no step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knnstore.lm import Drafts, KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.memory import Memory
from knnstore.server.engine.prompts import Remembered
from knnstore.server.engine.rows import Row


class Step(NamedTuple):
    """What the model says after the last tokens of all rows."""

    ahead: list[int]
    """What it read further in a single row: tokens that may come."""

    log_probs: Tensor
    """log p of the next token, and of the one after each of those, float32, shape (b, 1 + ahead, v)."""


class _Drafting(NamedTuple):
    """Drafts of one text, from the store as it is."""

    row: Row
    revision: int
    drafts: Drafts

    def ahead(self) -> list[int]:
        """Tokens that may come next."""
        found: list[int] = self.drafts.propose(np.array(self.row.tokens), self.row.left - 1).tolist()
        return found


class Batch:
    """The rows that advance together."""

    def __init__(self, lm: KNNLMForCausalLM) -> None:
        self.rows: list[Row] = []
        self._lm = lm
        self._memory = Memory()
        self._drafting: _Drafting | None = None

    @torch.inference_mode()
    def join(self, row: Row, remembered: Remembered) -> None:
        """Take in a row, which has one token more than was read."""
        self._memory.join(remembered.layers, remembered.text.fork())
        self.rows.append(row)

    @torch.inference_mode()
    def leave(self, gone: Sequence[Row]) -> None:
        """Let rows go."""
        for row in list(gone):  # which may be `rows`
            at = self.rows.index(row)
            self._memory.leave(at)
            self.rows[at] = self.rows[-1]
            self.rows.pop()
        if not self.rows:
            self._drafting = None  # which holds counts of n-grams

    def step(self, settings: Sequence[KNNSettings]) -> Step:
        """Let the model read the last token of each row, and of a single one some that may come.

        What it has read counts when `keep` is called; until then the same step may be done again.

        Args:
            settings: of each row.
        """
        self._drafting = self._drafting_for(self.rows[0], settings[0]) if len(self.rows) == 1 else None
        ahead = [] if self._drafting is None else self._drafting.ahead()
        count, device = 1 + len(ahead), self._lm.base.device
        with torch.inference_mode():
            cache = self._memory.step(count)
            lengths = torch.tensor(self._memory.lengths, device=device)
            columns = torch.arange(max(self._memory.lengths) + count, device=device)
            output = self._lm(
                input_ids=torch.tensor([[row.tokens[-1], *ahead] for row in self.rows], device=device),
                attention_mask=(columns >= lengths.amax() - lengths[:, None]).long(),
                position_ids=lengths[:, None] + torch.arange(count, device=device),
                cache=cache,
                use_cache=True,
                knn=settings,
            )
            return Step(ahead, output.logits.float().log_softmax(-1))

    def keep(self, step: Step, taken: int) -> None:
        """Let a step count, of which so many tokens, >= 1, were taken into each row."""
        self._memory.keep(taken)
        if self._drafting is not None:
            self._drafting.drafts.learn(len(step.ahead), taken - 1)

    def _drafting_for(self, row: Row, settings: KNNSettings) -> _Drafting | None:
        """What is drafted by for a text; nothing without n-grams, whose order drafts need."""
        if settings.ngrams is None:
            return None
        now, revision = self._drafting, self._lm.store.revision()
        if now is not None and now.row is row and now.revision == revision:
            return now
        return _Drafting(row, revision, Drafts(self._lm.store, settings))
