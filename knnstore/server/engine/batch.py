"""The texts that are decoded together, as one left-padded batch. Each step adds a token to every text.

A text joins after its prefill, with the KV cache of its prompt and its first generated token. So a step reads
exactly one token of each text, new or old. Shorter texts are padded on the left and masked there. If the
batch has only one text, the step also reads draft tokens (guesses of the next tokens; speculative decoding).
Each draft token that equals the chosen token saves one step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knnstore.lm import KNNLM, Drafts, KNNSettings
from knnstore.server.engine.kv_cache import BatchCache
from knnstore.server.engine.prompts import PromptState
from knnstore.server.engine.rows import Row


class Step(NamedTuple):
    """Result of one forward pass over a batch of b texts: log-probabilities of their next tokens."""

    draft_tokens: list[int]
    """Ids of the d draft tokens (guesses of the next tokens) that the pass read after the last token of the
    text. Empty if the batch has several texts, or if no draft was found."""

    log_probs: Tensor
    """Log-probabilities of all v tokens, float32, shape (b, 1 + d, v). Index 0 of the second axis predicts
    the token after the last token of each text; index i predicts the token after the i-th draft token."""


class _RowDrafts(NamedTuple):
    """The draft model of one text: guesses the next tokens of the text from the n-grams of the store."""

    row: Row
    """The text whose next tokens are guessed."""
    revision: int
    """Revision of the store (a number that changes with every change of the store) that the draft model was
    made for."""
    drafts: Drafts
    """The draft model itself."""

    def propose_tokens(self) -> list[int]:
        """Return guesses of the text's next tokens (draft tokens), as token ids; empty if there are none.

        The list has at most `Row.tokens_left` - 1 tokens, because the step also predicts the token after the
        last draft token.
        """
        tokens: list[int] = self.drafts.propose(np.array(self.row.tokens), self.row.tokens_left - 1).tolist()
        return tokens


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
        self._row_drafts: _RowDrafts | None = None

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
        if not self.rows:
            self._row_drafts = None  # frees its n-gram counts

    def predict_next(self, settings: Sequence[KNNSettings]) -> Step:
        """Run one forward pass over the last token of each text, and return its predictions.

        If the batch has a single text whose settings use n-grams, the pass also reads draft tokens (guesses
        of the next tokens). The tokens that the pass read stay in the KV cache only if `keep_tokens` is
        called afterwards. So a failed step can be repeated. The batch must have at least one text.

        Args:
            settings: the retrieval settings of each text, in the order of `rows`.

        Returns:
            The draft tokens that were read, and the log-probabilities of the next tokens of each text.
        """
        self._row_drafts = self._get_row_drafts(self.rows[0], settings[0]) if len(self.rows) == 1 else None
        draft_tokens = [] if self._row_drafts is None else self._row_drafts.propose_tokens()
        count, device = 1 + len(draft_tokens), self._lm.base.device
        with torch.inference_mode():
            cache = self._kv_cache.begin_step(count)
            lengths = torch.tensor(self._kv_cache.lengths, device=device)
            columns = torch.arange(max(self._kv_cache.lengths) + count, device=device)
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
        """Keep the KV cache of a step, and tell the draft model how many of its guesses were right.

        Args:
            step: the result of the last `predict_next`.
            taken: number of tokens that were chosen for each text from this step, at least 1. The first
                `taken` tokens that the step read stay in the KV cache; the later tokens are dropped.
        """
        self._kv_cache.keep_tokens(taken)
        if self._row_drafts is not None:
            self._row_drafts.drafts.learn(len(step.draft_tokens), taken - 1)

    def _get_row_drafts(self, row: Row, settings: KNNSettings) -> _RowDrafts | None:
        """Return the draft model of a text, which guesses its next tokens; None if no n-grams are used.

        The draft model of the previous step is returned again if it belongs to the same text and the store
        has not changed since. Otherwise a new one is made. Without n-grams there is no draft model, because
        guesses are found with the suffix array of the n-grams.

        Args:
            row: the text.
            settings: the retrieval settings of the text.
        """
        if settings.ngrams is None:
            return None
        current, revision = self._row_drafts, self._lm.store.revision()
        if current is not None and current.row is row and current.revision == revision:
            return current
        return _RowDrafts(row, revision, Drafts(self._lm.store, settings))
