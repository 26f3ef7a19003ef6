"""Drafts of the next tokens, copied from stored text or from earlier places of the text.

`Drafts` drafts one text. `propose_together` drafts the texts that share a forward pass; `limit_drafts` keeps
them within the positions of the model.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import ConfigError
from knnstore.lm.reading import read_max_length
from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_continuation

_MAX_DRAFT = 16
"""Largest number of tokens of a draft."""
_MAX_COMPARED = 16
"""Largest number of matching tokens that are compared inside the text."""
_LEARNING, _FORGETTING = 0.4, 0.99
"""Step size with which the caution of a source follows its errors; and the factor by which each pass brings
the logarithm of the caution back towards 0."""
_RISK_OF_AGREED = 0.5
"""Factor of the risk of the first tokens of a draft, as long as both sources propose the same tokens."""
_ALLOWED_LOSS, _ALLOWANCE = 0.005, 3.0
"""Drafts pause while the passes of the texts have taken longer than passes without drafts would have taken,
by more than this fraction and this number of passes."""
_LEAST_IN_PAUSE = 8
"""Least number of matching tokens for a draft in a pause, so that a text that begins to repeat itself is
drafted again."""


@lru_cache
def estimate_pass_costs(rows: int) -> NDArray[np.float64]:
    """Estimate the duration of forward passes that check 0, 1, … `_MAX_DRAFT` drafted tokens of each text.

    The durations were measured with a model of 135 million float32 weights on a CPU, whose products of two or
    three rows take longer than products of four.

    Args:
        rows: number of texts in the pass, at least 1.

    Returns:
        Multiples of a pass without drafts over as many texts, shape (1 + `_MAX_DRAFT`,).
    """
    positions = rows * np.arange(1, _MAX_DRAFT + 2)
    costs: NDArray[np.float64] = np.where(positions > 3, 1.27 + 0.058 * positions, 0)
    costs += np.select([positions == 1, positions == 2, positions == 3], [1.0, 1.7, 2.05])
    if rows > 1:
        costs[1:] += 0.09 * rows
    relative_costs: NDArray[np.float64] = costs / costs[0]
    return relative_costs


class Drafts:
    """Proposes the next tokens of one text, for speculative decoding.

    A draft is a guess of several next tokens, which the model then checks in one forward pass. The draft is
    copied from one of two sources, the text itself or the store, where the same last tokens occurred.

    Each drafted token has a *risk*, the negative logarithm of the probability that it is accepted. The risk
    is lower if more tokens match, if more places of the store agree, and if both sources propose the same
    tokens. The probability that the first n tokens of a draft are all accepted is exp(-caution × (sum of
    their risks)). The caution of a source begins at 1. It is learned while the text is generated: it grows if
    fewer drafted tokens are accepted than expected. The length of a draft minimizes the expected duration per
    token. If no length is better than a pass without a draft, the draft is empty. Drafts also pause while
    they have cost more time than they saved, so text that cannot be guessed takes hardly longer than without.
    In a pause, only long matches are drafted.

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
        """Draft the next tokens of a text that is alone in its pass. See `propose_together`."""
        return propose_together([self], [text], [most])[0]

    def learn(self, drafted: int, accepted: int, cost: float | None = None) -> None:
        """Update the caution of the draft's source after the model checked the last proposed draft.

        Args:
            drafted: number of tokens of the draft.
            accepted: how many tokens at the beginning of the draft were accepted.
            cost: duration of the pass, as a multiple of the same pass without drafts; None means that the
                text was alone in the pass.
        """
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._cost += estimate_pass_costs(1)[drafted] if cost is None else cost
        checked = self._risks[: min(drafted, accepted + 1)]  # a rejected token ends a draft
        self._log_cautions *= _FORGETTING
        if len(checked):
            error = self._accept_probs(self._source, checked).sum() - accepted
            self._log_cautions[self._source] += _LEARNING * error

    def _find_candidates(self, text: NDArray[np.int64], most: int, *, is_paused: bool) -> list["_Candidate"]:
        """Return the drafts for the next tokens: at most one from each source, each of at most `most` tokens.

        The sources are the text itself, where it repeats itself, and the stored texts.

        Args:
            text: all tokens so far, shape (n,).
            most: the largest number of tokens of a draft.
            is_paused: True leaves out drafts after short matches.
        """
        if self._counts is None:  # once for a text: drafts do not change the generated text
            self._counts = self._store.ngrams(self._selection)
        if most < 1:
            return []
        repeated, stored = _draft_repetition(text, most), draft_continuation(self._counts.text, text, most)
        shorter = min(len(repeated.tokens), len(stored.tokens))
        agreed = int((repeated.tokens[:shorter] == stored.tokens[:shorter]).cumprod().sum())
        candidates = []
        sources = ((repeated, _estimate_repetition_risks), (stored, _estimate_stored_risks))
        for source, (draft, estimate_risks) in enumerate(sources):
            if len(draft.tokens) and (not is_paused or draft.matched >= _LEAST_IN_PAUSE):
                risks = estimate_risks(draft)
                risks[:agreed] *= _RISK_OF_AGREED
                gains = np.zeros(1 + _MAX_DRAFT)
                gains[1 : 1 + len(risks)] = self._accept_probs(source, risks.cumsum())
                candidates.append(_Candidate(source, draft.tokens, risks, gains.cumsum()))
        return candidates

    def _accept_probs(self, source: int, risks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probabilities that tokens are accepted, by their risks and the caution of the source."""
        probs: NDArray[np.float64] = np.exp(-np.exp(self._log_cautions[source]) * risks)
        return probs


class _Candidate(NamedTuple):
    """A draft that one source has for a text."""

    source: int
    """Number of the source: 0 is the text itself, 1 is the store."""
    tokens: NDArray[np.int64]
    """The drafted tokens, shape (m,)."""
    risks: NDArray[np.float64]
    """Risk of each token, shape (m,)."""
    gains: NDArray[np.float64]
    """Expected number of accepted tokens, if the first 0, 1, … `_MAX_DRAFT` tokens are drafted."""


def propose_together(
    each: Sequence[Drafts | None], texts: Sequence[NDArray[np.int64]], most: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Draft the next tokens of b texts that one forward pass checks together.

    The pass is as long as the longest draft, for every text. So one length is chosen for all. A length gives
    each text an expected duration per token: the duration of the pass divided by the number of tokens that
    the text is expected to get. The chosen length minimizes the sum of the squares of these durations. So the
    slow texts count most, because a batch is complete when its slowest text is, and a pass over the few texts
    that are left takes hardly less time than a pass over all. `Drafts.learn` must be called for each text
    before the next call.

    Args:
        each: the drafts of each text; None for a text that is never drafted.
        texts: all tokens so far of each text, each of shape (n,).
        most: the largest number of tokens to return for each text.

    Returns:
        The drafted tokens of each text, int64, each of shape (m,), where m may differ; empty for every text
        if no draft is worth its cost.
    """
    used = [drafts for drafts in each if drafts is not None]
    allowance = _ALLOWANCE * len(used)
    is_paused = sum(one._cost - (1 + _ALLOWED_LOSS) * one.tokens for one in used) > allowance
    candidates = [
        [] if one is None else one._find_candidates(text, min(limit, _MAX_DRAFT), is_paused=is_paused)
        for one, text, limit in zip(each, texts, most, strict=True)
    ]
    # 1) Choose the length of all drafts.
    squares = np.zeros(1 + _MAX_DRAFT)
    for found in candidates:
        gains = np.max([one.gains for one in found], axis=0) if found else 0.0
        squares += (estimate_pass_costs(len(each)) / (1 + gains)) ** 2
    length = int(squares.argmin())
    # 2) Give each text the source that is better at this length.
    proposed = []
    for one, text, found in zip(each, texts, candidates, strict=True):
        tokens = text[:0]
        if one is not None:
            one._risks = np.zeros(0)
            if found:
                best = max(found, key=lambda candidate: candidate.gains[length])
                tokens, one._risks, one._source = best.tokens[:length], best.risks[:length], best.source
        proposed.append(tokens)
    return proposed


def limit_drafts(config: Any, lengths: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the largest number of tokens that may be drafted for each of several texts of a forward pass.

    The pass reads as many tokens of each text as of the text with the longest draft. So a long draft of one
    text would lead another text, which is near its end, beyond the model's last position.

    Args:
        config: the model's configuration of transformers.
        lengths: number of tokens of each text that are in the KV cache.
        most: the largest number of tokens of a draft that each text can use.
    """
    try:
        room = read_max_length(config) - 1 - max(lengths)
    except ConfigError:  # the model has no last position
        return list(most)
    return [min(limit, room) for limit in most]


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
