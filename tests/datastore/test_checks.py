"""Checks of arguments."""

import numpy as np
import pytest

from knnstore.datastore import validate_k, validate_keys, validate_params, validate_records
from knnstore.errors import ConfigError, DimensionMismatchError, InvalidVectorError


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_keys_become_contiguous_float32(dtype):
    given = np.arange(12, dtype=dtype).reshape(4, 3).T
    keys = validate_keys(given, 4)
    assert keys.dtype == np.float32
    assert keys.flags.c_contiguous
    np.testing.assert_array_equal(keys, given)


def test_keys_that_need_no_cast_are_not_copied():
    keys = np.zeros((2, 3), np.float32)
    assert np.shares_memory(validate_keys(keys, 3), keys)


def test_no_keys_are_keys():
    assert validate_keys(np.empty((0, 3)), 3).shape == (0, 3)


def test_messages_name_the_trouble():
    keys = np.zeros((4, 3), np.float32)
    with pytest.raises(DimensionMismatchError, match="queries have 3 components, the datastore has 5"):
        validate_keys(keys, 5, what="queries")
    with pytest.raises(ValueError, match=r"keys need two axes \(n, 3\), got shape \(3,\)"):
        validate_keys(keys[0], 3)
    keys[2, 1] = np.nan
    with pytest.raises(InvalidVectorError, match="keys: row 2 holds NaN or an infinity"):
        validate_keys(keys, 3)


def test_float64_beyond_float32_is_not_finite():
    with pytest.raises(InvalidVectorError, match="row 1"):
        validate_keys(np.array([[1.0], [1e300]]), 1)


@pytest.mark.parametrize(
    ("ids", "groups", "message"),
    [
        ([1, 2], [0, 0, 0], r"ids need shape \(3,\) like the keys, got \(2,\)"),
        ([1, 2, 3], [[0, 0, 0]], r"groups need shape \(3,\) like the keys, got \(1, 3\)"),
        ([1.0, 2.0, 3.0], [0, 0, 0], "ids must be integers, got float64"),
        ([1, 2, 3], [True, True, True], "groups must be integers, got bool"),
        ([1, -2, 3], [0, 0, 0], "ids must not be negative, got -2"),
        ([1, 2, 3], [0, -7, 0], "groups must not be negative, got -7"),
        ([5, 9, 5], [0, 0, 0], "id 5 occurs twice in one call"),
        (np.array([1, 2, 2**63], np.uint64), [0, 0, 0], "ids must be below"),
        ([1, 2, 3], [0, 2**31, 0], "groups must be below"),
    ],
)
def test_records_that_are_refused(ids, groups, message):
    with pytest.raises(ValueError, match=message):
        validate_records(ids, np.zeros((3, 2)), groups, 2)


def test_records_are_cast():
    ids, keys, groups = validate_records(
        np.array([7, 2**40], np.uint64), np.ones((2, 2)), np.array([0, 2**31 - 1]), 2
    )
    assert [array.dtype for array in (ids, keys, groups)] == [np.int64, np.float32, np.int32]
    assert (ids.tolist(), groups.tolist()) == ([7, 2**40], [0, 2**31 - 1])


def test_no_records_are_records():
    ids, keys, groups = validate_records([], np.empty((0, 2)), [], 2)
    assert (ids.dtype, groups.dtype, len(keys)) == (np.int64, np.int32, 0)


def test_k():
    assert validate_k(1) == 1
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        validate_k(0)


def test_params():
    accepted = {"nlist": 100, "metric_arg": None}
    assert validate_params("ivf", {"nlist": 5}, accepted) == {"nlist": 5, "metric_arg": None}
    assert accepted["nlist"] == 100
    with pytest.raises(ConfigError, match="ivf has no parameter 'nlits'; accepted: metric_arg, nlist"):
        validate_params("ivf", {"nlits": 5}, accepted)
    with pytest.raises(ConfigError, match="accepted: none"):
        validate_params("memory", {"x": 1}, {})
