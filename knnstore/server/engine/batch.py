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

    ahead: list[int]
    """Draft tokens that the pass read after the last token of a single row; else empty."""

    log_probs: Tensor
    """log p of the token after the last one, and after each draft token, float32, shape (b, 1 + ahead, v)."""


class _Drafting(NamedTuple):
    """The draft model of one text, for one revision of the store."""

    row: Row
    revision: int
    drafts: Drafts

    def ahead(self) -> list[int]:
        """Return draft tokens that may come next; at most one less than the text may still get."""
        tokens: list[int] = self.drafts.propose(np.array(self.row.tokens), self.row.left - 1).tolist()
        return tokens


class Batch:
    """The rows that get their next token in the same step."""

    def __init__(self, lm: KNNLMForCausalLM) -> None:
        self.rows: list[Row] = []
        self._lm = lm
        self._memory = Memory()
        self._drafting: _Drafting | None = None

    @torch.inference_mode()
    def join(self, row: Row, remembered: Remembered) -> None:
        """Add a row. `remembered` is the state before the row's last token, which the next step reads."""
        self._memory.join(remembered.layers, remembered.text.fork())
        self.rows.append(row)

    @torch.inference_mode()
    def leave(self, gone: Sequence[Row]) -> None:
        """Remove rows. The last row takes the place of a removed one."""
        for row in list(gone):  # a copy: `gone` may be `self.rows`
            at = self.rows.index(row)
            self._memory.leave(at)
            self.rows[at] = self.rows[-1]
            self.rows.pop()
        if not self.rows:
            self._drafting = None  # frees its n-gram counts

    def step(self, settings: Sequence[KNNSettings]) -> Step:
        """Run one forward pass over the last token of each row. A single row also gets draft tokens.

        The step changes nothing that stays until `keep` is called, so a failed step can be repeated.

        Args:
            settings: the settings of each row.
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
        """Keep the cache of a step.

        Args:
            step: the last step.
            taken: number of tokens that each row has taken from it, at least 1. The others are dropped.
        """
        self._memory.keep(taken)
        if self._drafting is not None:
            self._drafting.drafts.learn(len(step.ahead), taken - 1)

    def _drafting_for(self, row: Row, settings: KNNSettings) -> _Drafting | None:
        """Return the draft model of a row at the store's current revision.

        Returns None if the settings use no n-grams, because drafts need their suffix array.
        """
        if settings.ngrams is None:
            return None
        current, revision = self._drafting, self._lm.store.revision()
        if current is not None and current.row is row and current.revision == revision:
            return current
        return _Drafting(row, revision, Drafts(self._lm.store, settings))
