"""Record ids: one int64 encodes the position of a token in the store and the token id.

Because of this, a search result contains the retrieved tokens, and no second look-up is needed. No other
module depends on the layout of a record id.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore.ranges import IdRanges

_TOKEN_BITS = 20
"""Number of low bits of a record id that hold the token id. The higher bits hold the position."""

TOKEN_LIMIT = 1 << _TOKEN_BITS
"""Token ids are below this limit, so larger vocabularies are not supported."""

POSITION_LIMIT = 1 << (63 - _TOKEN_BITS)
"""Positions are below this limit, 2^43 = 8.8e12.

A position is the number of a token in a store, given once and never reused. So a store can receive this many
tokens in its life, including tokens that were removed.
"""

ID_LIMIT = 2**63 - 1
"""Record ids are below this limit, so that the end of a half-open range, an id plus one, fits in int64."""


def record_ids(positions: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Encode positions and tokens as record ids.

    Args:
        positions: position of each token in the store, int64, 0 to `POSITION_LIMIT` - 1.
        tokens: token ids, 0 to `TOKEN_LIMIT` - 1, in the same shape.

    Returns:
        Record ids, int64, in the same shape.
    """
    return (positions << _TOKEN_BITS) | tokens.astype(np.int64)


def tokens_from_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token id that each record id encodes, int64, in the shape of `ids`.

    The result for id -1, which marks a missing neighbor, is meaningless.
    """
    return ids & (TOKEN_LIMIT - 1)


def positions_from_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position in the store that each record id encodes, int64, in the shape of `ids`.

    The result for id -1, which marks a missing neighbor, is -1.
    """
    return ids >> _TOKEN_BITS


def id_ranges_from_positions(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> IdRanges:
    """Return the set of all record ids at some positions, with every possible token.

    A position is the number of a token in the store; the positions are given as ranges.

    Args:
        starts: first position of each range, int64, shape (m,).
        stops: last position of each range plus one, int64, shape (m,).
    """
    ends = np.where(stops < POSITION_LIMIT, stops << _TOKEN_BITS, ID_LIMIT)
    return IdRanges(np.stack([starts << _TOKEN_BITS, ends], axis=1))


def find_whole_positions(ids: IdRanges) -> IdRanges:
    """Return the positions that a set of record ids contains completely.

    A record id encodes a position (the number of a token in the store) and a token. A position is in the
    result if `ids` contains the record ids of this position with all possible tokens. The result is a set of
    positions, although its class `IdRanges` is usually a set of record ids.

    Args:
        ids: set of record ids.
    """
    starts = positions_from_ids(ids.starts - 1) + 1
    stops = positions_from_ids(ids.stops) + (ids.stops == ID_LIMIT)
    return IdRanges(np.stack([starts, np.maximum(starts, stops)], axis=1))
