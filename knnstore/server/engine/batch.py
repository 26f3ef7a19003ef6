"""The texts that are decoded together, as one left-padded batch. Each step adds tokens to every text.

A text joins after its prefill, with the KV cache of its prompt and its first token. Shorter texts are padded
on the left and masked there. A step reads the last token of each text, and draft tokens after it (guesses of
the next tokens; speculative decoding) if they are worth their time. Each draft token that equals the chosen
token saves its text a step. So the texts of a batch may get different numbers of tokens from a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knnstore.lm import (
    KNNLM,
    Drafts,
    KNNSettings,
    allows_gaps,
    estimate_pass_costs,
    limit_drafts,
    propose_together,
)
from knnstore.server.engine.kv_cache import BatchCache
from knnstore.server.engine.prompts import PromptState
from knnstore.server.engine.rows import Row


class Step(NamedTuple):
    """Result of one forward pass over a batch of b texts: log-probabilities of their next tokens."""

    draft_tokens: list[list[int]]
    """Ids of the draft tokens (guesses of the next tokens) that the pass read after the last token of each
    text; d of the text with most of them. Empty for a text without draft tokens."""

    log_probs: Tensor
    """Log-probabilities of all v tokens, float32, shape (b, 1 + d, v). Index 0 of the second axis predicts
    the token after the last token of each text; index i predicts the token after the i-th draft token. A text
    with fewer draft tokens has no meaningful values at the end of this axis."""


class _RowDrafts(NamedTuple):
    """The draft model of one text: guesses the next tokens of the text from the n-grams of the store."""

    revision: int
    """Revision of the store (a number that changes with every change of the store) that the draft model was
    made for."""
    drafts: Drafts
    """The draft model itself."""


class Batch:
    """The texts that get their next tokens in the same decoding steps, with their common KV cache.

    One `Row` of the batch is one text.

    Args:
        lm: the model, with its store.
    """

    def __init__(self, lm: KNNLM) -> None:
        self.rows: list[Row] = []
        """The texts, in the order of the batch."""
        self._lm = lm
        self._kv_cache = BatchCache()
        self._row_drafts: dict[Row, _RowDrafts] = {}
        self._allows_gaps = allows_gaps(lm.base)

    def fits(self, row: Row) -> bool:
        """Check whether a text can join the batch; always True, because shorter texts are padded."""
        return True

    @torch.inference_mode()
    def add_row(self, row: Row, prompt_state: PromptState) -> None:
        """Add a text to the batch, with the KV cache of its tokens.

        Args:
            row: the text. Its last token is not in the KV cache yet, because the next step reads it.
            prompt_state: the model's state after all tokens of the text except the last one. The state is
                copied.
        """
        self._kv_cache.add_row(prompt_state.layers, prompt_state.text.fork())
        self.rows.append(row)

    @torch.inference_mode()
    def remove_rows(self, finished: Sequence[Row]) -> None:
        """Remove texts from the batch. The order of the other texts may change.

        The last text of the batch moves to the index of the removed text.

        Args:
            finished: the texts to remove; all of them must be in the batch. An empty sequence changes
                nothing.
        """
        for row in list(finished):  # a copy: `finished` may be `self.rows`
            index = self.rows.index(row)
            self._kv_cache.remove_row(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
            self._row_drafts.pop(row, None)

    def predict_next(self, settings: Sequence[KNNSettings]) -> Step:
        """Run one forward pass over the last token of each text, and return its predictions.

        The pass also reads draft tokens (guesses of the next tokens) of the texts whose settings use n-grams.
        The tokens that the pass read stay in the KV cache only if `keep_accepted_tokens` is called
        afterwards. So a failed step can be repeated. The batch must have at least one text.

        Args:
            settings: the retrieval settings of each text, in the order of `rows`.

        Returns:
            The draft tokens that were read, and the log-probabilities of the next tokens of each text.
        """
        draft_tokens = self._propose_tokens(settings)
        count, device = 1 + max(map(len, draft_tokens)), self._lm.base.device
        # A text with fewer draft tokens repeats its last token: these positions are never used.
        read = [
            ([row.tokens[-1], *draft] + [row.tokens[-1]] * count)[:count]
            for row, draft in zip(self.rows, draft_tokens, strict=True)
        ]
        with torch.inference_mode():
            cache = self._kv_cache.begin_step(count)
            lengths = torch.tensor(self._kv_cache.lengths, device=device)
            output = self._lm(
                input_ids=torch.tensor(read, device=device),
                attention_mask=self._kv_cache.attention_mask(count).to(device),
                position_ids=lengths[:, None] + torch.arange(count, device=device),
                cache=cache,
                use_cache=True,
                knn=settings,
            )
            return Step(draft_tokens, output.logits.float().log_softmax(-1))

    def keep_accepted_tokens(self, step: Step, taken: Sequence[int]) -> None:
        """Keep the KV cache of a step, and tell the draft models how many of their guesses were right.

        Args:
            step: the result of the last `predict_next`.
            taken: number of tokens that were chosen for each text from this step, at least 1. The first
                tokens that the step read stay in the KV cache, as many; the later tokens are dropped.
        """
        self._kv_cache.keep_first_tokens(taken)
        cost = estimate_pass_costs(len(self.rows))[step.log_probs.shape[1] - 1]
        for row, draft, count in zip(self.rows, step.draft_tokens, taken, strict=True):
            if row in self._row_drafts:
                self._row_drafts[row].drafts.learn(len(draft), count - 1, cost)

    def _propose_tokens(self, settings: Sequence[KNNSettings]) -> list[list[int]]:
        """Return guesses of the next tokens (draft tokens) of each text, as token ids.

        A text gets at most one draft token less than it may still get tokens (`Row.tokens_left`), because the
        step also predicts the token after the last draft token. There are no draft tokens for several texts
        if the model's attention does not allow gaps in their KV cache.

        Args:
            settings: the retrieval settings of each text.
        """
        if len(self.rows) > 1 and not self._allows_gaps:
            return [[] for _ in self.rows]
        proposed = propose_together(
            [self._get_draft_model(row, knn) for row, knn in zip(self.rows, settings, strict=True)],
            [np.array(row.tokens) for row in self.rows],
            limit_drafts(
                self._lm.base.config, self._kv_cache.lengths, [row.tokens_left - 1 for row in self.rows]
            ),
        )
        return [draft.tolist() for draft in proposed]

    def _get_draft_model(self, row: Row, settings: KNNSettings) -> Drafts | None:
        """Return the draft model of a text: it guesses next tokens. None if the settings use no n-grams.

        The draft model of the previous step is returned again if the store has not changed since. Otherwise a
        new one is made. Without n-grams there is no draft model, because guesses are found with the suffix
        array of the n-grams.

        Args:
            row: the text.
            settings: the retrieval settings of the text.
        """
        if settings.ngrams is None:
            self._row_drafts.pop(row, None)
            return None
        current, revision = self._row_drafts.get(row), self._lm.store.revision()
        if current is None or current.revision != revision:
            current = self._row_drafts[row] = _RowDrafts(revision, Drafts(self._lm.store, settings))
        return current.drafts
