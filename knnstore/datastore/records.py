"""Record ids: the position of a token in the store, and the token, in one int64.

So a search result contains the retrieved tokens, and no engine needs a second look-up. No other module
depends on the layout of an id.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

_TOKEN_BITS = 20
"""Number of low bits of an id that hold the token."""

TOKEN_LIMIT = 1 << _TOKEN_BITS
"""Token ids are below this limit, so larger vocabularies are not supported."""

POSITION_LIMIT = 1 << (63 - _TOKEN_BITS)
"""Positions are below this limit (43 bits): 8.8e12 tokens in the life of a store, removed tokens included."""

ID_LIMIT = 2**63 - 1
"""Record ids are below this limit, so that a half-open range can end after any id."""


def record_ids(positions: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the record ids that encode tokens and their positions, int64.

    Args:
        positions: position of each token in the store, below `POSITION_LIMIT`.
        tokens: token ids below `TOKEN_LIMIT`, in the same shape.
    """
    return (positions << _TOKEN_BITS) | tokens.astype(np.int64)


def tokens_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token id that each record id encodes. The result for id -1 is meaningless."""
    return ids & (TOKEN_LIMIT - 1)


def positions_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position that each record id encodes; -1 for id -1."""
    return ids >> _TOKEN_BITS


def ranges_of(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> IdRanges:
    """Return the record ids of all tokens at positions in the ranges [start, stop).

    Args:
        starts: first position of each range, shape (m,).
        stops: position after each range, shape (m,).
    """
    ends = np.where(stops < POSITION_LIMIT, stops << _TOKEN_BITS, ID_LIMIT)
    return IdRanges(np.stack([starts << _TOKEN_BITS, ends], axis=1))


def whole_positions(ids: IdRanges) -> IdRanges:
    """Return the positions, as ranges, for which a set contains the record ids of all tokens."""
    starts = positions_of(ids.starts - 1) + 1
    stops = positions_of(ids.stops) + (ids.stops == ID_LIMIT)
    return IdRanges(np.stack([starts, np.maximum(starts, stops)], axis=1))
