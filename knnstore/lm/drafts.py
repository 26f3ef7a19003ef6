"""Drafts of the next tokens (`Drafts`), copied from stored text or from earlier places of the text."""

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_from

_MOST = 16
"""Largest number of tokens of a draft."""
_LEAST_END, _MANY = 2, 16
"""The last 2 tokens must match before a draft is made; matches of 16 tokens and more count alike."""
_WORTH = 0.3
"""A token is drafted if the probability that it and all drafted tokens before it are accepted is at least
this, which is about the cost of one more position as a fraction of the cost of a forward pass."""
_TRUST, _FORGETTING = 4.0, 0.97
"""Weight of the initial estimate, in tokens; and the factor by which each pass reduces the weight of earlier
passes."""

_MATCHED = np.arange(_MANY + 1)
_EXPECTED = np.concatenate(
    [
        1 - 0.8 / (_MATCHED + 0.1),  # repeated in the text, after so many that matched
        1 - 4 / (_MATCHED + 4),  # in one place of the store
        0.95 * np.linspace(0, 1, _MANY + 1),  # in so many sixteenths of several places
    ]
).clip(0)
"""Initial estimate of the probability that a drafted token is accepted, for each kind of drafted token."""
_REPEATED, _ONE, _SEVERAL = 0, _MANY + 1, 2 * (_MANY + 1)


class Drafts:
    """Proposes the next tokens of one text, for speculative decoding.

    A draft is a guess of several next tokens, which the model then checks in one forward pass. The draft is
    copied from the store, or from an earlier place of the text, where the same last tokens occurred. A
    drafted token is more likely to be accepted if more tokens before it match, and if more places in the
    store agree. The probabilities are learned while the text is generated. If they are too low, the draft is
    empty.

    Args:
        store: the store whose text is copied.
        settings: settings of the text; only `selection` (the stored documents to copy from) is used.
    """

    def __init__(self, store: Reader, settings: KNNSettings) -> None:
        self._store, self._selection = store, settings.selection
        self._counts: NGramCounts | None = None
        self._accepted, self._drafted = np.zeros((2, len(_EXPECTED)))
        self._kinds = np.zeros(0, np.int64)
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
        stored, repeated = draft_from(self._counts.text, text, _MOST, _LEAST_END), _repeated(text)
        _, tokens, self._kinds = max(
            self._expected(stored, _ONE),
            self._expected(repeated, _REPEATED),
            key=lambda candidate: candidate[0],
        )
        return tokens[: max(0, most)]

    def _expected(self, draft: Draft, kind: int) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """Cut a draft where further tokens are not worth their cost; estimate the number of accepted tokens.

        A token is worth its cost if it is likely enough that it and all tokens before it are accepted.

        Args:
            draft: the drafted tokens.
            kind: index of the first acceptance probability for this source: `_REPEATED` for a draft from the
                text itself, `_ONE` for a draft from the store. The kind of a token is the index of its own
                learned acceptance probability.

        Returns:
            The expected number of accepted tokens, the remaining tokens, and the kind of each remaining
            token.
        """
        kinds = kind + (draft.matched + np.arange(len(draft.tokens))).clip(max=_MANY)
        kinds = np.where(draft.shares > 0, _SEVERAL + (draft.shares * _MANY).astype(np.int64), kinds)
        drafted = self._drafted[kinds] + _TRUST
        probs = ((self._accepted[kinds] + _TRUST * _EXPECTED[kinds]) / drafted).cumprod()
        worth = int((probs >= _WORTH).sum())
        return float(probs[:worth].sum()), draft.tokens[:worth], kinds[:worth]

    def learn(self, drafted: int, accepted: int) -> None:
        """Update the acceptance probabilities after the model checked the last proposed draft.

        Args:
            drafted: number of tokens of the draft.
            accepted: how many tokens at the beginning of the draft were accepted.
        """
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._accepted *= _FORGETTING
        self._drafted *= _FORGETTING
        np.add.at(self._accepted, self._kinds[:accepted], 1)
        np.add.at(
            self._drafted, self._kinds[: min(drafted, accepted + 1)], 1
        )  # a rejected token ends a draft


def _repeated(text: NDArray[np.int64]) -> Draft:
    """Draft the tokens that followed an earlier occurrence of the text's last tokens.

    A draft is a guess of several next tokens. The function compares the last tokens of the text with the
    tokens at earlier places, and takes the place where most tokens match; of several such places, it takes
    the latest. At most `_MANY` tokens are compared. If fewer than `_LEAST_END` tokens match, the draft is
    empty. If fewer tokens follow the place than a draft has, they are repeated cyclically.

    Args:
        text: the tokens so far, at least one.
    """
    ends = np.flatnonzero(text[:-1] == text[-1])
    length, longer = 0, ends
    while len(longer) and length < _MANY:
        ends, length = longer, length + 1
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
    if length < _LEAST_END:
        return Draft(0, text[:0], np.zeros(0))
    after = int(ends[-1]) + 1
    drafted = text[after + np.arange(_MOST) % (len(text) - after)]
    return Draft(length, drafted, np.zeros(_MOST))
