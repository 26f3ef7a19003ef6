"""Checks of arguments, shared by all adapters so that each refuses the same input with the same message.

`validate_keys` and `validate_records` check vectors and records, `validate_k` checks counts, and
`validate_params` checks an adapter's parameters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from knnstore.datastore.arrays import Groups, Ids, Keys
from knnstore.datastore.records import ID_LIMIT
from knnstore.errors import ConfigError, DimensionMismatchError, InvalidVectorError

_GROUP_LIMIT = 2**31
"""Group numbers must be below this limit, because they are stored as int32."""


def validate_keys(keys: ArrayLike, dim: int, *, what: str = "keys") -> Keys:
    """Return vectors as a C-contiguous float32 array of shape (n, dim); refuse values that are not finite.

    If `keys` is already a C-contiguous float32 array, `keys` itself is returned, not a copy.

    Args:
        keys: vectors, one in each row: an array, or anything that numpy converts to an array. n may be 0.
        dim: the required number of components of a vector.
        what: plural noun that names the vectors in error messages, for example "queries".

    Raises:
        DimensionMismatchError: a vector does not have `dim` components.
        InvalidVectorError: a component is NaN, infinite, or too large for float32. The message names the
            first row with an invalid component.
        ValueError: the array does not have two dimensions.
    """
    if isinstance(keys, np.ndarray) and keys.dtype == np.float32:
        array = np.ascontiguousarray(keys)
    else:
        # values that overflow float32 become infinite, and are refused below
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(keys, np.float32)
    if array.ndim != 2:
        raise ValueError(f"{what} need two axes (n, {dim}), got shape {array.shape}")
    if array.shape[1] != dim:
        raise DimensionMismatchError(f"{what} have {array.shape[1]} components, the datastore has {dim}")
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        raise InvalidVectorError(f"{what}: row {row} holds NaN or an infinity")
    return array


def validate_records(
    ids: ArrayLike, keys: ArrayLike, groups: ArrayLike, dim: int
) -> tuple[Ids, Keys, Groups]:
    """Check and cast the arguments of `Datastore.add`.

    Args:
        ids: record ids, integers, shape (n,).
        keys: vectors, shape (n, dim).
        groups: group number of each record (records of one domain share a number), integers, shape (n,).
        dim: the required number of components of a vector.

    Returns:
        ids int64 (n,), keys float32 (n, dim), groups int32 (n,). An array that needs no cast is returned
        itself, not a copy.

    Raises:
        ValueError: the arrays have different lengths, ids or groups are not integers, an id or a group number
            is negative or too large, or an id occurs twice.
        DimensionMismatchError: a key does not have `dim` components.
        InvalidVectorError: a component of a key is NaN or infinite.
    """
    checked = validate_keys(keys, dim)
    id_array, group_array = np.asarray(ids), np.asarray(groups)
    for name, array, limit in (("ids", id_array, ID_LIMIT), ("groups", group_array, _GROUP_LIMIT)):
        if array.shape != (len(checked),):
            raise ValueError(f"{name} need shape ({len(checked)},) like the keys, got {array.shape}")
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
        if array.size and array.min() < 0:
            raise ValueError(f"{name} must not be negative, got {array.min()}")
        if array.size and array.max() >= limit:
            raise ValueError(f"{name} must be below {limit}, got {array.max()}")
    id_array = id_array.astype(np.int64, copy=False)
    ordered = np.sort(id_array)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise ValueError(f"id {repeated[0]} occurs twice in one call")
    return id_array, checked, group_array.astype(np.int32, copy=False)


def validate_k(k: int, *, what: str = "k") -> int:
    """Return a count unchanged, or raise ValueError if the count is below 1.

    Args:
        k: the count to check, for example a number of neighbors.
        what: name of the count in the error message.
    """
    if k < 1:
        raise ValueError(f"{what} must be at least 1, got {k}")
    return k


def validate_params(
    adapter: str,
    params: dict[str, Any],
    accepted: dict[str, Any],
    *,
    minima: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return a new dict of an adapter's parameters with defaults filled in; refuse unknown parameters.

    An adapter is the class that connects knnstore to a vector engine.

    Args:
        adapter: the adapter's name, used in error messages.
        params: the parameters from the user, by name.
        accepted: the default value of every known parameter, by name.
        minima: smallest allowed value, by name, of each parameter that must be an integer. The values of
            other parameters are not checked. None checks no value.

    Raises:
        ConfigError: a parameter is unknown (the message names the accepted parameters), or a parameter in
            `minima` is not an integer or is too small.
    """
    unknown = sorted(set(params) - set(accepted))
    if unknown:
        names = ", ".join(sorted(accepted)) or "none"
        raise ConfigError(f"{adapter} has no parameter {unknown[0]!r}; accepted: {names}")
    values = {**accepted, **params}
    for name, minimum in (minima or {}).items():
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{adapter}: {name} must be an integer >= {minimum}, got {value!r}")
    return values
