"""Small files that would take gigabytes or hours to read: each is bounded, and what is beside it is read."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from knnstore.documents import read_documents, row_files
from knnstore.errors import UnusableDocumentError

READER = """
import json, resource, sys
if "pyarrow" in sys.argv[2]:
    import pyarrow.parquet  # reserves address space
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30),) * 2)
from knnstore.documents import read_documents
problems = []
ids = [document.id for document in read_documents([sys.argv[1]], on_bad=problems.append)]
print(json.dumps([ids, [str(problem) for problem in problems]]))
"""


def read(folder: Path) -> tuple[list[str], list[str]]:
    """Read a folder with two gigabytes of memory and a minute of processor time; returns ids and problems."""
    parquet = "pyarrow" if any(folder.glob("*.parquet")) else ""
    done = subprocess.run(
        [sys.executable, "-c", READER, folder, parquet], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ids, problems = json.loads(done.stdout)
    assert not any("\n" in problem for problem in problems)
    return ids, problems


def table(file: Path, columns: dict[str, object], **options: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="zstd", **options)


def repeated_text(file: Path) -> None:
    """A text of 10 MB stands once in the file, and in 300 rows."""
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300, "int32"), ["x " * 5_000_000])
    table(file, {"id": list(range(300)), "text": text}, store_schema=False)


def repeated_beginnings(file: Path) -> None:
    """Each text is the one before and a letter."""
    texts = pyarrow.chunked_array([["z" * (10_000_000 + at)] for at in range(100)])
    encodings = {"id": "PLAIN", "text": "DELTA_BYTE_ARRAY"}
    columns = {"id": list(range(100)), "text": texts}
    table(file, columns, use_dictionary=False, column_encoding=encodings)


def long_list(file: Path) -> None:
    count = 100_000_000
    values = pyarrow.ListArray.from_arrays([0, count], np.zeros(count, np.int8))
    table(file, {"id": ["0"], "text": ["short"], "list": values})


def one_long_row(file: Path) -> None:
    table(file, {"id": ["0", "1", "2"], "text": ["first", "b" * (270 << 20), "third"]})


def not_utf8(file: Path) -> None:
    offsets = pyarrow.py_buffer(np.array([0, 3, 8], np.int32).tobytes())
    values = pyarrow.py_buffer(b"\xff\xfeahello")
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, values])
    table(file, {"id": ["0", "1"], "text": texts})


def far_dates(file: Path) -> None:
    days = pyarrow.array([2**62, 0], pyarrow.timestamp("ms"))
    table(file, {"id": ["0", "1"], "text": ["a", "b"], "day": days})


NUMBERS = [str(number) for number in range(300)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ids", "said"),
    [
        (repeated_text, NUMBERS, None),
        (repeated_beginnings, NUMBERS[:100], None),
        (
            long_list,
            [],
            r"the column 'list.list.element' has [\d,]+ bytes in the file and 100,000,000 values",
        ),
        (one_long_row, ["0", "2"], "row 2: the row has more than 256 MiB"),
        (not_utf8, ["1"], "row 1: not UTF-8: byte 0xff"),
        (far_dates, ["1"], "row 1: a value cannot be read: "),
    ],
)
def test_a_parquet_that_is_small_in_the_file_alone(
    make: Callable[[Path], None], ids: list[str], said: str | None, tmp_path: Path
) -> None:
    make(tmp_path / "bomb.parquet")
    (tmp_path / "other.txt").write_text("What is beside it is read.")
    found, problems = read(tmp_path)
    assert found == [*ids, "other.txt"]
    assert len(problems) == (said is not None)
    if said is not None:
        assert re.search(said, problems[0]), problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *("seen" + begin * 400_000 for begin in ("<!--", "</", "<?", "<![CDATA[", "<a x='")),
        "seen<a " + "x=1 " * 12_000_000 + ">",
        "seen" + "<svg>" * 200_000 + "</object>" * 200_000,
    ],
    ids=lambda page: page[4:10],
)
def test_a_page_takes_time_and_memory_by_its_length(page: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.html").write_text(page)
    assert read(tmp_path) == (["bomb.html"], [])


@pytest.mark.slow
def test_a_header_of_a_message_and_a_row_of_names_take_no_square_of_their_length(tmp_path: Path) -> None:
    subject = "=?utf-8?q?word?= " * 300_000
    begin = "From a@b Mon Jan  1 00:00:00 2024\nMessage-ID: <m>\n"
    (tmp_path / "a.mbox").write_text(f"{begin}Subject: {subject}\n\nbody\n")
    names = ",".join(f"c{number}" for number in range(300_000))
    (tmp_path / "b.csv").write_text(f"id,text,{names}\n1,wide,{'0,' * 299_999}0\n")
    assert read(tmp_path) == (["m", "1"], [])


@pytest.mark.slow
def test_damaged_footers_of_parquet_end_no_process(tmp_path: Path) -> None:
    """pyarrow ends the process on some: each is named in one line, and the file beside them is read."""
    columns = {"id": ["a", "b"], "text": ["a text", "another"], "tags": [["x", "y"], ["z"]]}
    whole = tmp_path / "whole.parquet"
    table(whole, columns)
    data = whole.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(footer, footer + 40):  # with the levels' histograms, which pyarrow checks
        for bit in (0, 3):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            (tmp_path / f"{at}-{bit}.parquet").write_bytes(damaged)
    ids, problems = read(tmp_path)
    assert {"a", "b"} <= set(ids)
    assert len(problems) > 20
    assert all(re.search(r"/\d+-\d\.parquet(:| row)", problem) for problem in problems)


def test_a_footer_that_ends_the_process_that_reads_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "a.parquet", {"text": ["a text"]})
    monkeypatch.setattr(row_files, "_LIST_COLUMNS", "import os; os.abort()")
    problems = list[UnusableDocumentError]()
    assert not list(read_documents([tmp_path / "a.parquet"], on_bad=problems.append))
    assert "a.parquet: not parquet: the description of its columns is damaged" in str(problems[0])
