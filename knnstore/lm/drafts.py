"""Drafts of the next tokens: the tokens that followed the same words in the store, or earlier in the text."""

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.settings import KNNSettings
from knnstore.store import Draft, NGramCounts, Reader, draft_from

_MOST = 16
"""Most tokens of a draft."""
_LEAST_END, _MANY = 2, 16
"""Tokens that must match before a draft, and the number above which further matches no longer count."""
_WORTH = 0.3
"""A token is drafted if the probability that it and all before it are accepted is at least this: about the
cost of one more position, as a part of the cost of a pass."""
_TRUST, _FORGETTING = 4.0, 0.97
"""Tokens that weigh as much as the initial estimate, and the factor by which older passes fade."""

_MATCHED = np.arange(_MANY + 1)
_EXPECTED = np.concatenate(
    [
        1 - 0.8 / (_MATCHED + 0.1),  # repeated in the text, after so many that matched
        1 - 4 / (_MATCHED + 4),  # in one place of the store
        0.95 * np.linspace(0, 1, _MANY + 1),  # in so many sixteenths of several places
    ]
).clip(0)
"""Initial estimate of the probability that a drafted token is accepted, by its kind."""
_REPEATED, _ONE, _SEVERAL = 0, _MANY + 1, 2 * (_MANY + 1)


class Drafts:
    """Proposes the next tokens of one text: those that followed its last words in the store, or in the text.

    A drafted token is more probable to be accepted if more tokens before it match, and if more places of the
    store agree. The probabilities are learned while the text is generated. If they are too low, the draft is
    empty.

    Args:
        store: the store to draft from.
        settings: only their selection is used.
    """

    def __init__(self, store: Reader, settings: KNNSettings) -> None:
        self._store, self._selection = store, settings.selection
        self._counts: NGramCounts | None = None
        self._accepted, self._drafted = np.zeros((2, len(_EXPECTED)))
        self._kinds = np.zeros(0, np.int64)
        self.passes, self.tokens = 0, 0
        """Passes of the model, and tokens that were generated in them."""

    def propose(self, text: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Draft the next tokens.

        Args:
            text: all tokens so far, shape (n,).
            most: the largest number of tokens to return.

        Returns:
            The drafted tokens, int64; empty where no draft is worth its cost.
        """
        if self._counts is None:  # once for a text: drafts do not change the generated text
            self._counts = self._store.ngrams(self._selection)
        stored, repeated = draft_from(self._counts.text, text, _MOST, _LEAST_END), _repeated(text)
        _, tokens, self._kinds = max(
            self._expected(stored, _ONE), self._expected(repeated, _REPEATED), key=lambda one: one[0]
        )
        return tokens[: max(0, most)]

    def _expected(self, draft: Draft, kind: int) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """Return the expected number of accepted tokens, and the tokens worth drafting with their kinds."""
        kinds = kind + (draft.matched + np.arange(len(draft.tokens))).clip(max=_MANY)
        kinds = np.where(draft.shares > 0, _SEVERAL + (draft.shares * _MANY).astype(np.int64), kinds)
        drafted = self._drafted[kinds] + _TRUST
        probs = ((self._accepted[kinds] + _TRUST * _EXPECTED[kinds]) / drafted).cumprod()
        worth = int((probs >= _WORTH).sum())
        return float(probs[:worth].sum()), draft.tokens[:worth], kinds[:worth]

    def learn(self, drafted: int, accepted: int) -> None:
        """Update the probabilities by the number of tokens of the last draft, and of its accepted tokens."""
        self.passes, self.tokens = self.passes + 1, self.tokens + accepted + 1
        self._accepted *= _FORGETTING
        self._drafted *= _FORGETTING
        np.add.at(self._accepted, self._kinds[:accepted], 1)
        np.add.at(self._drafted, self._kinds[: min(drafted, accepted + 1)], 1)  # a wrong one ends a draft


def _repeated(text: NDArray[np.int64]) -> Draft:
    """Draft the tokens that followed the last earlier place where the text's longest end stands.

    They are repeated in a circle up to the length of a draft. Returns an empty draft if fewer than
    `_LEAST_END` tokens match.
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
