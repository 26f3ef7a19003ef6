"""Rows of Python objects are stored as the same rows of a file would be."""

import enum
import json
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.documents import TextDocument, convert_rows_to_documents, read_documents
from knnstore.errors import InputError

pandas = pytest.importorskip("pandas")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)
unicode = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
rows = st.lists(
    st.fixed_dictionaries({"text": unicode, "x": values, "y": values}),
    max_size=4,
    unique_by=lambda row: row["text"],
)


class Color(enum.Enum):
    """A value of a program."""

    RED = "red"


class Level(enum.IntEnum):
    """A number of a program."""

    HIGH = 3


@dataclass
class Odd:
    """Nothing that a file holds."""


def metadata_of(value: Any) -> Any:
    """What is stored of one value."""
    (found,) = convert_rows_to_documents([{"text": "t", "x": value}])
    assert json.loads(json.dumps(found.metadata, allow_nan=False)) == found.metadata
    return found.metadata


DAY = datetime(2024, 2, 29, 13, 5)


STORED: list[tuple[Any, Any]] = [
    (np.int64(3), 3),
    (np.uint8(3), 3),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.array(["a", "b"]), ["a", "b"]),
    (np.array(5), 5),
    (np.array([1.0, np.nan]), [1.0, None]),
    (np.array(["2024-02-29", "NaT"], "datetime64[D]"), ["2024-02-29", None]),
    (np.datetime64("2024-02-29"), "2024-02-29"),
    (np.datetime64("2024-02-29T13:05", "ns"), "2024-02-29T13:05:00"),
    (np.timedelta64(90, "s"), "P0DT0H1M30S"),
    (np.array([{"a": np.int8(1)}], object), [{"a": 1}]),
    (pandas.Timestamp("2024-02-29 13:05"), "2024-02-29T13:05:00"),
    (pandas.Timestamp("2024-02-29 13:05", tz="UTC"), "2024-02-29T13:05:00+00:00"),
    (pandas.Timedelta("1 day"), "P1DT0H0M0S"),
    (pandas.Period("2024-02"), "2024-02"),
    (pandas.Series([1, 2]), [1, 2]),
    (pandas.Categorical(["a", "b"]), ["a", "b"]),
    (pandas.array([1, None], dtype="Int64"), [1, None]),
    (pyarrow.scalar(5), 5),
    (pyarrow.scalar("a"), "a"),
    (pyarrow.scalar([1, 2]), [1, 2]),
    (pyarrow.array([1, None]), [1, None]),
    (torch.tensor([1.5, 2.5]), [1.5, 2.5]),
    (torch.tensor(7), 7),
    (Decimal("1.10"), "1.10"),
    (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (PurePosixPath("a/b"), "a/b"),
    (Color.RED, "red"),
    (Level.HIGH, 3),
    (DAY, "2024-02-29T13:05:00"),
    (DAY.replace(tzinfo=UTC), "2024-02-29T13:05:00+00:00"),
    (DAY.date(), "2024-02-29"),
    (time(13, 5), "13:05:00"),
    (timedelta(days=1, seconds=90.5), "P1DT0H1M30.5S"),
    ((1, 2), [1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (range(3), [0, 1, 2]),
    (deque([1]), [1]),
    (OrderedDict(a=np.int64(1)), {"a": 1}),
    ({np.int64(1): date(2024, 1, 1)}, {"1": "2024-01-01"}),
    (None, None),
]
"""A value, and what is stored for it."""


@pytest.mark.parametrize("at", range(len(STORED)))
def test_a_value_is_stored_as_a_file_has_it(at: int) -> None:
    value, stored = STORED[at]
    assert metadata_of(value) == {"x": stored}


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        np.float32("nan"),
        np.datetime64("NaT"),
        pandas.NaT,
        pandas.NA,
        Decimal("NaN"),
        pyarrow.scalar(None),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_a_missing_value_is_left_out(value: Any) -> None:
    assert metadata_of(value) == {}
    assert metadata_of([value]) == {"x": [None]}
    (found,) = convert_rows_to_documents([{"text": "t", "id": value}])
    assert found.id == TextDocument.from_row("t").id
    with pytest.raises(InputError, match=r"^document 1: no 'text': it is null$"):
        list(convert_rows_to_documents([{"text": value}]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Odd(), "'x' is tests.test_python_rows.Odd"),
        (b"bytes", "'x' is bytes: decode it to a string"),
        ([1, {"deep": complex(1, 2)}], "'x'[1]['deep'] is complex"),
        (math.inf, "'x' is inf (float), and JSON has no infinity"),
        (np.float32("-inf"), "'x' is -inf (float)"),
        ({(1, 2): 3}, "'x' is named by tuple, not by a string"),
        ((part for part in [1]), "'x' is generator"),
    ],
    ids=["object", "bytes", "deep", "inf", "numpy inf", "name", "generator"],
)
def test_what_cannot_be_stored_is_named(value: Any, said: str) -> None:
    problems: list[InputError] = []
    found = list(
        convert_rows_to_documents(
            [{"text": "a"}, {"text": "b", "x": value}, {"text": "c"}], on_bad=problems.append
        )
    )
    assert [one.text for one in found] == ["a", "c"]
    assert str(problems[0]).startswith(f"document 2: the metadata cannot be stored as JSON: {said}")
    assert "\n" not in str(problems[0])


def test_values_that_hold_themselves_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InputError, match="nested more than 64 deep"):
        list(convert_rows_to_documents([{"text": "a", "x": circle}]))


@given(rows)
def test_rows_of_python_are_those_of_a_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    expected = list(convert_rows_to_documents(rows))
    assert list(read_documents([folder / "rows.jsonl"] if rows else [])) == expected


def test_rows_of_many_kinds_are_one_document() -> None:
    frame = pandas.DataFrame({"id": [1.0, None], "text": ["one", "two"], "n": [np.nan, 5]})
    expected = [TextDocument("1", "one"), TextDocument(TextDocument.from_row("two").id, "two", {"n": 5.0})]
    table = pyarrow.table({"id": [1, None], "text": ["one", "two"], "n": [None, 5.0]})
    structured = np.array([("one", 5)], dtype=[("text", "U5"), ("n", "i4")])
    assert list(convert_rows_to_documents(frame)) == expected
    assert list(convert_rows_to_documents(frame.to_dict("records"))) == expected
    assert list(convert_rows_to_documents(row for _, row in frame.iterrows())) == expected
    assert list(convert_rows_to_documents(table)) == expected
    assert list(convert_rows_to_documents(table.to_batches()[0])) == expected
    assert next(iter(convert_rows_to_documents(structured))).metadata == {"n": 5}
    assert [one.text for one in convert_rows_to_documents(np.array(["one", "two"]))] == ["one", "two"]
    assert [one.text for one in convert_rows_to_documents(pyarrow.array(["one", "two"]))] == ["one", "two"]
    assert next(iter(convert_rows_to_documents([{"text": np.str_("one"), "id": UUID(int=5)}]))).id.endswith(
        "0005"
    )


def test_two_columns_of_one_name_are_refused() -> None:
    frame = pandas.DataFrame([["one", 1, 2]], columns=["text", "n", "n"])
    with pytest.raises(InputError, match="two columns of the table are named 'n'"):
        list(convert_rows_to_documents(frame))


@pytest.mark.parametrize("given", [5, None, object()])
def test_what_is_no_list_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="documents are a list or another iterable, not"):
        list(convert_rows_to_documents(given))


@pytest.mark.parametrize("row", [Path("a.txt"), 5, None, ["text"], b"text"])
def test_what_is_no_row_is_refused(row: Any) -> None:
    with pytest.raises(InputError, match=r"document 1: a document is an object with a 'text', not "):
        list(convert_rows_to_documents([row]))
