"""Values of Python, numpy, pandas, polars, pyarrow and torch as JSON has them."""

import enum
import json
import math
import os
from collections.abc import Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from knnstore.checks import MAX_DEPTH
from knnstore.errors import InputError

_PLAIN = (str, bool, int, float, type(None))
_BYTES = (bytes, bytearray, memoryview)
_SCALARS = ("numpy", "torch", "jax", "jaxlib", "cupy", "tensorflow")
"""Libraries whose numbers and arrays have `item` and `tolist`."""


def as_json(value: Any) -> Any:
    """Convert a value of a table's cell to what JSON holds, and leave what has no such form as it is.

    Dates and times become ISO 8601, exact numbers, UUIDs and paths become text, arrays and sets become
    lists, and numbers that are not finite become None.
    """
    try:
        return json_value(value, infinity=None)
    except _NotJsonError:
        return value


class _NotJsonError(Exception):
    """A value that JSON cannot hold.

    Args:
        path: how to reach it, such as ``'when'[2]``.
        kind: its type, or what is wrong with it.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path, kind)
        self.path = path
        self.kind = kind


def json_metadata(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the metadata of a row of Python to what JSON holds. Missing values are left out.

    Missing are NaN, `pandas.NaT` and `pandas.NA`; None is kept, as null is in a file.

    Raises:
        InputError: a value cannot be stored; names the field and the type.
    """
    try:
        return {
            _name_of(name, ""): json_value(value, repr(name))
            for name, value in row.items()
            if value is None or not is_missing(value)
        }
    except _NotJsonError as error:
        raise InputError(f"the metadata cannot be stored as JSON: {error.path} is {error.kind}") from error


def json_value(value: Any, path: str = "", depth: int = 1, **infinity: None) -> Any:
    """Convert one value to what `json.loads` would give.

    Args:
        value: anything.
        path: the value's place in a document, for messages.
        depth: levels of objects and lists around it.
        **infinity: ``infinity=None`` converts infinite numbers to None; without it they are refused.

    Raises:
        _NotJsonError: it, or a part of it, has no form in JSON.
        InputError: it is nested too deep.
    """
    if type(value) in _PLAIN:
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value) or infinity:
                return None
            raise _NotJsonError(path, f"{value} (float), and JSON has no infinity")
        return value
    if is_missing(value):
        return None
    value, kind = _unwrapped(value), type(value)
    if isinstance(value, str):
        return str.__str__(value)
    if kind in _PLAIN:
        return json_value(value, path, depth, **infinity)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return json_value(float(value), path, depth, **infinity)
    if isinstance(value, Mapping | Sequence | Set) and not isinstance(value, _BYTES):
        if depth > MAX_DEPTH:
            raise InputError(f"the metadata is nested more than {MAX_DEPTH} deep: flatten it")
        if isinstance(value, Mapping):
            return {
                _name_of(name, path): json_value(part, f"{path}[{name!r}]", depth + 1, **infinity)
                for name, part in value.items()
            }
        parts = [json_value(part, f"{path}[{at}]", depth + 1, **infinity) for at, part in enumerate(value)]
        return sorted(parts, key=json.dumps) if isinstance(value, Set) else parts
    advice = ": decode it to a string" if isinstance(value, _BYTES) else ""
    raise _NotJsonError(path, f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.") + advice)


def is_missing(value: Any) -> bool:
    """Return whether a value stands for a missing one: None, NaN, `pandas.NaT` or `pandas.NA`."""
    if value is None:
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, float):
        return value != value
    module = _library_of(value)
    if module == "pandas":
        return type(value).__name__ in ("NAType", "NaTType")
    if module == "numpy" and not getattr(value, "shape", ()):
        return bool(getattr(getattr(value, "dtype", None), "kind", "") in "fmM" and value != value)
    if module == "pyarrow" and hasattr(value, "as_py"):
        return is_missing(value.as_py())
    return False


def plain_text(value: Any) -> Any:
    """Return the string that a scalar of a library holds, and anything else as it is."""
    if _library_of(value) in ("pyarrow", *_SCALARS) and not isinstance(value, str):
        value = _unwrapped(value)
    return str.__str__(value) if isinstance(value, str) and not isinstance(value, enum.Enum) else value


def _unwrapped(value: Any) -> Any:
    """Convert what is no JSON by itself, one level: a library's scalar or array, a date, an exact number."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _duration(value)
    if isinstance(value, Decimal | UUID):
        return str(value)
    library = _library_of(value)
    if library == "pyarrow":
        return value.as_py() if hasattr(value, "as_py") else _listed(value, "to_pylist")
    if library == "polars":
        return _listed(value, "to_list")
    if library == "pandas":
        if hasattr(value, "tolist"):  # a series, an index, an array
            return value.tolist()
        return str(value) if type(value).__name__ in ("Period", "Interval") else value
    if library in _SCALARS:
        return _from_array(value)
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) else value
    return value


def _from_array(value: Any) -> Any:
    """Convert a number or an array of numpy or of a library like it."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m") and not value.shape:
        return _unwrapped(value.astype(f"{kind}8[us]").item() if _has_clock(value) else value.item())
    if kind == "V" and not value.shape:
        return {name: value[name] for name in value.dtype.names} if value.dtype.names else value
    if kind in ("M", "m", "V") or (kind == "O" and value.shape):
        return list(value)
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    return value if isinstance(plain, complex | bytes) else plain


def _has_clock(value: Any) -> bool:
    """Return whether a numpy time is finer than a day; a date becomes a date."""
    return str(value.dtype).partition("[")[2].rstrip("]") not in ("Y", "M", "W", "D")


def _listed(value: Any, method: str) -> Any:
    return getattr(value, method)() if hasattr(value, method) else value


def _duration(value: timedelta) -> str:
    """Write a length of time as ISO 8601, as pandas writes it into JSON."""
    if hasattr(value, "isoformat"):  # pandas
        return str(value.isoformat())
    sign, rest = ("-", -value) if value < timedelta() else ("", value)
    minutes, seconds = divmod(rest.seconds, 60)
    fraction = f".{rest.microseconds:06d}".rstrip("0") if rest.microseconds else ""
    return f"{sign}P{rest.days}DT{minutes // 60}H{minutes % 60}M{seconds}{fraction}S"


def _name_of(name: Any, path: str) -> str:
    """Return the name of a field as JSON writes it."""
    if isinstance(name, str):
        return str.__str__(name)
    name = _unwrapped(name)
    if name is None or isinstance(name, bool | int | float):
        return str(json.loads(json.dumps({name: 0})).popitem()[0])
    if isinstance(name, str):
        return name
    raise _NotJsonError(path or "a field's name", f"named by {type(name).__qualname__}, not by a string")


def _library_of(value: Any) -> str:
    """Return the name of the package that a value's type is from; the package is not imported for it."""
    return type(value).__module__.partition(".")[0]
