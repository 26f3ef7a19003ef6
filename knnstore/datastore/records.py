"""Record ids: the position of a token in the store, and the token itself.

A search result is therefore the retrieved tokens, with no second look-up for any engine. Nothing else knows
how an id is laid out.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

_TOKEN_BITS = 20

TOKEN_LIMIT = 1 << _TOKEN_BITS
"""Vocabularies up to this size fit."""

POSITION_LIMIT = 1 << (63 - _TOKEN_BITS)
"""Positions are 43-bit: a store takes 8.8e12 tokens in its life, removed ones included."""

ID_LIMIT = 2**63 - 1
"""Ids are below it, so that a half-open range can end after any of them."""


def record_ids(positions: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The ids of the records that predict these tokens at these positions; shapes agree."""
    return (positions << _TOKEN_BITS) | tokens.astype(np.int64)


def tokens_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token of each record; meaningless where the id is -1."""
    return ids & (TOKEN_LIMIT - 1)


def positions_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each record, -1 where the id is -1."""
    return ids >> _TOKEN_BITS


def ranges_of(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> IdRanges:
    """The ids of every record whose position is in one of the ranges [start, stop)."""
    ends = np.where(stops < POSITION_LIMIT, stops << _TOKEN_BITS, ID_LIMIT)
    return IdRanges(np.stack([starts << _TOKEN_BITS, ends], axis=1))


def whole_positions(ids: IdRanges) -> IdRanges:
    """The positions of which the set has every id that a record can have."""
    starts = positions_of(ids.starts - 1) + 1
    stops = positions_of(ids.stops) + (ids.stops == ID_LIMIT)
    return IdRanges(np.stack([starts, np.maximum(starts, stops)], axis=1))
