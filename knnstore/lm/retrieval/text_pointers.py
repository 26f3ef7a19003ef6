"""Pointers inside `forward`: each position of a pass goes on from the one before it in its text."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Ids, Keys, Neighbors
from knnstore.lm.retrieval.pointers import SearchRows, retrieve_next
from knnstore.lm.settings import KNNSettings
from knnstore.lm.text_state import NO_TOKEN, TextBatch
from knnstore.store import Reader


class TextPass(NamedTuple):
    """One forward pass over the last t positions of b texts."""

    tokens: NDArray[np.int64]
    """At these positions, `NO_TOKEN` at padding or where none is known: shape (b, t)."""
    kept: NDArray[np.int64]
    """Which of the b * t positions are predicted from, any shape."""
    batch: TextBatch | None
    """The texts, which keep the records that were retrieved; None where they cannot be followed."""

    @classmethod
    def of(
        cls,
        tokens: Tensor | None,
        is_text: NDArray[np.bool_] | None,
        shape: tuple[int, int],
        kept: Tensor,
        batch: TextBatch | None,
    ) -> Self:
        """Describe a pass.

        Args:
            tokens: at the positions, shape (b, t); None where they are not known.
            is_text: which positions are no padding, shape (b, t); None is all.
            shape: (b, t).
            kept: see the class.
            batch: see the class.
        """
        known = np.full(shape, NO_TOKEN, np.int64) if tokens is None else tokens.cpu().numpy()
        return cls(known if is_text is None else np.where(is_text, known, NO_TOKEN), kept.numpy(), batch)


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
    pass and the text has kept what the one before it retrieved; else pointers begin with it.

    Args:
        store: where to follow pointers.
        queries: float32, shape (n, d).
        text_pass: the pass.
        attended: which of the kept positions the n queries are from, of their shape.
        settings: with pointers.
        search: searches for some of the n queries.
    """
    tokens, kept, batch = text_pass
    length = tokens.shape[1]
    owners, columns = np.divmod(kept[attended], length)
    nothing = np.empty(0, np.int64)
    before = [nothing] * len(tokens)
    if batch is not None:
        before = [text.retrieved.get(at, nothing) for text, at in zip(batch.texts, batch.starts, strict=True)]
    is_text = tokens != NO_TOKEN if batch is None else batch.is_text
    last = list(zip((is_text.argmax(1) - 1).tolist(), before, strict=True))
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
            if batch is not None:
                after = int(batch.is_text[owner, column + 1 :].sum())
                batch.texts[owner].keep_retrieved(batch.stops[owner] - after, last[owner][1])
    return Neighbors.joined(found, axis=0).rows(np.argsort(np.concatenate(order)))


def _together(parts: Sequence[Ids]) -> Ids:
    """Rows of different lengths as one array, -1 after the end of each."""
    ids = np.full((len(parts), max(map(len, parts))), -1, np.int64)
    for row, part in zip(ids, parts, strict=True):
        row[: len(part)] = part
    return ids
