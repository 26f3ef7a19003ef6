"""Positions of texts whose next tokens are to be predicted: what components look up.

Both ways of reading make the same `Contexts`: a forward pass that goes on with texts (`Contexts.of_pass`),
and documents that are scored window by window (`DocumentTexts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.text_state import TextBatch, TextState

Numbers = NDArray[np.int64]
Text = NDArray[np.integer[Any]]


class CutTexts(NamedTuple):
    """The texts of some contexts, without the tokens that are too far before every position."""

    texts: list[Text]
    is_whole: list[bool]
    """Which texts still begin where their documents begin."""
    rows: Numbers
    """Which of the contexts are positions of a text, ascending, shape (m,)."""
    owners: Numbers
    """The text of each of these rows, an index into `texts`, shape (m,)."""
    lengths: Numbers
    """How many tokens of the cut text stand before the position of each of these rows, shape (m,)."""


@dataclass(frozen=True)
class Contexts:
    """n positions in texts. A text has no prefix: the token that comes before every document is left out."""

    texts: Sequence[Text]
    """Token ids, shapes (n_i,): up to the last position at least, or all that is known of a document."""
    is_whole: Sequence[bool]
    """Which texts begin where a document begins."""
    owners: Numbers
    """The text of each position, an index into `texts`; -1 is padding, where nothing is found. Shape (n,)."""
    lengths: Numbers
    """How many tokens of its text stand before each position, shape (n,)."""
    states: Sequence[TextState]
    """The state of each text, of which the recent text is looked up; with the prefix, if there was one."""
    ends: Numbers
    """How many tokens of the state belong to each position, the last one being its own; shape (n,)."""
    known: dict[Any, Any]
    """What components have computed of the texts; all selections of the positions share it."""

    @classmethod
    def of_pass(cls, batch: TextBatch, prefix: int | None, kept: Tensor) -> Self:
        """Describe positions of a forward pass.

        Args:
            batch: the b texts after the pass over t positions of each.
            prefix: the token that comes before every document; None where none does.
            kept: indices into the b * t positions, int64, shape (n,), in any order.
        """
        texts, is_whole, headed = list[Text](), list[bool](), list[int]()
        for state, stop in zip(batch.texts, batch.stops, strict=True):
            tokens = state.tokens(0, stop)
            headed.append(int(prefix is not None and stop > 0 and tokens[0] == prefix))
            texts.append(tokens[headed[-1] :])
            is_whole.append(prefix is None or bool(headed[-1]))
        at = kept.cpu().numpy()
        owners = at // batch.is_text.shape[1]
        read = np.array(batch.starts, np.int64)[:, None] + batch.is_text.cumsum(1)
        ends = read.ravel()[at]
        lengths = ends - np.array(headed, np.int64)[owners]
        is_text = batch.is_text.ravel()[at]
        return cls(texts, is_whole, np.where(is_text, owners, -1), lengths, batch.texts, ends, {})

    @classmethod
    def of_documents(cls, texts: Sequence[Text]) -> Self:
        """Describe no position yet of whole documents, without states; see `at_positions`."""
        none = np.zeros(0, np.int64)
        return cls(texts, [True] * len(texts), none, none, (), none, {})

    def at_positions(self, owners: Numbers, lengths: Numbers) -> Self:
        """Return the contexts at other positions of the same texts; see the class."""
        return replace(self, owners=owners, lengths=lengths, ends=np.zeros_like(lengths))

    @classmethod
    def joined(cls, parts: Sequence["Contexts"]) -> "Contexts":
        """Put the positions of several contexts one after another."""
        if len(parts) == 1:
            return parts[0]
        firsts = np.cumsum([0, *(len(part.texts) for part in parts)])
        owners = [
            np.where(part.owners >= 0, part.owners + first, -1)
            for part, first in zip(parts, firsts, strict=False)
        ]
        return cls(
            [text for part in parts for text in part.texts],
            [whole for part in parts for whole in part.is_whole],
            np.concatenate(owners),
            np.concatenate([part.lengths for part in parts]),
            [state for part in parts for state in part.states],
            np.concatenate([part.ends for part in parts]),
            {},
        )

    def __len__(self) -> int:
        return len(self.owners)

    def select_rows(self, rows: slice | Numbers) -> Self:
        """Return the contexts at some of the positions."""
        return replace(self, owners=self.owners[rows], lengths=self.lengths[rows], ends=self.ends[rows])

    def targets(self, rows: Numbers) -> Numbers:
        """Return the next tokens of some positions of texts, int64, shape (m,), which the texts must hold."""
        owners, lengths, found = self.owners[rows], self.lengths[rows], np.empty(len(rows), np.int64)
        for text in np.unique(owners).tolist():
            of_text = owners == text
            found[of_text] = self.texts[text][lengths[of_text]]
        return found

    def cut(self, before: int) -> CutTexts:
        """Cut the texts to what lies at most `before` tokens before a position, and one token after it."""
        rows = np.flatnonzero(self.owners >= 0)
        used, owners = np.unique(self.owners[rows], return_inverse=True)
        lengths = self.lengths[rows]
        firsts = np.full(len(used), np.iinfo(np.int64).max)
        np.minimum.at(firsts, owners, lengths)
        firsts = np.maximum(firsts - before, 0)
        stops = np.zeros(len(used), np.int64)
        np.maximum.at(stops, owners, lengths + 1)
        pieces = list(zip(used.tolist(), firsts.tolist(), stops.tolist(), strict=True))
        return CutTexts(
            [self.texts[text][first:stop] for text, first, stop in pieces],
            [self.is_whole[text] and not first for text, first, _ in pieces],
            rows,
            owners,
            lengths - firsts[owners],
        )


class DocumentTexts:
    """Whole documents that are read window by window, one after another.

    Args:
        texts: their tokens, shapes (n_i,).
        prefix: the token that comes before every document; None where none does.
        keys_kept: how many of the latest keys of a text are needed again.
    """

    def __init__(self, texts: Sequence[Text], prefix: int | None, keys_kept: int) -> None:
        self._texts = texts
        self._prefix = prefix
        self._keys_kept = keys_kept
        self._states = [TextState() for _ in texts]
        self._read: list[int] = []
        self._known: dict[Any, Any] = {}

    def read_on(self, keys: Tensor, documents: Numbers, positions: Numbers) -> Contexts:
        """Take in the keys of a batch of windows, and describe its positions.

        Args:
            keys: float32, shape (n, d).
            documents: the document of each position, shape (n,). Each document's positions are together and
                in order, and only the last document may go on in the next batch.
            positions: in the document, shape (n,).
        """
        # 1) Forget what no later position reaches.
        for document in self._read:
            if document == documents[0]:
                self._states[document].drop_keys(self._states[document].length - self._keys_kept)
            else:
                self._states[document] = TextState()
        # 2) Extend the texts. A key is that of the token before the position.
        headed = int(self._prefix is not None)
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        self._read = documents[starts].tolist()
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(documents)], strict=True):
            document = int(documents[start])
            text, state, at = self._texts[document], self._states[document], positions[start:stop]
            assert state.length + 1 - headed == at[0], "tokens of a document out of order"
            assert (np.diff(at) == 1).all(), "tokens of a document out of order"
            before = text[np.maximum(at - 1, 0)].astype(np.int64)
            if self._prefix is not None and at[0] == 0:
                before[0] = self._prefix
            state.append(before, keys[start:stop] if self._keys_kept else keys[start:stop, :0], None)
        is_whole, states = [True] * len(self._texts), [*self._states]
        return Contexts(self._texts, is_whole, documents, positions, states, positions + headed, self._known)
