"""Conversion of rows and values of Python, numpy, pandas, polars, pyarrow and torch to JSON values.

`iterate_rows` and `as_mapping` convert tables and rows; the other functions convert single values.
"""

import enum
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from knnstore.checks import MAX_DEPTH
from knnstore.errors import InputError

_PLAIN = (str, bool, int, float, type(None))
_BYTES = (bytes, bytearray, memoryview)
_SCALARS = ("numpy", "torch", "jax", "jaxlib", "cupy", "tensorflow")
"""Names of libraries whose scalars and arrays have the methods `item` and `tolist`."""


def to_json_or_same(value: Any) -> Any:
    """Convert a value, such as a table cell, to a JSON value; return it unchanged if this is impossible.

    Dates and times become ISO 8601 strings. Decimals, UUIDs and paths become strings. Arrays and sets become
    lists. NaN and infinite numbers become None.
    """
    try:
        return to_json_value(value, infinity=None)
    except _NotJsonError:
        return value


class _NotJsonError(Exception):
    """Error for a value that JSON cannot represent.

    Args:
        path: path of the value in the metadata, such as ``'when'[2]``.
        kind: name of the value's type, or a description of its problem.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path, kind)
        self.path = path
        self.kind = kind


def to_json_metadata(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert the metadata of a row to a dict of JSON values by name.

    Missing values (NaN, `pandas.NaT`, `pandas.NA`) are left out. None is not left out; it becomes null in
    JSON.

    Args:
        row: metadata by name; a name that is a number becomes a string.

    Raises:
        InputError: a value cannot be stored as JSON; the message names the field and the type.
    """
    try:
        return {
            _convert_field_name(name, ""): to_json_value(value, repr(name))
            for name, value in row.items()
            if value is None or not is_missing(value)
        }
    except _NotJsonError as error:
        raise InputError(f"the metadata cannot be stored as JSON: {error.path} is {error.kind}") from error


def to_json_value(value: Any, path: str = "", depth: int = 1, **infinity: None) -> Any:
    """Convert one value, and all values nested in it, to the types that `json.loads` returns.

    Missing values such as NaN become None. A set becomes a sorted list.

    Args:
        value: any value.
        path: path of the value in the metadata, for messages.
        depth: nesting depth of the value: 1 for a value that is not inside an object or a list.
        **infinity: ``infinity=None`` converts infinite numbers to None; without this argument, an infinite
            number raises an error.

    Raises:
        _NotJsonError: JSON cannot represent the value or a nested value.
        InputError: the value is nested more than `MAX_DEPTH` deep.
    """
    if type(value) in _PLAIN:
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value) or infinity:
                return None
            raise _NotJsonError(path, f"{value} (float), and JSON has no infinity")
        return value
    if is_missing(value):
        return None
    value, kind = _unwrap_value(value), type(value)
    if isinstance(value, str):
        return str.__str__(value)
    if kind in _PLAIN:
        return to_json_value(value, path, depth, **infinity)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return to_json_value(float(value), path, depth, **infinity)
    if isinstance(value, Mapping | Sequence | Set) and not isinstance(value, _BYTES):
        if depth > MAX_DEPTH:
            raise InputError(f"the metadata is nested more than {MAX_DEPTH} deep: flatten it")
        if isinstance(value, Mapping):
            return {
                _convert_field_name(name, path): to_json_value(
                    item, f"{path}[{name!r}]", depth + 1, **infinity
                )
                for name, item in value.items()
            }
        items = [to_json_value(item, f"{path}[{i}]", depth + 1, **infinity) for i, item in enumerate(value)]
        return sorted(items, key=json.dumps) if isinstance(value, Set) else items
    advice = ": decode it to a string" if isinstance(value, _BYTES) else ""
    raise _NotJsonError(path, f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.") + advice)


def is_missing(value: Any) -> bool:
    """Return True if a value means "missing", else False.

    None, NaN, `pandas.NaT`, `pandas.NA`, and missing values of numpy and pyarrow mean "missing".
    """
    if value is None:
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, float):
        return value != value
    module = _find_library_name(value)
    if module == "pandas":
        return type(value).__name__ in ("NAType", "NaTType")
    if module == "numpy" and not getattr(value, "shape", ()):
        return bool(getattr(getattr(value, "dtype", None), "kind", "") in "fmM" and value != value)
    if module == "pyarrow" and hasattr(value, "as_py"):
        return is_missing(value.as_py())
    return False


def unwrap_string(value: Any) -> Any:
    """Convert a string of numpy, pyarrow or a similar library to `str`.

    Another value of such a library is converted to a Python value, if possible. All other values are returned
    unchanged.
    """
    if _find_library_name(value) in ("pyarrow", *_SCALARS) and not isinstance(value, str):
        value = _unwrap_value(value)
    return str.__str__(value) if isinstance(value, str) and not isinstance(value, enum.Enum) else value


def _unwrap_value(value: Any) -> Any:
    """Convert a library's scalar or array, a date, a decimal, an enum or a path to a plain Python value.

    Only the value itself is converted. If the result is a list or a dict, its items may need conversion too.
    A value of any other type is returned unchanged.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _format_duration(value)
    if isinstance(value, Decimal | UUID):
        return str(value)
    library = _find_library_name(value)
    if library == "pyarrow":
        return value.as_py() if hasattr(value, "as_py") else _call_converter(value, "to_pylist")
    if library == "polars":
        return _call_converter(value, "to_list")
    if library == "pandas":
        if hasattr(value, "tolist"):  # a series, an index, an array
            return value.tolist()
        return str(value) if type(value).__name__ in ("Period", "Interval") else value
    if library in _SCALARS:
        return _convert_array(value)
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) else value
    return value


def _convert_array(value: Any) -> Any:
    """Convert a scalar or an array of numpy or a similar library to Python numbers, dates, dicts or lists.

    A value that cannot be converted, such as a complex number, is returned unchanged.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m") and not value.shape:
        return _unwrap_value(value.astype(f"{kind}8[us]").item() if _has_time_of_day(value) else value.item())
    if kind == "V" and not value.shape:
        return {name: value[name] for name in value.dtype.names} if value.dtype.names else value
    if kind in ("M", "m", "V") or (kind == "O" and value.shape):
        return list(value)
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    return value if isinstance(plain, complex | bytes) else plain


def _has_time_of_day(value: Any) -> bool:
    """Check whether the unit of a numpy datetime or timedelta is shorter than a day, such as a second."""
    return str(value.dtype).partition("[")[2].rstrip("]") not in ("Y", "M", "W", "D")


def _call_converter(value: Any, method: str) -> Any:
    """Call a method of a value without arguments, and return the result.

    If the value has no such method, the value itself is returned.
    """
    return getattr(value, method)() if hasattr(value, method) else value


def _format_duration(value: timedelta) -> str:
    """Convert a duration to ISO 8601 text in the form that pandas writes into JSON, like ``P1DT2H3M4S``."""
    if hasattr(value, "isoformat"):  # pandas
        return str(value.isoformat())
    sign, rest = ("-", -value) if value < timedelta() else ("", value)
    minutes, seconds = divmod(rest.seconds, 60)
    fraction = f".{rest.microseconds:06d}".rstrip("0") if rest.microseconds else ""
    return f"{sign}P{rest.days}DT{minutes // 60}H{minutes % 60}M{seconds}{fraction}S"


def _convert_field_name(name: Any, path: str) -> str:
    """Convert the key of a mapping to a string, as Python's module `json` does for the keys of objects.

    Args:
        name: the key.
        path: path of the mapping in the metadata, for messages; empty for the metadata itself.

    Raises:
        _NotJsonError: the key is neither a string nor a number, a bool or None.
    """
    if isinstance(name, str):
        return str.__str__(name)
    name = _unwrap_value(name)
    if name is None or isinstance(name, bool | int | float):
        return str(json.loads(json.dumps({name: 0})).popitem()[0])
    if isinstance(name, str):
        return name
    raise _NotJsonError(path or "a field's name", f"named by {type(name).__qualname__}, not by a string")


def _find_library_name(value: Any) -> str:
    """Return the name of the top-level package that defines a value's type, for example "numpy"."""
    return type(value).__module__.partition(".")[0]


_ROWS = 1024
"""Number of rows of a pandas table that are converted together."""
_TEXT_COLUMN = "text"


def iterate_rows(table: Any) -> Iterable[object]:
    """Return an iterator over the rows of a table, or over the items of any other iterable.

    A row of a table is a dict of JSON values by column. Missing values are left out of the dict, except in
    the column ``text``, where a missing value becomes None. The items of another iterable are not changed.

    Args:
        table: table of pandas, polars or pyarrow, data set of Ray, or another iterable.

    Raises:
        InputError: two columns have the same name, or the argument is not iterable.
    """
    if _find_library_name(table) == "ray":
        batches = table.iter_batches(batch_format="pyarrow")
        return (row for batch in batches for row in iterate_rows(batch))
    if hasattr(table, "iter_rows"):  # polars
        return (_drop_missing(row) for row in table.iter_rows(named=True))
    if hasattr(table, "to_batches") or (hasattr(table, "to_pylist") and hasattr(table, "schema")):  # pyarrow
        _check_columns(table.schema.names)
        batches = table.to_batches() if hasattr(table, "to_batches") else [table]
        return (_drop_missing(row) for batch in batches for row in batch.to_pylist())
    if hasattr(table, "itertuples"):  # pandas
        return _iterate_pandas(table)
    try:
        rows: Iterator[object] = iter(table)
        return rows
    except TypeError as error:
        kind = type(table).__name__
        hint = ": collect() it first" if hasattr(table, "collect") else ""
        raise InputError(f"documents are a list or another iterable, not {kind}{hint}") from error


def as_mapping(row: Any) -> Any:
    """Convert an object that is used like a mapping to a mapping; return any other value unchanged.

    Objects that are used like mappings are a pandas Series, a `sqlite3.Row`, and a struct of numpy or Arrow.
    """
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "as_py"):
        return row.as_py()
    dtype = getattr(row, "dtype", None)
    if getattr(dtype, "names", None) and not getattr(row, "shape", ()):
        return {name: row[name] for name in row.dtype.names}
    if hasattr(row, "keys") and hasattr(row, "__getitem__"):
        return {name: row[name] for name in row.keys()}  # noqa: SIM118
    return row


def _iterate_pandas(table: Any) -> Iterator[object]:
    """Yield the rows of a pandas table as dicts of JSON values by column, without missing values.

    A missing value of the column ``text`` becomes None. Raises InputError if two columns have the same name.
    """
    columns = [str(name) for name in table.columns]
    _check_columns(columns)
    for start in range(0, len(table), _ROWS):
        block = table.iloc[start : start + _ROWS]
        for values in block.astype(object).itertuples(index=False, name=None):
            yield _drop_missing(dict(zip(columns, values, strict=True)))


def _check_columns(names: Iterable[str]) -> None:
    """Raise `InputError` if two columns have the same name."""
    seen_names: set[str] = set()
    for name in names:
        if name in seen_names:
            raise InputError(f"two columns of the table are named {name!r}: rename one of them")
        seen_names.add(name)


def _drop_missing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of a row to JSON values, and leave missing values out.

    In the column ``text``, a missing value is not left out; it becomes None. A value that JSON cannot
    represent is not changed.

    Args:
        row: values by column; not changed.
    """
    missing = {_TEXT_COLUMN: None} if _TEXT_COLUMN in row and is_missing(row[_TEXT_COLUMN]) else {}
    return {name: to_json_or_same(value) for name, value in row.items() if not is_missing(value)} | missing
