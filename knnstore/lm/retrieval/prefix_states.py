"""What is known at each point of a text that a model is reading, found again by the tokens up to there.

While a model generates, the rows of its batch are reordered, copied and dropped between two steps
(beams), and begin with padding. State that belongs to a text is therefore never kept by row but under
the text itself::

    states: PrefixStates[V] = PrefixStates()             # kept as long as the model

    for row in unpadded(sequence_ids):                   # in `forward`: the text of each row so far
        names = prefix_names(row, first=len(row) - new)  # one for each position that this call computes
        (before,) = states.get(prefix_names(row[: len(row) - new], first=len(row) - new - 1))
        ...                                              # V at the position before, None if it is not known
        states.put(names, values)                        # V at each new position

A row finds what was put under its tokens whichever row put it, so nothing has to be reordered. States
must not be changed after they were put, since texts that continue differently share them. They may be
forgotten at any time (memory is bounded): whoever asks must be able to do without, or to compute them
again from the tokens.

``sequence_ids`` reaches `KNNLMForCausalLM.forward` from `prepare_inputs_for_generation`; without a cache of
attention it is made of ``input_ids``. `PADDING` stands where a row is masked.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from knnstore.errors import ConfigError
from knnstore.lm.reading import Tokens, find_cache

PADDING = -1
"""In ``sequence_ids``, where a row has no token."""

V = TypeVar("V")


def sequence_ids_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mark the padding among the tokens of each row.

    Args:
        input_ids: every token from the beginning of the texts, int64, shape (b, n).
        attention_mask: shape (b, n), 0 for padding; None is none.

    Returns:
        int64, shape (b, n), `PADDING` where the mask is 0.
    """
    if attention_mask is None or attention_mask.all():
        return input_ids
    return input_ids.masked_fill(attention_mask.to(input_ids.device) == 0, PADDING)


def past_length(inputs: Mapping[str, Any]) -> int | None:
    """Count the tokens that a model has read before, from the arguments of its forward pass.

    Returns:
        Their number, padding included; 0 without a cache. None where there are some, and the cache, that of a
        recurrent model, does not tell how many.
    """
    cache = find_cache(inputs)
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # there is no layer of attention
        return None if cache.has_previous_state() else 0


def check_sequence_ids(sequence_ids: Tensor, batch: int, length: int, read: int | None) -> None:
    """Raise a `ConfigError` unless texts are those of a pass over `length` tokens after `read` others."""
    if read is None:
        return
    if sequence_ids.shape != (batch, read + length):
        raise ConfigError(
            f"sequence_ids has the shape {tuple(sequence_ids.shape)}, but the cache holds {read} tokens and "
            f"{length} are new: give all tokens of the texts, shape ({batch}, {read + length})"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def whole_texts(
    input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None, read: int | None
) -> Tensor | None:
    """The ``sequence_ids`` of a forward pass that begins at the beginning of its texts; None without tokens.

    Args:
        input_ids: of the pass.
        attention_mask: of the pass.
        position_ids: of the pass, where they were given.
        read: tokens in the model's cache, see `past_length`.

    Raises:
        ConfigError: the pass does not begin there, and what was read before is not known; or a row may hold
            more than one text.
    """
    if read != 0:
        raise ConfigError(
            "a continuous cache, n-grams and keys of several states need the tokens read before: begin with "
            "input_ids, and give sequence_ids with a cache"
        )
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        raise ConfigError(
            "a continuous cache, n-grams and keys of several states need to know where each text begins, "
            "which a mask of more than two dimensions does not tell: give attention_mask of shape "
            "(batch, tokens), or sequence_ids"
        )
    if input_ids is None:
        return None
    if position_ids is not None and position_ids.ndim == 2:
        follows = position_ids.diff(dim=1) == 1
        if attention_mask is not None:
            attended = attention_mask.to(position_ids.device) != 0
            follows |= ~(attended[:, 1:] & attended[:, :-1])
        if not follows.all():
            raise ConfigError(
                "position_ids do not count up along a row, as where it holds several texts: a continuous "
                "cache, n-grams and keys of several states need one text in each row"
            )
    return sequence_ids_of(input_ids, attention_mask)


def unpadded(sequence_ids: Tensor) -> list[Tokens]:
    """The tokens of each row without its padding: int64, shapes (n_i,)."""
    return taken_apart(sequence_ids, 1)[0]


def taken_apart(sequence_ids: Tensor, new: int) -> tuple[list[Tokens], NDArray[np.bool_]]:
    """The tokens of each row without its padding, and which of its last positions are none.

    Returns:
        int64, shapes (n_i,), and bool, shape (b, new).
    """
    rows = sequence_ids.cpu().numpy()
    there = rows != PADDING
    texts = list(rows) if there.all() else [row[of] for row, of in zip(rows, there, strict=True)]
    return texts, there[:, -new:]


class WrittenTexts(NamedTuple):
    """The b texts that a forward pass of t positions goes on with."""

    tokens: list[Tokens]
    """As far as they were read, without the token before every document, int64, shapes (n_i,)."""
    is_whole: list[bool]
    """Which of them are the beginning of a document."""
    behind: list[int]
    """How many of the tokens were read before this pass; -1 where the token before all is new."""
    fresh: NDArray[np.bool_]
    """Which positions of the pass are no padding, shape (b, t)."""

    @classmethod
    def of(cls, sequence_ids: Tensor, new: int, prefix: int | None) -> Self:
        """Take texts apart.

        Args:
            sequence_ids: shape (b, past + t).
            new: t.
            prefix: the token that comes before every document; None where none does.
        """
        texts, fresh = taken_apart(sequence_ids, new)
        found = cls([], [], [], fresh)
        for whole, count in zip(texts, fresh.sum(1).tolist(), strict=True):
            is_headed = len(whole) > 0 and whole[0] == prefix
            found.tokens.append(whole[1:] if is_headed else whole)
            found.is_whole.append(is_headed or prefix is None)
            found.behind.append(len(found.tokens[-1]) - count)
        return found

    def places(self, firsts: NDArray[np.int64], kept: Tensor) -> NDArray[np.int64]:
        """Where some positions of the pass stand when the texts are laid out in one row; -1 is padding.

        Args:
            firsts: the place of each text's first token, shape (b,).
            kept: indices into the b * t positions, int64, shape (n,), in any order.
        """
        places = (firsts + np.array(self.behind, np.int64))[:, None] + self.fresh.cumsum(1) - 1
        found: NDArray[np.int64] = np.where(self.fresh, places, -1).flatten()[kept.cpu().numpy()]
        return found


def prefix_names(tokens: Tokens, first: int = 0) -> list[bytes]:
    """For each position i of a text from `first` on a name of ``tokens[: i + 1]``, 16 bytes."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens[:first]).tobytes(), digest_size=16)
    names = []
    for token in tokens[first:]:
        digest.update(token.tobytes())
        names.append(digest.copy().digest())
    return names


class PrefixStates(Generic[V]):
    """States by the names of beginnings of texts; those not used for longest are forgotten first.

    Threads may share it.

    Args:
        capacity: states that are kept; twice as many as any one call has named if that is more.
    """

    def __init__(self, capacity: int = 1 << 14) -> None:
        self._capacity = capacity
        self._states: OrderedDict[bytes, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, names: Sequence[bytes]) -> list[V | None]:
        """Find states; None where there is none, or none any more."""
        with self._lock:
            self._capacity = max(self._capacity, 2 * len(names))
            for name in names:
                if name in self._states:
                    self._states.move_to_end(name)
            return [self._states.get(name) for name in names]

    def put(self, names: Sequence[bytes], values: Sequence[V]) -> None:
        """Keep states, in place of any that have the same names."""
        with self._lock:
            self._capacity = max(self._capacity, 2 * len(names))
            for name, value in zip(names, values, strict=True):
                self._states.pop(name, None)
                self._states[name] = value
            while len(self._states) > self._capacity:
                self._states.popitem(last=False)
