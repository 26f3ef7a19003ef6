"""Drafts of the next tokens: what stood after the same words in the store, or in the text itself."""

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_from

_MOST = 16
"""Tokens of a draft."""
_LEAST_END, _MANY = 2, 16
"""Tokens that must have stood before a draft; more than so many are taken for as many."""
_WORTH = 0.3
"""A token is drafted where it and all before it are as probable: what a position costs beside a pass."""
_TRUST, _FORGETTING = 4.0, 0.97
"""How many tokens outweigh what is expected at first, and what stays of them a pass later."""

_MATCHED = np.arange(_MANY + 1)
_EXPECTED = np.concatenate([
    1 - 0.8 / (_MATCHED + 0.1),  # repeated in the text, after so many that matched
    1 - 4 / (_MATCHED + 4),  # in one place of the store
    0.95 * np.linspace(0, 1, _MANY + 1),  # in so many sixteenths of several places
]).clip(0)  # fmt: skip
"""How probable a drafted token is at first, by its kind."""
_REPEATED, _ONE, _SEVERAL = 0, _MANY + 1, 2 * (_MANY + 1)


class Drafts:
    """Proposes what comes next in one text: what stood after its end in the store, or in the text itself.

    A token is the likelier, the more tokens stood before it there, and the more places of the store agree.
    How likely is learned as the text is written; where it is too little there is no draft.

    Args:
        store: what is drafted from.
        settings: of which the selection counts.
    """

    def __init__(self, store: Reader, settings: KNNSettings) -> None:
        self._store, self._selection = store, settings.selection
        self._counts: NGramCounts | None = None
        self._accepted, self._drafted = np.zeros((2, len(_EXPECTED)))
        self._kinds = np.zeros(0, np.int64)
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
        stored, repeated = draft_from(self._counts.text, text, _MOST, _LEAST_END), _repeated(text)
        _, tokens, self._kinds = max(
            self._expected(stored, _ONE), self._expected(repeated, _REPEATED), key=lambda one: one[0]
        )
        return tokens[: max(0, most)]

    def _expected(self, draft: Draft, kind: int) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """How many tokens of a draft will be accepted, and those worth drafting, with their kinds."""
        kinds = kind + (draft.matched + np.arange(len(draft.tokens))).clip(max=_MANY)
        kinds = np.where(draft.shares > 0, _SEVERAL + (draft.shares * _MANY).astype(np.int64), kinds)
        drafted = self._drafted[kinds] + _TRUST
        probs = ((self._accepted[kinds] + _TRUST * _EXPECTED[kinds]) / drafted).cumprod()
        worth = int((probs >= _WORTH).sum())
        return float(probs[:worth].sum()), draft.tokens[:worth], kinds[:worth]

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in how many tokens of the last draft were accepted."""
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._accepted *= _FORGETTING
        self._drafted *= _FORGETTING
        np.add.at(self._accepted, self._kinds[:accepted], 1)
        np.add.at(self._drafted, self._kinds[: min(drafted, accepted + 1)], 1)  # a wrong one ends a draft


def _repeated(text: NDArray[np.int64]) -> Draft:
    """What stood last after the end of a text in the text itself, again and again if enough matched."""
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
