"""Text as its letters, without the spaces between: the same however its lines are broken or its words cut."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Letters:
    """What each token is spelled with.

    Args:
        spellings: of each token of the vocabulary, spaces left out.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        self._letters = np.frombuffer("".join(spellings).encode("utf-32-le", "surrogatepass"), "<u4")
        self._ends = np.cumsum([0, *map(len, spellings)])

    def of(self, tokens: NDArray[np.unsignedinteger]) -> NDArray[np.uint32]:
        """The letters of a text, given by its tokens, uint32, shape (n,)."""
        known = np.minimum(tokens.astype(np.int64), len(self._ends) - 2)
        starts = self._ends[known]
        lengths = self._ends[known + 1] - starts
        before = np.cumsum(lengths) - lengths
        at = np.repeat(starts - before, lengths) + np.arange(lengths.sum())
        found: NDArray[np.uint32] = self._letters[at]
        return found
