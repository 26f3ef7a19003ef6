"""Pointers inside `forward`: each position of a pass goes on from the one before it in its text."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Ids, Keys, Neighbors
from knnstore.lm.reading import Tokens
from knnstore.lm.retrieval.pointers import SearchRows, retrieve_next
from knnstore.lm.retrieval.prefix_states import PADDING, PrefixStates, prefix_names, unpadded
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader

PointerStates = PrefixStates[Ids]
"""The records retrieved at the end of each text. Each call of `generate` makes its own: where pointers begin
depends on the prompt, so that a call must not find those of another."""

STATES_KEPT = 1 << 11
"""Of 8 kB each with k = 1024: far more than the rows and beams of a call need."""
_OF_A_PASS = 256  # of each text: its end, and where a pass that drafts may fall back to


class TextPass(NamedTuple):
    """One forward pass over the last t positions of b texts."""

    tokens: NDArray[np.int64]
    """At these positions, `PADDING` where there is none or none is known: shape (b, t)."""
    kept: NDArray[np.int64]
    """Which of the b * t positions are predicted from, any shape."""
    sequence_ids: Tensor | None
    """The whole texts, see `knnstore.lm.retrieval.prefix_states`; None where they are not known."""
    states: PointerStates | None
    """Of the call of `generate`."""

    @classmethod
    def of(
        cls, read: Tensor | None, batch: int, length: int, kept: Tensor, states: PointerStates | None
    ) -> Self:
        """Describe a pass over `length` positions of so many texts.

        What was read goes up to its end and at least from its beginning on: the texts as
        `knnstore.lm.retrieval.prefix_states` has them, or their end; None is not known.
        """
        tokens = np.full((batch, length), PADDING, np.int64)
        if read is not None:
            tokens[:] = read[:, -length:].cpu().numpy()
        return cls(tokens, kept.numpy(), read, states)


def retrieve_for_pass(
    store: Reader,
    queries: Keys,
    text_pass: TextPass,
    attended: NDArray[np.bool_],
    settings: KNNSettings,
    search: SearchRows,
) -> Neighbors:
    """Retrieve for positions of a forward pass, in the order of their texts, all rows together.

    A position goes on from the one before it if that is among those asked for, or if it is the first of the
    pass and `TextPass.states` has the one before; else pointers begin with it.

    Args:
        store: where to follow pointers.
        queries: float32, shape (n, d).
        text_pass: the pass.
        attended: which of the kept positions the n queries are from, of their shape.
        settings: with pointers.
        search: searches for some of the n queries.
    """
    tokens, kept, sequence_ids, states = text_pass
    length = tokens.shape[1]
    owners, columns = np.divmod(kept[attended], length)
    nothing = np.empty(0, np.int64)
    before: list[Ids | None] = [None] * len(tokens)
    if states is not None and sequence_ids is not None and sequence_ids.shape[1] > length:
        before = states.get([_name(text) for text in unpadded(sequence_ids[:, :-length])])
    firsts = (tokens != PADDING).argmax(1).tolist()
    last = [(first - 1, nothing if ids is None else ids) for first, ids in zip(firsts, before, strict=True)]
    reached: list[tuple[int, int, Ids]] = []
    found, order = [Neighbors.nothing(0, settings.k)], [np.empty(0, np.int64)]
    for column in np.unique(columns).tolist():
        rows = np.flatnonzero(columns == column)
        mine = owners[rows].tolist()
        known = [last[owner][1] if last[owner][0] == column - 1 else nothing for owner in mine]
        read = tokens[mine, column]
        retrieved = retrieve_next(store, queries, rows, _together(known), read, settings, search).found
        found.append(retrieved)
        order.append(rows)
        for owner, ids in zip(mine, retrieved.ids, strict=True):
            last[owner] = column, ids[ids >= 0]
            reached.append((owner, *last[owner]))
    if states is not None and sequence_ids is not None:
        texts = unpadded(sequence_ids)
        # Not the end alone: of a draft some tokens may be taken back.
        latest = [(owner, length - 1 - at, ids) for owner, at, ids in reached if at >= length - _OF_A_PASS]
        names = [_name(texts[owner][: len(texts[owner]) - after]) for owner, after, _ in latest]
        states.put(names, [ids for _, _, ids in latest])
    return Neighbors.joined(found, axis=0).rows(np.argsort(np.concatenate(order)))


def _name(text: Tokens) -> bytes:
    return prefix_names(text, len(text) - 1)[0] if len(text) else b""


def _together(parts: Sequence[Ids]) -> Ids:
    """Rows of different lengths as one array, -1 after the end of each."""
    ids = np.full((len(parts), max(map(len, parts))), -1, np.int64)
    for row, part in zip(ids, parts, strict=True):
        row[: len(part)] = part
    return ids
