"""What the n-grams of the stored text say comes next: in texts that are scored, or are being written."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.lm.mixing import Continuation
from knnstore.lm.reading import Tokens
from knnstore.lm.retrieval.prefix_states import WrittenTexts
from knnstore.lm.settings import KNNSettings
from knnstore.store import Matches, NGramCounts, Occurrence, Reader, Suffixes


class ReadNGrams:
    """The n-grams of whole documents.

    Args:
        counts: of stored text.
        texts: token ids, shapes (n_i,).
        order: of the settings.
    """

    def __init__(self, counts: NGramCounts, texts: Sequence[NDArray[np.integer[Any]]], order: int) -> None:
        self.counts, self.order = counts, order
        self.matches = Matches.of(counts, texts)

    @classmethod
    def of(
        cls, store: Reader, texts: Sequence[NDArray[np.integer[Any]]], settings: KNNSettings
    ) -> Self | None:
        """Look up texts as the settings say; None where they count no n-grams."""
        if settings.ngrams is None:
            return None
        return cls(store.ngrams(settings.selection), texts, settings.ngrams.order)

    def occurrences(self, positions: NDArray[np.int64], most: int) -> list[list[Occurrence]]:
        """Where the tokens at some positions of the first text were found; see `Matches.occurrences`."""
        return self.matches.occurrences(self.matches.firsts[0] + positions - 1, self.order, most)

    def gold(self, documents: Tokens, positions: Tokens) -> tuple[Tensor, Tensor]:
        """What is said of n tokens, given by document and position.

        Returns:
            Their probabilities, float32, nan where nothing is counted, shape (n,); and the longest end of
            what comes before each, see `Continuation`, int64, shape (n, 3).
        """
        at = self.matches.firsts[documents] + positions - 1
        probs = torch.from_numpy(self.matches.gold(at, self.order))
        if not self.counts.unigrams.any():
            probs.fill_(torch.nan)
        return probs, _side_by_side(self.matches.suffixes(at, self.order))


class WrittenNGrams:
    """The n-grams that positions of a forward pass are predicted from.

    Args:
        matches: of the ends of the texts.
        at: the context of each position, -1 for padding, shape (n,).
        counts: of stored text.
        order: of the settings.
    """

    def __init__(self, matches: Matches, at: NDArray[np.int64], counts: NGramCounts, order: int) -> None:
        self._matches, self._at, self._counts, self._order = matches, at, counts, order

    @classmethod
    def of(
        cls,
        store: Reader,
        settings: KNNSettings,
        written: WrittenTexts,
        kept: Tensor,
    ) -> Self | None:
        """Look up the ends of texts; None where no n-grams are counted, or there are none.

        Args:
            store: where they are counted.
            settings: in force.
            written: the texts.
            kept: indices into the positions of the pass, int64, shape (n,), in any order.
        """
        if settings.ngrams is None:
            return None
        counts = store.ngrams(settings.selection)
        if not counts.unigrams.any():
            return None
        cuts = [max(0, behind - settings.ngrams.order) for behind in written.behind]
        texts = [text[cut:] for text, cut in zip(written.tokens, cuts, strict=True)]
        begins = [whole and not cut for whole, cut in zip(written.is_whole, cuts, strict=True)]
        matches = Matches.of(counts, texts, begins)
        at = written.places(matches.firsts - cuts, kept)
        return cls(matches, at, counts, settings.ngrams.order)

    def rows(self, rows: slice, vocabulary: int, device: torch.device) -> Continuation:
        """What they say at some of the n positions; nothing at padding."""
        at = self._at[rows]
        asked = np.flatnonzero(at >= 0)
        found = self._matches.distribution(at[asked], self._order)
        weights, tokens = in_columns(asked[found.rows], found.probs, found.tokens, len(at))
        rest = np.zeros(len(at), np.float32)
        rest[asked] = found.rest
        suffixes = torch.zeros((len(at), 3), dtype=torch.int64)
        suffixes[asked] = _side_by_side(found.suffixes)
        unigrams = torch.from_numpy(self._counts.unigrams)
        if len(unigrams) < vocabulary:
            unigrams = pad(unigrams, (0, vocabulary - len(unigrams)))
        return Continuation(
            weights.to(device),
            tokens.to(device),
            rest=torch.from_numpy(rest).to(device),
            unigrams=unigrams.to(device),
            suffixes=suffixes.to(device),
        )


def in_columns(
    rows: NDArray[np.int64], probs: NDArray[np.float32], tokens: NDArray[np.int64], count: int
) -> tuple[Tensor, Tensor]:
    """Entries of so many rows, given by row, ascending, side by side: probabilities and tokens."""
    if count == 1 and len(rows):
        return torch.from_numpy(probs)[None], torch.from_numpy(tokens)[None]
    per_row = np.bincount(rows, minlength=count)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    shape = count, max(1, int(per_row.max(initial=0)))
    weights, spread = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    weights[rows, column], spread[rows, column] = probs, tokens
    return torch.from_numpy(weights), torch.from_numpy(spread)


def _side_by_side(suffixes: Suffixes) -> Tensor:
    """The longest ends of contexts, as `Continuation` has them."""
    return torch.from_numpy(np.stack(suffixes, 1))
