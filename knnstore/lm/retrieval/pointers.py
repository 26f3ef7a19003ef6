"""Retrieving token by token where pointers save searches, see `PointerSettings`; many texts together."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Ids, Keys, Neighbors, tokens_of
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader


class Retrieval(NamedTuple):
    """What q queries retrieved."""

    found: Neighbors
    """k columns, or more if a row needs them; nearest first, -1 at +inf after the last."""

    searched: NDArray[np.bool_]
    """For which a search was made, shape (q,)."""


SearchRows = Callable[[NDArray[np.int64]], Neighbors]
"""Searches for some of the queries, given by their numbers."""


def retrieve_next(
    store: Reader,
    queries: Keys,
    rows: NDArray[np.int64],
    before: Ids,
    read: NDArray[np.int64],
    settings: KNNSettings,
    search: SearchRows,
) -> Retrieval:
    """Retrieve for the next token of q texts, which have the queries of these rows, shape (q,).

    `before` are the records retrieved for the token before, nearest first: shape (q, m), -1 for none; a text
    that begins has none. `read` is the token that came there, shape (q,). `search` is called once with the
    rows that need a search, if any does.
    """
    queries, pointers = queries[rows], settings.pointers
    assert pointers is not None
    leading = _leading(before, read, pointers.max_pointers)
    pointed = store.follow(queries, leading, settings.selection)
    count = (pointed.ids >= 0).sum(1)
    needed = np.ones(len(queries), bool) if pointers.min_pointers is None else count < pointers.min_pointers
    others = np.flatnonzero(~needed)
    if needed.any():
        pointed = _together(pointed, search(rows[needed]).spread(needed))
    # At least k columns, and no more than are needed.
    found = pointed.nearest(max(settings.k, int((pointed.ids >= 0).sum(1).max(initial=0))))
    if pointers.cluster_size is not None and len(others):
        near = store.follow(
            queries[others], leading[others], settings.selection, cluster_size=pointers.cluster_size
        )
        found.put(others, near.nearest(settings.k))
    return Retrieval(found, needed)


def retrieve_in_step(
    store: Reader,
    keys: Keys,
    gold: NDArray[np.int64],
    documents: NDArray[np.int64],
    positions: NDArray[np.int64],
    settings: KNNSettings,
    search: SearchRows,
) -> Iterator[tuple[NDArray[np.int64], Retrieval]]:
    """Retrieve for every token of some documents, all documents advancing together.

    Args:
        store: where pointers are followed.
        keys: of n tokens in any order, float32, shape (n, d).
        gold: the tokens, shape (n,).
        documents: the document of each, shape (n,).
        positions: in its document, shape (n,); every document begins at the same one and has no gap.
        settings: with pointers.
        search: searches for some of the n tokens.

    Yields:
        Step by step the numbers of the tokens at one position, and what was retrieved for them.
    """
    order = np.lexsort((documents, positions))
    owners, read, before = documents[:0], gold[:0], np.empty((0, 0), np.int64)
    for rows in np.split(order, np.flatnonzero(np.diff(positions[order])) + 1) if len(order) else ():
        if not len(owners):
            before, read = np.empty((len(rows), 0), np.int64), gold[rows]
        else:
            at = np.searchsorted(owners, documents[rows])
            before, read = before[at], read[at]
        retrieval = retrieve_next(store, keys, rows, before, read, settings, search)
        yield rows, retrieval
        owners, before, read = documents[rows], retrieval.found.ids, gold[rows]


def _leading(before: Ids, read: NDArray[np.int64], most: int) -> Ids:
    """The nearest records that predicted what was read, at most so many: shape (q, m), -1 for none."""
    leading = (before >= 0) & (tokens_of(before) == read[:, None])
    width = min(int(leading.sum(1).max(initial=0)), most)
    order = np.argsort(~leading, axis=1, kind="stable")[:, :width]  # as they were, the nearest first
    return np.where(np.take_along_axis(leading, order, 1), np.take_along_axis(before, order, 1), -1)


def _together(pointed: Neighbors, found: Neighbors) -> Neighbors:
    """What pointers and a search found, in any order; a record that both found is there once."""
    both = Neighbors.joined([pointed, found])
    order = np.argsort(both.ids, axis=1, kind="stable")
    ordered = np.take_along_axis(both.ids, order, 1)
    again = np.zeros(both.ids.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    return both.without(again)
