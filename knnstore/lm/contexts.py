"""The text before each position whose next token is predicted. Components use it to retrieve.

`Contexts` holds positions and their texts. It is made from a forward pass that continues texts
(`Contexts.from_pass`), or from documents that are scored window by window (`DocumentTexts`). `CutTexts` holds
only the part of each text that is near its positions.
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
    """The texts of contexts, cut by `Contexts.cut_to_positions`: without tokens far before all positions."""

    texts: list[Text]
    """Token ids of each text that has a position, shapes (n_i,)."""
    is_whole: list[bool]
    """True for each text that begins at the beginning of its document."""
    rows: Numbers
    """Index of each context that is not padding, ascending, int64, shape (m,)."""
    owners: Numbers
    """For each of the m contexts, the index of its text in `texts`, int64, shape (m,)."""
    lengths: Numbers
    """For each of the m contexts, the number of tokens in the cut text before its position, int64, shape
    (m,)."""


@dataclass(frozen=True)
class Contexts:
    """n positions in texts, at which the next token is predicted.

    The texts do not contain the prefix, the tokens that the model reads before every document (such as
    ``<s>``).
    """

    texts: Sequence[Text]
    """Token ids of each text, shapes (n_i,). A text is a whole document, or contains at least the tokens
    before its last position."""
    is_whole: Sequence[bool]
    """True for each text that begins at the beginning of a document."""
    owners: Numbers
    """Index into `texts` for each position, int64, shape (n,); -1 at padding, where nothing is retrieved."""
    lengths: Numbers
    """Number of tokens of the text before each position, int64, shape (n,)."""
    states: Sequence[TextState]
    """The `TextState` (tokens and their keys) of each text, for the continuous cache. Unlike the text, a
    state contains the prefix, if the model read one."""
    heads: Sequence[int]
    """For each text, the number of keys at the beginning of its state that components skip, because these
    keys predict tokens of the prefix."""
    ends: Numbers
    """Number of tokens in the text's state before each predicted token, int64, shape (n,).

    It is like `lengths`, but also counts the prefix.
    """
    known: dict[Any, Any]
    """Cache of values that components computed from the texts. The results of `select_rows` and
    `with_positions` share this dictionary with the original."""

    @classmethod
    def from_pass(cls, batch: TextBatch, prefix: Sequence[int], kept: Numbers) -> Self:
        """Create the contexts of selected positions of one forward pass of the model.

        The context of a position is the tokens of its text up to this position, including the token at the
        position. The model predicts the next token from them. At padding, `owners` is -1.

        Args:
            batch: the state of the b texts at the end of the pass. The pass had t positions for each text.
            prefix: the tokens that precede every document; empty if documents have no prefix. They do not
                belong to the contexts.
            kept: the selected positions, as indices into the b * t positions, int64, shape (n,), in any
                order. The contexts have the same order.
        """
        owners = kept // batch.is_text.shape[1]
        read = np.array(batch.starts, np.int64)[:, None] + batch.is_text.cumsum(1)
        is_text = batch.is_text.ravel()[kept]
        return cls.from_texts(batch.texts, batch.stops, prefix, owners, read.ravel()[kept], is_text)

    @classmethod
    def from_texts(
        cls,
        states: Sequence[TextState],
        stops: Sequence[int],
        prefix: Sequence[int],
        owners: Numbers,
        ends: Numbers,
        is_text: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Create the contexts of positions in texts that a model processes.

        Args:
            states: the state of each text.
            stops: number of tokens to use of each text, counted from its beginning, at most its length.
            prefix: the tokens that precede every document; empty if documents have no prefix. `is_whole` is
                True for a text that begins with the prefix, and for a text that is still shorter than the
                prefix but equals its beginning. A position that predicts a token of the prefix counts as
                padding.
            owners: index of the text of each position, int64, shape (n,).
            ends: number of tokens in the text's state before each predicted token, int64, shape (n,).
            is_text: False at padding, shape (n,); None means no padding.
        """
        texts, is_whole, headed = list[Text](), list[bool](), list[int]()
        for state, stop in zip(states, stops, strict=True):
            tokens = state.tokens(0, stop)
            head = tokens[: len(prefix)]
            headed.append(len(head) if np.array_equal(head, prefix[: len(head)]) else 0)
            texts.append(tokens[headed[-1] :])
            is_whole.append(not prefix or bool(headed[-1]))
        skipped = np.array(headed, np.int64)[owners]
        is_used = (skipped == 0) | (ends >= len(prefix))
        if is_text is not None:
            is_used &= is_text
        heads = [max(head - 1, 0) for head in headed]
        owners, lengths = np.where(is_used, owners, -1), np.maximum(ends - skipped, 0)
        return cls(texts, is_whole, owners, lengths, states, heads, ends, {})

    @classmethod
    def from_documents(cls, texts: Sequence[Text]) -> Self:
        """Create contexts of whole documents, without positions; `with_positions` adds positions.

        Args:
            texts: token ids of each document, without the prefix.
        """
        none = np.zeros(0, np.int64)
        return cls(texts, [True] * len(texts), none, none, (), (), none, {})

    def with_positions(self, owners: Numbers, lengths: Numbers) -> Self:
        """Return contexts with the same texts and with other positions; all their `ends` are 0.

        Args:
            owners: index into `texts` for each new position, int64, shape (n,); -1 at padding.
            lengths: number of tokens of the text before each new position, int64, shape (n,).
        """
        return replace(self, owners=owners, lengths=lengths, ends=np.zeros_like(lengths))

    @classmethod
    def concatenate(cls, parts: Sequence["Contexts"]) -> "Contexts":
        """Concatenate the texts and the positions of several contexts into one object.

        Args:
            parts: at least one object. A single object is returned unchanged; otherwise the result's cache
                `known` is empty.
        """
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
            [head for part in parts for head in part.heads],
            np.concatenate([part.ends for part in parts]),
            {},
        )

    def __len__(self) -> int:
        return len(self.owners)

    def select_rows(self, rows: slice | Numbers) -> Self:
        """Return contexts with only some of the positions; all texts and states are kept.

        Args:
            rows: a slice, or indices of positions.
        """
        return replace(self, owners=self.owners[rows], lengths=self.lengths[rows], ends=self.ends[rows])

    def target_tokens(self, rows: Numbers) -> Numbers:
        """Return the target token of each selected position: the token at the position itself.

        Args:
            rows: indices of m positions that are not padding. The texts must contain their target tokens.

        Returns:
            int64, shape (m,).
        """
        owners, lengths, found = self.owners[rows], self.lengths[rows], np.empty(len(rows), np.int64)
        for text in np.unique(owners).tolist():
            of_text = owners == text
            found[of_text] = self.texts[text][lengths[of_text]]
        return found

    def cut_to_positions(self, before: int) -> CutTexts:
        """Return the texts shortened to the part around their positions.

        A cut text begins `before` tokens before its first position, or where the text begins. It ends with
        the target token of its last position if the text contains this token. Texts without positions are
        left out.

        Args:
            before: number of tokens to keep before the first position of each text.
        """
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
    """Creates contexts for documents that are scored window by window, one document after another.

    A window is the part of a document that the model processes in one forward pass.

    Args:
        texts: token ids of each document, shapes (n_i,).
        prefix: the tokens that precede every document; empty if documents have no prefix. Only its last token
            is used: the key at this token predicts the first token of the document.
        keys_kept: number of a document's latest keys that are kept for later batches; 0 keeps no keys.
    """

    def __init__(self, texts: Sequence[Text], prefix: Sequence[int], keys_kept: int) -> None:
        self._texts = texts
        self._prefix = prefix[-1:]
        self._keys_kept = keys_kept
        self._states = [TextState() for _ in texts]
        self._read: list[int] = []
        self._known: dict[Any, Any] = {}

    def append_keys(self, keys: Tensor, documents: Numbers, positions: Numbers) -> Contexts:
        """Append the keys of a batch of windows to the texts, and return the contexts of the batch.

        A position is the place of a target token, and its context is the text before this token. Keys and
        texts that later positions do not need are removed from memory.

        Args:
            keys: the key at the token before each target token, float32, shape (n, d).
            documents: index of the document of each position, int64, shape (n,). The positions of a document
                are adjacent and in order, and only the last document may continue in the next batch.
            positions: position of the target token in its document, int64, shape (n,).
        """
        # 1) Free keys and texts that no later position needs.
        for document in self._read:
            if document == documents[0]:
                self._states[document].drop_keys(self._states[document].length - self._keys_kept)
            else:
                self._states[document] = TextState()
        # 2) Extend the texts. The key of a position belongs to the token before it.
        headed = len(self._prefix)
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        self._read = documents[starts].tolist()
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(documents)], strict=True):
            document = int(documents[start])
            text, state, at = self._texts[document], self._states[document], positions[start:stop]
            assert state.length + 1 - headed == at[0], "tokens of a document out of order"
            assert (np.diff(at) == 1).all(), "tokens of a document out of order"
            before = text[np.maximum(at - 1, 0)].astype(np.int64)
            if self._prefix and at[0] == 0:
                before[0] = self._prefix[0]
            state.append(before, keys[start:stop] if self._keys_kept else keys[start:stop, :0], None)
        is_whole, states, heads = [True] * len(self._texts), [*self._states], [0] * len(self._texts)
        ends = positions + headed
        return Contexts(self._texts, is_whole, documents, positions, states, heads, ends, self._known)
