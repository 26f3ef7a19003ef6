"""Reading documents: what is accepted, what is refused, and in which words."""

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnstore.documents import (
    Fields,
    TextDocument,
    check_paths,
    convert_rows_to_documents,
    estimate_size,
    read_documents,
)
from knnstore.errors import InputError, UnusableDocumentError

texts = st.text(min_size=1, max_size=40).filter(str.strip)
ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
metadata = st.dictionaries(texts.filter(lambda name: name not in ("id", "text")), values, max_size=3)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Give the reader a standard input."""

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def refused(paths: Iterable[str | Path]) -> list[str]:
    """What is said of each document that cannot be used."""
    problems: list[InputError] = []
    for _ in read_documents(paths, on_bad=problems.append):
        pass
    return [str(problem) for problem in problems]


@given(
    st.lists(st.tuples(ids, texts, metadata), unique_by=lambda row: row[0], max_size=5),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-8-sig"]),
    st.sampled_from([".jsonl", ".jsonl.gz"]),
)
def test_written_rows_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str, dict[str, Any]]],
    ascii_only: bool,
    encoding: str,
    suffix: str,
) -> None:
    lines = [json.dumps({"id": id, "text": text, **more}, ensure_ascii=ascii_only) for id, text, more in rows]
    data = "\n".join(["", *lines, "  "]).encode(encoding)
    file = tmp_path_factory.mktemp("rows") / f"rows{suffix}"
    file.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    if rows:
        assert list(read_documents([file])) == [TextDocument(id, text, more) for id, text, more in rows]
    else:
        assert refused([file]) == [f"{file}: the file is empty"]


@given(st.binary(max_size=60))
def test_any_bytes_give_documents_or_one_line_each(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    files = [folder / name for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.md.gz")]
    for file in files:
        file.write_bytes(data)
    for problem in refused(files):
        assert problem.startswith(str(folder))
        assert "\n" not in problem


@given(texts, metadata)
def test_a_row_without_an_id_is_known_by_its_text(text: str, more: dict[str, Any]) -> None:
    assert TextDocument.from_row({"text": text, **more}).id == TextDocument.from_row(text).id
    assert TextDocument.from_row(text + "!").id != TextDocument.from_row(text).id


def test_metadata_is_what_json_gives_back() -> None:
    document = TextDocument.from_row({"id": 7, "text": "x", "pages": (1, 2), "by": {3: "three"}})
    assert document == TextDocument("7", "x", {"pages": [1, 2], "by": {"3": "three"}})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"id": "a"}', "no 'text'"),
        (b'{"text": null}', "no 'text'"),
        (b'{"text": 5}', "'text' is int, not a string"),
        (b'{"text": " \\n "}', "the text is empty"),
        (b'{"id": "", "text": "x"}', "the id is empty"),
        (b'{"id": 1.5, "text": "x"}', "'id' is float, not a string or an integer"),
        (b'{"id": true, "text": "x"}', "'id' is bool, not a string or an integer"),
        (b'{"id": "' + b"x" * 600 + b'", "text": "x"}', "the id has 600 characters, at most 500 are allowed"),
        (b'{"text": "\\ud800"}', "the text holds half a surrogate pair: it is not Unicode"),
        (b'{"text": "x", "score": NaN}', "the metadata cannot be stored as JSON"),
        (b'{"text": "x"', "not JSON: Expecting ',' delimiter"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'["x"]', "a document is an object with a 'text', not list"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at 10"),
        (b'{"text": "\x00"}', "binary data (a NUL byte at 10), not text"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, problem: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"id": "first", "text": "one"}\n' + line + b'\n{"id": "third", "text": "three"}\n')
    problems: list[InputError] = []
    assert [found.id for found in read_documents([file], on_bad=problems.append)] == ["first", "third"]
    assert [str(found).startswith(f"{file} row 2: {problem}") for found in problems] == [True]
    with pytest.raises(InputError, match="row 2"):
        list(read_documents([file]))


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("empty.txt", b"", "the file is empty"),
        ("empty.jsonl", b"", "the file is empty"),
        ("empty.jsonl.gz", gzip.compress(b""), "the file is empty"),
        ("blank.md", b" \n\t\n", "the text is empty"),
        ("picture.txt", b"\x89PNG\r\n\x1a\n\x00\x00", "binary data (a NUL byte at 8), not text"),
        ("latin.txt", "caf\xe9 au lait".encode("latin-1"), "not UTF-8: byte 0xe9 at 3"),
        ("cut.txt.gz", gzip.compress(b"some text")[:-4], "cannot be read: Compressed file ended"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "x"}')[:-9], "cannot be read: Compressed file ended"),
        ("flipped.txt.gz", gzip.compress(b"text")[:10] + b"\xff\xff\xff", "cannot be read: Error -3"),
        ("plain.jsonl.gz", b'{"text": "x"}', "cannot be read: Not a gzipped file"),
        ("paper.pdf", b"%PDF", "unknown kind of file; accepted kinds are .jsonl"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,  # gzip writes the time of day into its bytes
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    (found,) = refused([file])
    assert found.startswith(f"{file}: {problem}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = [tmp_path / name for name in ("none.txt", "none.jsonl")]
    assert refused(missing) == [f"{file}: cannot be read: No such file or directory" for file in missing]


def test_an_id_stands_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "7", "text": "x"}\n{"id": 7, "text": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "7", "text": "z"}\n')
    first = f"the id '7' was already used at {tmp_path}/a.jsonl row 1"
    assert refused([tmp_path]) == [f"{tmp_path}/a.jsonl row 2: {first}", f"{tmp_path}/b.jsonl row 1: {first}"]


def test_a_folder_stands_for_its_documents(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    for name in ("b.md", "deep/a.TXT", "deep/photo.jpg", "deep/.hidden/c.txt", ".d.txt"):
        (tmp_path / name).write_text("text")
    found = [document.id for document in read_documents([tmp_path])]
    assert found == ["b.md", "deep/a.TXT"]
    assert [document.id for document in read_documents([tmp_path / "deep", tmp_path / "b.md"])] == [
        "a.TXT",
        "b.md",
    ]
    ignored: list[Path] = []
    assert len(list(read_documents([tmp_path], on_ignored=ignored.append))) == 2
    assert ignored == [tmp_path / "deep/photo.jpg"]
    assert refused([tmp_path / "deep" / ".hidden", tmp_path / "deep"]) == []
    (tmp_path / "bare").mkdir()
    (problem,) = refused([tmp_path / "bare"])
    assert problem.startswith(f"{tmp_path}/bare: no document in this folder")


def test_what_a_folder_has_of_bad_files_is_told_from_what_was_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "empty.txt").touch()
    (tmp_path / "rows.jsonl").write_text("oops\n")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    found: list[UnusableDocumentError] = []
    assert list(read_documents([tmp_path, tmp_path / "rows.jsonl"], on_bad=found.append)) == []
    assert [(error.in_folder, error.id) for error in found] == [
        (True, "deep/empty.txt"),
        (True, "gone.md"),
        (True, None),
        (False, None),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir(mode=0)
    (problem,) = refused([tmp_path])
    assert problem == f"{tmp_path}/closed: cannot be read: Permission denied"


TABLE = [("a", 'First, "quoted"\ntext.', "1"), ("b", "Second\ttext.", ""), ("c", "x" * 200_000, "3")]


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz"])
def test_tables_of_text(tmp_path: Path, name: str) -> None:
    written = io.StringIO(newline="")
    table = csv.writer(written, delimiter="\t" if "tsv" in name else ",")
    table.writerows([("key", "body", "page"), *TABLE])
    data = written.getvalue().encode("utf-8-sig")
    file = tmp_path / name
    file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert list(read_documents([file], fields=Fields("body", "key"))) == [
        TextDocument(id, text, {"page": page}) for id, text, page in TABLE
    ]
    (problem,) = refused([file])
    assert problem.startswith(f"{file}: no 'text', the fields are 'key', 'body', 'page': name the field")


@pytest.mark.parametrize(
    ("data", "problems"),
    [
        (b"", ["rows.csv: the file is empty"]),
        (
            b"text,id\none,a\ntwo\nthree,c\n",
            ["rows.csv row 3: the row has 1 cells, but the header names 2 columns"],
        ),
        (b'text\n"one\n', ["rows.csv line 2: not a table: unexpected end of data: a quote"]),
        (b"text\n\xe9\n", ["rows.csv row 2: not UTF-8: byte 0xe9 at 0 of line 2; save it as UTF-8"]),
        (b"text,id\n ,a\n", ["rows.csv row 2: the text is empty"]),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, data: bytes, problems: list[str]) -> None:
    (tmp_path / "rows.csv").write_bytes(data)
    found = refused([tmp_path / "rows.csv"])
    assert len(found) == len(problems)
    for one, problem in zip(found, problems, strict=True):
        assert one.startswith(f"{tmp_path}/{problem}")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": 7, "text": "one", "day": date(2026, 1, 1), "score": float("nan"), "by": ["x"]},
        {"id": 8, "text": None, "day": None, "score": 1.5, "by": None},
    ]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    problems: list[UnusableDocumentError] = []
    assert list(read_documents([tmp_path], on_bad=problems.append)) == [
        TextDocument("7", "one", {"day": "2026-01-01", "score": None, "by": ["x"]})
    ]
    assert str(problems[0]).startswith(f"{file} row 2: no 'text'")
    file.write_bytes(file.read_bytes()[:-9])
    assert refused([file])[0].startswith(f"{file}: ")
    assert estimate_size([tmp_path]) is None


@pytest.mark.slow  # importing datasets takes seconds
def test_data_sets_come_by_name(tmp_path: Path) -> None:
    """Of folders, in both their forms: the hub itself is not asked."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"id": "a", "text": "one", "n": 1}\n')
    (tmp_path / "files" / "test.jsonl").write_text('{"id": "b", "text": "two", "n": 2}\n')
    saved = datasets.Dataset.from_list([{"body": "three"}])
    saved.save_to_disk(tmp_path / "saved")
    files = f"hf:{tmp_path}/files"
    assert list(read_documents([files])) == [TextDocument("a", "one", {"n": 1})]
    assert list(read_documents([f"{files}::test"])) == [TextDocument("b", "two", {"n": 2})]
    (three,) = read_documents([f"hf:{tmp_path}/saved"], fields=Fields(text="body"))
    assert three == TextDocument.from_row("three")
    for name, problem in ((":other", "saved without configurations"), ("::test", "saved without splits")):
        assert problem in refused([f"hf:{tmp_path}/saved{name}"])[0]
    for name in ("hf:", "hf:a:b:c:d"):
        assert refused([name])[0].startswith(f"{name}: write a data set as hf:NAME")
    assert refused([f"{files}::none"])[0].startswith(f"{files}::none: the data set cannot be read")
    assert estimate_size([files]) is None


def test_what_cannot_be_read_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.txt").touch()
    check_paths(["-", tmp_path / "folder", "hf:nowhere/at-all"])
    check_paths([tmp_path / "rows.jsonl"], Fields(text="body"))
    for name, problem in (
        ("rows.jsonl", "row 1: no 'text', the fields are 'body'"),
        ("doc", "no such file or folder"),
        ("folder/empty.txt", "the file is empty"),
    ):
        with pytest.raises(UnusableDocumentError, match=problem):
            check_paths([tmp_path / name])


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_standard_input_is_rows_or_one_text(stdin: Callable[[bytes], None], mark: bytes) -> None:
    stdin(mark + b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
    assert [document.id for document in read_documents(["-"])] == ["a", "b"]
    stdin(mark + b"One line.\nAnother.\n")
    assert list(read_documents(["-"])) == [TextDocument("stdin", "One line.\nAnother.\n")]
    stdin(b"")
    assert refused(["-"]) == ["standard input: the file is empty"]


def test_rows_are_read_one_at_a_time() -> None:
    taken = []

    def rows() -> Iterable[str]:
        for number in range(10):
            taken.append(number)
            yield f"text {number}"

    stream = iter(convert_rows_to_documents(rows()))
    next(stream)
    assert taken == [0]


@pytest.mark.parametrize("one", ["a text", b"bytes", {"text": "x"}, TextDocument("a", "x")])
def test_one_document_is_not_many(one: Any) -> None:
    with pytest.raises(InputError, match="a list or another iterable"):
        convert_rows_to_documents(one)


DAY = datetime(2024, 2, 29)
COLUMNS = {"id": [1, 2, 3], "text": ["one", "two", None], "year": [2020, None, 1], "day": [DAY, None, None]}


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_a_table_is_read_by_its_rows(kind: str) -> None:
    table = pandas.DataFrame(COLUMNS) if kind == "pandas" else pyarrow.table(COLUMNS)
    bad: list[InputError] = []
    first, second = convert_rows_to_documents(table, on_bad=bad.append)
    assert (first.id, first.text, first.metadata) == (
        "1",
        "one",
        {"year": 2020, "day": "2024-02-29T00:00:00"},
    )
    assert (second.id, second.text, second.metadata) == ("2", "two", {})
    (told,) = bad
    assert str(told).startswith("document 3: no 'text'")
    texts = [one.text for one in convert_rows_to_documents(pandas.Series(["a", "b"]))]
    assert texts == ["a", "b"]
    with pytest.raises(InputError, match="document 1: no 'text'"):
        list(convert_rows_to_documents(pandas.DataFrame({"body": ["x"]})))


def test_rows_of_python_that_cannot_be_used() -> None:
    problems: list[InputError] = []
    rows = ["fine", 5, {"text": "x", "made": object()}, "fine"]
    found = list(convert_rows_to_documents(rows, source="row", on_bad=problems.append))
    assert [document.text for document in found] == ["fine"]
    assert [str(problem).split(":")[0] for problem in problems] == ["row 2", "row 3", "row 4"]


def test_sizes(tmp_path: Path, stdin: Callable[[bytes], None]) -> None:
    (tmp_path / "a.txt").write_bytes(b"12345")
    (tmp_path / "b.jsonl").write_bytes(b"123")
    assert estimate_size([tmp_path, tmp_path / "none.txt"]) == 8
    assert estimate_size([tmp_path, "-"]) is None
    (tmp_path / "c.txt.gz").write_bytes(b"")
    assert estimate_size([tmp_path]) is None
