"""Rows of Python: dicts and what is like them, and tables of pandas, polars and pyarrow."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from knnstore.documents.values import as_json, is_missing
from knnstore.errors import InputError

_ROWS = 1024  # converted together


def rows_of(table: Any, text: str = "text") -> Iterable[object]:
    """Return the rows of a table of pandas, polars or pyarrow; any other iterable is returned as it is.

    Args:
        table: the table or iterable.
        text: the column that is the text. Missing values of other columns are left out of the rows.

    Raises:
        InputError: two columns have one name, or the argument is no iterable.
    """
    if hasattr(table, "iter_rows"):  # polars
        return (_without_missing(row, text) for row in table.iter_rows(named=True))
    if hasattr(table, "to_batches") or (hasattr(table, "to_pylist") and hasattr(table, "schema")):  # pyarrow
        _check_columns(table.schema.names)
        batches = table.to_batches() if hasattr(table, "to_batches") else [table]
        return (_without_missing(row, text) for batch in batches for row in batch.to_pylist())
    if hasattr(table, "itertuples"):  # pandas
        return _rows_of_pandas(table, text)
    try:
        rows: Iterator[object] = iter(table)
        return rows
    except TypeError as error:
        kind = type(table).__name__
        hint = ": collect() it first" if hasattr(table, "collect") else ""
        raise InputError(f"documents are a list or another iterable, not {kind}{hint}") from error


def mapping_of(row: Any) -> Any:
    """Return a row as a mapping where it is one by its methods: a Series, a `sqlite3.Row`, a struct."""
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


def _rows_of_pandas(table: Any, text: str) -> Iterator[object]:
    columns = [str(name) for name in table.columns]
    _check_columns(columns)
    for start in range(0, len(table), _ROWS):
        part = table.iloc[start : start + _ROWS]
        for values in part.astype(object).itertuples(index=False, name=None):
            yield _without_missing(dict(zip(columns, values, strict=True)), text)


def _check_columns(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"two columns of the table are named {name!r}: rename one of them")
        seen.add(name)


def _without_missing(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Convert the values of a row. Missing ones are left out, but for the text, which becomes None."""
    missing = {text: None} if text in row and is_missing(row[text]) else {}
    return {name: as_json(value) for name, value in row.items() if not is_missing(value)} | missing
