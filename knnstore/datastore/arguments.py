"""Checks of arguments, shared by all adapters so that each refuses the same input with the same message.

`checked_keys` and `checked_records` check vectors and records, `checked_k` checks counts, and
`checked_params` checks an adapter's parameters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from knnstore.datastore.arrays import Groups, Ids, Keys
from knnstore.datastore.records import ID_LIMIT
from knnstore.errors import ConfigError, DimensionMismatchError, InvalidVectorError

_GROUP_LIMIT = 2**31
"""Group ids must be below this limit, because they are stored as int32."""


def checked_keys(keys: ArrayLike, dim: int, *, what: str = "keys") -> Keys:
    """Return vectors as a C-contiguous float32 array of shape (n, dim); refuse values that are not finite.

    The result is the argument itself if no cast is necessary.

    Args:
        keys: an array, or anything that numpy converts to an array; n may be 0.
        dim: the required number of components.
        what: noun for the vectors in error messages.

    Raises:
        DimensionMismatchError: the last axis is not `dim` long.
        InvalidVectorError: a component is NaN or infinite; the message names the first such row.
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


def checked_records(ids: ArrayLike, keys: ArrayLike, groups: ArrayLike, dim: int) -> tuple[Ids, Keys, Groups]:
    """Check and cast the arguments of `Datastore.add`.

    Args:
        ids: record ids, integers, shape (n,).
        keys: vectors, shape (n, dim).
        groups: group of each record, integers, shape (n,).
        dim: the required number of components.

    Returns:
        ids int64 (n,), keys float32 (n, dim), groups int32 (n,). An array that needs no cast is returned
        itself, not a copy.

    Raises:
        ValueError: shapes differ, an id or a group is negative or too large, or an id occurs twice.
        DimensionMismatchError, InvalidVectorError: see `checked_keys`.
    """
    checked = checked_keys(keys, dim)
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
        raise ValueError(f"id {repeated[0]} stands twice in one call")
    return id_array, checked, group_array.astype(np.int32, copy=False)


def checked_k(k: int, *, what: str = "k") -> int:
    """Return a count unchanged, or raise ValueError if it is below 1.

    `what` names the count in the message.
    """
    if k < 1:
        raise ValueError(f"{what} must be at least 1, got {k}")
    return k


def checked_params(
    adapter: str,
    params: dict[str, Any],
    accepted: dict[str, Any],
    *,
    minima: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return a new dict of an adapter's parameters with defaults filled in; refuse unknown parameters.

    Args:
        adapter: the adapter's name, for the message.
        params: the parameters from the user.
        accepted: every parameter's name and default.
        minima: smallest value of each parameter that must be an integer; other values are not checked.

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
