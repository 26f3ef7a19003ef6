"""Judging fitted settings: the halves of two-fold cross-fitting, and perplexities with intervals.

Tokens of one document are not independent, so whole documents are divided. Long documents are cut into
blocks; see `assign_blocks`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import InputError
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.scoring import MIN_DOCUMENT_BLOCKS, Interval, assign_blocks, compute_interval

MIN_DOCUMENTS = MIN_DOCUMENT_BLOCKS
"""Least number of documents to fit settings on; blocks of long documents count like documents."""
MIN_TOKENS = 1_000
"""Least number of tokens to fit settings on."""


def check_text_size(documents: NDArray[np.int64]) -> None:
    """Check that a text is long enough to fit settings on.

    Args:
        documents: index of each token's document, int64, shape (n,).

    Raises:
        InputError: there are fewer than `MIN_TOKENS` tokens, or fewer than `MIN_DOCUMENTS` documents. If
            there are few documents, they are cut into blocks, and blocks are counted.
    """
    blocks, tokens = len(np.unique(assign_blocks(documents))), len(documents)
    if blocks < MIN_DOCUMENTS or tokens < MIN_TOKENS:
        count = len(np.unique(documents))
        raise InputError(
            f"{count:,} documents of {tokens:,} tokens are too little to fit on: give at least "
            f"{MIN_DOCUMENTS} documents and {MIN_TOKENS:,} tokens, or {2 * MIN_TOKENS:,} tokens in fewer "
            "documents; 50,000 tokens are better"
        )


class Judge:
    """Computes perplexities of a text with 95 % confidence intervals over its documents.

    If the text has few documents, they are cut into blocks, and the intervals are over blocks.

    Args:
        scored: the text.

    Attributes:
        base: perplexity of the model alone.
    """

    def __init__(self, scored: ScoredText) -> None:
        self._blocks = assign_blocks(scored.documents.numpy())
        self._lengths = np.bincount(self._blocks)
        self._base = scored.lm_log_probs
        self.base = compute_interval(self._sum_losses(self._base), self._lengths)

    def __call__(self, log_probs: Tensor) -> tuple[Interval, Interval]:
        """Return the perplexity, and its ratio to the perplexity of the model alone.

        Both values have a 95 % confidence interval.

        Args:
            log_probs: log p of every token of the text, shape (n,).
        """
        return compute_interval(self._sum_losses(log_probs), self._lengths), self.perplexity_ratio(
            log_probs, self._base
        )

    def perplexity_ratio(self, log_probs: Tensor, reference: Tensor) -> Interval:
        """Return the ratio of two perplexities, of `log_probs` and of `reference`, with its 95 % interval.

        Args:
            log_probs: log p of every token of the text, shape (n,).
            reference: log p of every token by the settings (or the model) to compare with, shape (n,).
        """
        return compute_interval(self._sum_losses(log_probs.double() - reference.double()), self._lengths)

    def _sum_losses(self, log_probs: Tensor) -> NDArray[np.float64]:
        """Return the sum of the negative log-probabilities of each document or block, float64."""
        return -np.bincount(self._blocks, log_probs.double().numpy()).astype(np.float64)


def mask_first_half(documents: Tensor) -> Tensor:
    """Divide a text into two halves of about the same number of tokens, and return a mask of the first half.

    Whole documents are assigned, the longest first, to the half with fewer tokens. If long documents are cut
    into blocks, the first half is the text before its middle, so that at most one document is in both halves.

    Args:
        documents: index of each token's document, int64, shape (n,).

    Returns:
        bool, shape (n,): True for the tokens of the first half.
    """
    blocks = torch.from_numpy(assign_blocks(documents.numpy()))
    lengths = torch.bincount(blocks)
    if len(lengths) > len(np.unique(documents.numpy())):
        return ((lengths.cumsum(0) - lengths / 2) < len(documents) / 2)[blocks]
    first = torch.zeros(len(lengths), dtype=torch.bool)
    taken = [0, 0]
    for document in lengths.argsort(descending=True, stable=True).tolist():
        lighter = int(taken[1] < taken[0])
        taken[lighter] += int(lengths[document])
        first[document] = lighter == 0
    return first[blocks]
