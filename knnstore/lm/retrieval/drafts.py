"""Drafts of the next tokens: what stood after the same words in the store, or in the text itself."""

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_from

_MOST = 16
"""Tokens of a draft."""
_LEAST_END, _MANY = 2, 16
"""Tokens that must have stood before a draft; more than so many are taken for as many."""
_WORTH = 0.25
"""A token is drafted where it and all before it are as probable: what a position costs beside a pass."""
_TRUST, _FORGETTING = 4.0, 0.97
"""How many tokens outweigh what is expected at first, and what stays of them a pass later."""


class Drafts:
    """Proposes what comes next in one text: what stood after its end in the store, or in the text itself.

    The more tokens stood before, the likelier is what came after. How likely is learned as the text is
    written; where it is too little there is no draft.

    Args:
        store: what is drafted from.
        settings: of which the selection counts.
    """

    def __init__(self, store: Reader, settings: KNNSettings) -> None:
        self._store, self._selection = store, settings.selection
        self._counts: NGramCounts | None = None
        self._accepted, self._drafted = np.zeros((2, _MANY + 1))
        self._matched = 0
        self.passes, self.tokens = 0, 0
        """Of the model, and that were written with them."""

    def propose(self, text: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Draft the next tokens.

        Args:
            text: all tokens so far, shape (n,).
            most: tokens that may follow.

        Returns:
            Shape (at most `most`,).
        """
        if self._counts is None:  # once for a text: what is drafted does not change what is written
            self._counts = self._store.ngrams(self._selection)
        draft = draft_from(self._counts.text, text, _MOST, _LEAST_END)
        draft = _draft_from_itself(text, max(_LEAST_END, draft.matched)) or draft
        self._matched = min(draft.matched, _MANY)
        return draft.tokens[: max(0, min(self._length(), most))]

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in how many tokens of the last draft were accepted."""
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._accepted *= _FORGETTING
        self._drafted *= _FORGETTING
        self._accepted[self._matched] += accepted
        self._drafted[self._matched] += min(drafted, accepted + 1)  # the first that is wrong ends a draft

    def _length(self) -> int:
        """How many tokens are worth drafting after so many that matched."""
        if self._matched < _LEAST_END:
            return 0
        expected = 1 - 1.2 / self._matched
        accepted, drafted = self._accepted[self._matched], self._drafted[self._matched]
        share = (accepted + _TRUST * expected) / (drafted + _TRUST)
        return int(np.log(_WORTH) / np.log(share)) if share < 1 else _MOST


def _draft_from_itself(text: NDArray[np.int64], least: int) -> Draft | None:
    """What stood last after the end of a text in the text itself; None where too little is equal."""
    ends = np.flatnonzero(text[:-1] == text[-1])
    length, longer = 0, ends
    while len(longer) and length < _MANY:
        ends, length = longer, length + 1
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[-1 - length]]
    if length < least:
        return None
    after = int(ends[-1]) + 1
    return Draft(length, text[after : after + _MOST])
