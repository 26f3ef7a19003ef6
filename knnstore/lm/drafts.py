"""Drafts of the next tokens (`Drafts`), copied from stored text or from earlier places of the text."""

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_from

_MAX_DRAFT = 16
"""Largest number of tokens of a draft."""
_PASS_COSTS = np.append([1.0, 1.7, 2.05], 1.27 + 0.058 * np.arange(4, _MAX_DRAFT + 2))
"""Duration of a forward pass that checks 0, 1, … `_MAX_DRAFT` drafted tokens, as a multiple of a pass without
a draft: a model of 135 million float32 weights on a CPU, whose products of two or three rows take longer than
products of four."""
_MAX_COMPARED = 16
"""Largest number of matching tokens that are compared inside the text."""
_LEARNING, _FORGETTING = 0.4, 0.99
"""Step size with which the caution of a source follows its errors; and the factor by which each pass brings
the logarithm of the caution back towards 0."""
_ALLOWED_LOSS, _ALLOWANCE = 0.005, 3.0
"""Drafts pause while the passes of a text have taken longer than passes without drafts would have taken, by
more than this fraction and this number of passes."""
_LEAST_IN_PAUSE = 8
"""Least number of matching tokens for a draft in a pause, so that a text that begins to repeat itself is
drafted again."""


class Drafts:
    """Proposes the next tokens of one text, for speculative decoding.

    A draft is a guess of several next tokens, which the model then checks in one forward pass. The draft is
    copied from one of two sources, the text itself or the store, where the same last tokens occurred.

    Each drafted token has a *risk*, the negative logarithm of the probability that it is accepted. The risk
    is lower if more tokens match, and if more places of the store agree. The probability that the first n
    tokens of a draft are all accepted is exp(-caution × (sum of their risks)). The caution of a source begins
    at 1. It is learned while the text is generated: it grows if fewer drafted tokens are accepted than
    expected. The length of a draft maximizes the expected number of tokens divided by the duration of the
    pass. If no length is better than a pass without a draft, the draft is empty. Drafts also pause while they
    have cost more time than they saved, so text that cannot be guessed takes hardly longer than without. In a
    pause, only long matches are drafted.

    Args:
        store: the store whose text is copied.
        settings: settings of the text; only `selection` (the stored documents to copy from) is used.
    """

    def __init__(self, store: Reader, settings: KNNSettings) -> None:
        self._store, self._selection = store, settings.selection
        self._counts: NGramCounts | None = None
        self._log_cautions = np.zeros(2)
        self._source, self._risks = 0, np.zeros(0)
        self._cost = 0.0  # of all passes, as a multiple of a pass without a draft
        self.passes, self.tokens = 0, 0
        """Number of forward passes, and number of tokens that they generated."""

    def propose(self, text: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Draft the next tokens. `learn` must be called for each draft before the next call.

        Args:
            text: all tokens so far, shape (n,).
            most: the largest number of tokens to return.

        Returns:
            The drafted tokens, int64, shape (m,); empty if no draft is worth its cost.
        """
        if self._counts is None:  # once for a text: drafts do not change the generated text
            self._counts = self._store.ngrams(self._selection)
        best_speed, proposed, self._risks = 1.0, text[:0], np.zeros(0)
        length = min(most, _MAX_DRAFT)
        if length < 1:
            return proposed
        is_paused = self._cost > (1 + _ALLOWED_LOSS) * self.tokens + _ALLOWANCE
        repeated, stored = _draft_repetition(text, length), draft_from(self._counts.text, text, length)
        sources = ((repeated, _estimate_repetition_risks), (stored, _estimate_stored_risks))
        for source, (draft, estimate_risks) in enumerate(sources):
            if not len(draft.tokens) or (is_paused and draft.matched < _LEAST_IN_PAUSE):
                continue
            risks = estimate_risks(draft)
            expected_tokens = 1 + self._accept_probs(source, risks.cumsum()).cumsum()
            speeds = expected_tokens / _PASS_COSTS[1 : len(risks) + 1]
            stop = int(speeds.argmax()) + 1
            if speeds[stop - 1] > best_speed:
                best_speed, proposed = speeds[stop - 1], draft.tokens[:stop]
                self._source, self._risks = source, risks[:stop]
        return proposed

    def learn(self, drafted: int, accepted: int) -> None:
        """Update the caution of the draft's source after the model checked the last proposed draft.

        Args:
            drafted: number of tokens of the draft.
            accepted: how many tokens at the beginning of the draft were accepted.
        """
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._cost += _PASS_COSTS[drafted]
        checked = self._risks[: min(drafted, accepted + 1)]  # a rejected token ends a draft
        self._log_cautions *= _FORGETTING
        if len(checked):
            error = self._accept_probs(self._source, checked).sum() - accepted
            self._log_cautions[self._source] += _LEARNING * error

    def _accept_probs(self, source: int, risks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probabilities that tokens are accepted, by their risks and the caution of the source."""
        probs: NDArray[np.float64] = np.exp(-np.exp(self._log_cautions[source]) * risks)
        return probs


def _estimate_repetition_risks(draft: Draft) -> NDArray[np.float64]:
    """Estimate the risk of each token of a draft from the text itself, float64, shape (m,)."""
    matched = draft.matched + np.arange(len(draft.tokens))
    risks: NDArray[np.float64] = 4 / matched.clip(max=_MAX_COMPARED) ** 1.5
    return risks


def _estimate_stored_risks(draft: Draft) -> NDArray[np.float64]:
    """Estimate the risk of each token of a draft from the store, float64, shape (m,).

    The risk is lower if more tokens match; where several places were found, also if more of them agree.
    """
    matched = draft.matched + np.arange(len(draft.tokens))
    is_single = draft.shares == 0
    risks: NDArray[np.float64] = np.where(is_single, 5, 2) / matched
    risks[~is_single] -= 1.5 * np.log(draft.shares[~is_single])
    return risks


def _draft_repetition(text: NDArray[np.int64], most: int) -> Draft:
    """Draft the tokens that followed an earlier occurrence of the text's last tokens.

    The function compares the last tokens of the text with the tokens at earlier places, and takes the place
    where most tokens match, up to `_MAX_COMPARED`; of several such places, it takes the latest. If too few
    tokens follow the place, they are repeated cyclically.

    Args:
        text: the tokens so far, at least one.
        most: number of tokens to draft.

    Returns:
        The draft; it has no tokens if the last token is new.
    """
    ends = np.flatnonzero(text[:-1] == text[-1])
    length, longer = 0, ends
    while len(longer) and length < _MAX_COMPARED:
        ends, length = longer, length + 1
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
    if not length:
        return Draft(0, text[:0], np.zeros(0))
    after = int(ends[-1]) + 1
    drafted = text[after + np.arange(most) % (len(text) - after)]
    return Draft(length, drafted, np.zeros(most))
