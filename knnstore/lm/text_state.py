"""The state of a text that a model processes: its tokens, their keys, and hidden states if keys need them.

The model's KV cache is not enough to predict with a store: a key may join the hidden states of several
tokens, the recent-text cache compares keys of the same text, and n-grams need the tokens. A program that runs
the model keeps one `TextState` for each text, next to the KV cache of that text, and calls `append_pass`
after every forward pass::

    texts = [TextState() for _ in prompts]
    ...                                             # one forward pass over t new tokens of each text
    keys, batch = append_pass(texts, tokens, states, is_text, joining, project)
    ...                                             # retrieve with the keys; predict
    texts[0].truncate(length)                       # tokens were removed, e.g. a rejected draft
    beam = texts[0].fork()                          # the text continues in two ways

Nothing is shared between texts, so rows of a batch may be reordered, copied and dropped.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.lm.keys import Joining

Tokens = NDArray[np.int64]

_NO_TOKEN = -1
"""Token id that is stored for each position that the model received as an embedding, without a token."""

_ROOM = 64
"""Number of positions that are at least reserved after a text's end, so that most appends do not copy."""


class TextState:
    """The tokens of one text that a model processes, and the keys of these tokens.

    A key is the vector with which the store is searched. The tokens' hidden states are also kept, if a key is
    computed from the states of several tokens.

    Attributes:
        length: number of tokens, >= 0.
    """

    def __init__(self) -> None:
        self.length = 0
        self._tokens = np.empty(0, np.int64)
        self._keys: Tensor | None = None
        self._states: Tensor | None = None
        self._unknown_stop = 0
        self._first_key = 0  # position of the first key that was not dropped
        self._first_state = 0  # position of the first hidden state that was not dropped

    @property
    def has_all_tokens(self) -> bool:
        """True if every token id is known; False if the model received a part of the text as embeddings.

        It stays False after `truncate` has removed this part, until the text is empty.
        """
        return self._unknown_stop == 0

    @property
    def has_all_keys(self) -> bool:
        """True if the keys of all tokens are kept; False if keys were dropped or tokens had no keys."""
        return self._first_key == 0

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens from position start to stop - 1: int64, shape (stop - start,); read only."""
        return self._tokens[start:stop]

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys from position start to stop - 1: float32, shape (stop - start, d); read only.

        An AssertionError is raised for a text without keys, and for positions whose keys were dropped.
        """
        assert self._keys is not None
        assert start >= self._first_key
        return self._keys[start - self._first_key : stop - self._first_key]

    def last_states(self, count: int, like: Tensor) -> Tensor:
        """Return the hidden states of the last `count` tokens, oldest first; zeros before the text begins.

        Read only: the result may share memory with the state.

        Args:
            count: >= 0.
            like: a tensor with the width (last dimension), dtype and device of the result.

        Returns:
            Shape (count, width).
        """
        known = min(count, self.length)
        if not known:
            return like.new_zeros((count, like.shape[-1]))
        first = self.length - known - self._first_state
        assert self._states is not None
        assert first >= 0, "the hidden states were dropped"
        states = self._states[first : first + known]
        return states if known == count else pad(states, (0, 0, count - known, 0))

    def append(self, tokens: Tokens | None, keys: Tensor, states: Tensor | None) -> None:
        """Append the tokens of a forward pass. Does nothing if n is 0.

        Args:
            tokens: int64, shape (n,); None if the model received embeddings without tokens.
            keys: float32, shape (n, d).
            states: hidden states, shape (n, width); None if each key is computed from one state only, so that
                states need not be kept.
        """
        if not len(keys):
            return
        start = self.length
        self._append_tokens(_NO_TOKEN if tokens is None else tokens, len(keys))
        if tokens is None:
            self._unknown_stop = self.length
        self._keys = _write_rows(self._keys, keys, start - self._first_key)
        if states is not None:
            self._states = _write_rows(self._states, states, start - self._first_state)

    def append_without_keys(self, tokens: Tokens) -> None:
        """Append tokens without keys, because the tokens' KV cache is reused or no setting needs keys.

        Also drops the keys and hidden states of all earlier tokens, so later keys cannot use earlier states.

        Args:
            tokens: int64, shape (n,).
        """
        self._append_tokens(tokens, len(tokens))
        self._first_key = self._first_state = self.length
        self._keys = self._states = None

    def _append_tokens(self, tokens: Tokens | int, count: int) -> None:
        """Append tokens, enlarge the buffer if needed, and increase `length`.

        Args:
            tokens: the tokens, shape (count,); or one token id, which is appended `count` times.
            count: number of tokens.
        """
        stop = self.length + count
        if stop > len(self._tokens):
            grown = np.empty(max(stop + _ROOM, 2 * len(self._tokens)), np.int64)
            grown[: self.length] = self._tokens[: self.length]
            self._tokens = grown
        self._tokens[self.length : stop] = tokens
        self.length = stop

    def truncate(self, length: int) -> None:
        """Remove all tokens from position `length` on, for example a rejected draft.

        Does nothing if the text has at most `length` tokens.
        """
        if length >= self.length:
            return
        self.length = max(0, length)
        self._first_key = min(self._first_key, self.length)
        self._first_state = min(self._first_state, self.length)
        if not self.length:
            self._unknown_stop = 0

    def drop_keys(self, stop: int) -> None:
        """Drop the keys before position `stop` and free their memory."""
        dropped = min(stop, self.length) - self._first_key
        if self._keys is not None and dropped > 0:
            self._keys = self._keys[dropped : self.length - self._first_key].clone()
            self._first_key += dropped

    def drop_states(self, stop: int) -> None:
        """Drop the hidden states before position `stop` and free their memory."""
        dropped = min(stop, self.length) - self._first_state
        if self._states is not None and dropped > 0:
            self._states = self._states[dropped : self.length - self._first_state].clone()
            self._first_state += dropped

    def fork(self) -> "TextState":
        """Return an independent copy: changes to one of the two texts do not change the other one."""
        copy = TextState()
        copy.length, copy._unknown_stop = self.length, self._unknown_stop
        copy._tokens = self._tokens[: self.length].copy()
        copy._first_key, copy._first_state = self._first_key, self._first_state
        if self._keys is not None:
            copy._keys = self._keys[: self.length - self._first_key].clone()
        if self._states is not None:
            copy._states = self._states[: self.length - self._first_state].clone()
        return copy


class TextBatch(NamedTuple):
    """The b texts of a forward pass with t positions for each text, as they are after the pass.

    A later pass may extend the same `TextState` objects. `stops` keeps the lengths after this pass.
    """

    texts: Sequence[TextState]
    """The state of each text."""
    stops: Sequence[int]
    """Length of each text after the pass."""
    is_text: NDArray[np.bool_]
    """True where a position of the pass is a token of a text, False at padding; shape (b, t)."""

    @property
    def starts(self) -> list[int]:
        """Length of each text before the pass."""
        counts = self.is_text.sum(1).tolist()
        return [stop - count for stop, count in zip(self.stops, counts, strict=True)]

    @property
    def has_all_tokens(self) -> bool:
        """True if every token id of every text is known; see `TextState.has_all_tokens`."""
        return all(text.has_all_tokens for text in self.texts)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def append_pass(
    texts: Sequence[TextState],
    tokens: Tensor | None,
    states: Tensor,
    is_text: NDArray[np.bool_] | None,
    joining: Joining,
    project: Callable[[Tensor], Tensor],
) -> tuple[Tensor, TextBatch]:
    """Compute the keys of one forward pass, and append its tokens and keys to the texts.

    Args:
        texts: the b texts; they are changed.
        tokens: token ids of the pass, int64, shape (b, t); None if the model received embeddings only.
        states: hidden states of the layer from which keys are made, shape (b, t, width).
        is_text: True at tokens of the texts, False at padding, shape (b, t); None means no padding.
        joining: the number of earlier hidden states that are added to each key, and their weights.
        project: function that converts joined states, shape (..., width), to the store's keys, float32, shape
            (..., d).

    Returns:
        The keys, float32, shape (b, t, d), undefined at padding; and the texts after the pass.
    """
    length, states = states.shape[1], states.detach()
    if is_text is None:
        is_text = np.ones(states.shape[:2], np.bool_)
    is_padded = not is_text.all()
    keys = project(_join_states(texts, states, is_text, joining) if joining.discounts else states)
    ids = None if tokens is None else tokens.cpu().numpy()
    for row, text in enumerate(texts):
        at: slice | NDArray[np.int64] = slice(0, length)
        if is_padded:
            at = np.flatnonzero(is_text[row])
        own_tokens = None if ids is None else ids[row, at]
        text.append(own_tokens, keys[row, at], states[row, at] if joining.discounts else None)
    return keys, TextBatch(texts, [text.length for text in texts], is_text)


def _join_states(
    texts: Sequence[TextState], states: Tensor, is_text: NDArray[np.bool_], joining: Joining
) -> Tensor:
    """Add to each hidden state of a pass the weighted states of the previous tokens of its text.

    Args:
        texts: the b texts before the pass.
        states: the hidden states of the pass, shape (b, t, width).
        is_text: True at tokens of the texts, False at padding, shape (b, t).
        joining: the number and the weights of the previous states.

    Returns:
        Float32, shape (b, t, joined width); undefined at padding.
    """
    count = len(joining.discounts)
    before = torch.stack([text.last_states(count, states) for text in texts])
    all_states = torch.cat([before, states], 1)
    if is_text.all():
        return joining.join_states(all_states)
    back = np.arange(count, 0, -1)
    is_known = back <= np.array([text.length for text in texts])[:, None]
    attended = torch.from_numpy(np.concatenate([is_known, is_text], 1)).to(states.device)
    return joining(all_states, attended)[:, count:]


def _write_rows(buffer: Tensor | None, rows: Tensor, start: int) -> Tensor:
    """Write rows into a buffer at index `start`, and return the buffer.

    If `buffer` is too small or None, the function returns a new, larger buffer, into which the first `start`
    rows are copied.
    """
    stop = start + len(rows)
    if buffer is None or stop > len(buffer):
        capacity = max(stop + _ROOM, 0 if buffer is None else 2 * len(buffer))
        grown = rows.new_empty((capacity, *rows.shape[1:]))
        if buffer is not None:
            grown[:start] = buffer[:start]
        buffer = grown
    buffer[start:stop] = rows
    return buffer
