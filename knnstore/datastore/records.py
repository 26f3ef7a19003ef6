"""Record ids: the position of a token in the store, and the token itself.

A search result is therefore the retrieved tokens, with no second look-up for any engine. Nothing else knows
how an id is laid out.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

TOKEN_BITS = 20
"""Bits of a record id that hold the token; vocabularies up to 2**20."""

TOKEN_LIMIT = 1 << TOKEN_BITS
"""Vocabularies up to this size fit."""


def record_ids(positions: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The ids of the records that predict these tokens at these positions; shapes agree."""
    return (positions << TOKEN_BITS) | tokens.astype(np.int64)


def tokens_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token of each record; meaningless where the id is -1."""
    return ids & (TOKEN_LIMIT - 1)


def positions_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of each record, -1 where the id is -1."""
    return ids >> TOKEN_BITS


def ranges_of(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> IdRanges:
    """The ids of every record whose position is in one of the ranges [start, stop)."""
    return IdRanges(np.stack([starts, stops], axis=1) << TOKEN_BITS)
