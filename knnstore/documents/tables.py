"""Tables of pandas, polars and pyarrow, which are iterated over by their columns, as rows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from knnstore.documents.values import as_json

_ROWS = 1024  # converted together


def rows_of(table: Any) -> Iterable[object]:
    """The rows of a table, without what is missing in them; whatever else it is stays."""
    if hasattr(table, "iter_rows"):  # polars
        return (_plain(row) for row in table.iter_rows(named=True))
    if hasattr(table, "to_batches"):  # pyarrow
        return (_plain(row) for batch in table.to_batches() for row in batch.to_pylist())
    if hasattr(table, "itertuples"):  # pandas
        return _of_pandas(table)
    rows: Iterable[object] = table
    return rows


def _of_pandas(table: Any) -> Iterator[object]:
    columns = [str(name) for name in table.columns]
    for start in range(0, len(table), _ROWS):
        part = table.iloc[start : start + _ROWS]
        filled = part.astype(object).where(part.notna(), None)  # it has nan and others where nothing is
        for values in filled.itertuples(index=False, name=None):
            yield _plain(dict(zip(columns, values, strict=True)))


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_json(value) for name, value in row.items() if value is not None}
