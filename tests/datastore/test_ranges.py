"""`IdRanges` is a set of integers: every operation agrees with Python's own sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnstore.datastore import (
    ID_LIMIT,
    POSITION_LIMIT,
    TOKEN_LIMIT,
    IdRanges,
    find_whole_positions,
    id_ranges_from_positions,
)

_PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])))
_IDS = st.lists(st.integers(-3, 60)).map(lambda ids: np.array(ids, np.int64))


def _members(pairs):
    return {i for start, stop in pairs for i in range(start, stop)}


@given(_PAIRS)
def test_construction_is_canonical(pairs):
    ranges = IdRanges(pairs)
    assert _members(ranges) == _members(pairs)
    assert bool(ranges) == bool(_members(pairs))
    assert len(ranges) == len(list(ranges))
    bounds = [bound for pair in ranges for bound in pair]
    assert bounds == sorted(set(bounds)), "ranges overlap, touch or are empty"
    assert IdRanges(np.array(pairs, np.int64).reshape(-1, 2)) == ranges


@given(_PAIRS, _PAIRS)
def test_operators(left, right):
    a, b = IdRanges(left), IdRanges(right)
    ours, theirs = _members(left), _members(right)
    for result, expected in ((a | b, ours | theirs), (a & b, ours & theirs), (a - b, ours - theirs)):
        assert result == IdRanges.from_ids(np.array(sorted(expected), np.int64))
    assert (a == b) == (ours == theirs)
    assert a != b or hash(a) == hash(b)


@given(_PAIRS, _IDS)
def test_contains(pairs, ids):
    members = _members(pairs)
    assert IdRanges(pairs).contains(ids).tolist() == [i in members for i in ids.tolist()]
    assert IdRanges(pairs).contains(ids.reshape(1, -1)).shape == (1, len(ids))


@given(_IDS.map(lambda ids: ids[ids >= 0]))
def test_of_ids_and_back(ids):
    ranges = IdRanges.from_ids(ids)
    assert ranges.ids().tolist() == sorted(set(ids.tolist()))
    assert len(ranges.ids()) == ranges.size


@given(_PAIRS, _IDS)
def test_rows_in(pairs, ids):
    ids = np.sort(ids)
    members, slices = _members(pairs), IdRanges(pairs).find_slices(ids)
    rows = [row for start, stop in slices for row in range(start, stop)]
    assert rows == [row for row, i in enumerate(ids.tolist()) if i in members]
    assert slices.shape == (len(slices), 2)
    assert (slices[:, 0] < slices[:, 1]).all()


@given(_PAIRS)
def test_repr_can_be_evaluated(pairs):
    ranges = IdRanges(pairs)
    assert eval(repr(ranges), {"IdRanges": IdRanges}) == ranges


def test_ids_of_the_full_width():
    everything = IdRanges([(0, 2**63 - 1)])
    hole = IdRanges([(2**53, 2**53 + 1)])
    rest = everything - hole
    assert list(rest) == [(0, 2**53), (2**53 + 1, 2**63 - 1)]
    assert rest | hole == everything
    assert rest.contains(np.array([2**53 - 1, 2**53, 2**53 + 1, 2**63 - 2])).tolist() == [
        True,
        False,
        True,
        True,
    ]


def test_the_set_cannot_be_changed():
    ranges = IdRanges([(1, 5)])
    with pytest.raises(ValueError, match="read-only"):
        ranges.starts[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        ranges.stops[0] = 9


@pytest.mark.parametrize("pairs", [[(3, 2)], [(-1, 2)], [(0, 4), (9, 8)]])
def test_ranges_that_run_backward_or_below_zero_are_refused(pairs):
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        IdRanges(pairs)


def test_comparing_with_something_else():
    assert IdRanges([(0, 1)]) != [(0, 1)]


def test_the_last_position_has_a_range():
    last = np.array([POSITION_LIMIT - 1])
    ranges = id_ranges_from_positions(last, last + 1)
    assert list(ranges) == [((POSITION_LIMIT - 1) * TOKEN_LIMIT, ID_LIMIT)]
    assert find_whole_positions(ranges) == IdRanges([(POSITION_LIMIT - 1, POSITION_LIMIT)])
