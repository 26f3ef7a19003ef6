"""The kinds of files that documents are read from, what is refused of each, and what a folder leaves out."""

import csv
import gzip
import io
import json
import mailbox
import os
import socket
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnstore.documents import TextDocument, check_paths, estimate_size, read_documents, source_files
from knnstore.errors import InputError, UnusableDocumentError

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=30
).filter(str.strip)


def read(path: Path, **options: Any) -> list[TextDocument]:
    return list(read_documents([path], **options))


def problems_of(path: Path, **options: Any) -> list[UnusableDocumentError]:
    """What is wrong with the documents of a path."""
    found: list[UnusableDocumentError] = []
    for _ in read_documents([path], on_bad=found.append, **options):
        pass
    return found


def written(folder: Path, name: str, data: bytes | str) -> Path:
    file = folder / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


# -- JSON


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        ('[{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]', ["1", "2"]),
        ('\ufeff[\n  {"id": 1, "text": "a"}\n]\n', ["1"]),
        ('{"id": 1, "text": "a"}', ["1"]),
        ('{\n  "id": 1,\n  "text": "a"\n}', ["1"]),
        ('{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n', ["1", "2"]),
    ],
)
def test_json(tmp_path: Path, data: str, ids: list[str]) -> None:
    assert [one.id for one in read(written(tmp_path, "rows.json", data))] == ids
    assert [one.id for one in read(written(tmp_path, "rows.JSON.GZ", gzip.compress(data.encode())))] == ids


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.json", '[{"text": "x"},]', ": not JSON: Expecting value: line 1 column 16 (char 15); remove the"),
        ("a.json", '[{"text": "x"}\n{"text": "y"}]', ": not JSON: Expecting ',' delimiter: line 2 column 1"),
        ("a.json", "[]", ": the array has no rows"),
        ("a.json", "", ": the file is empty"),
        ("a.json", "5", ": the file must be an array of rows or one object, not int"),
        ("a.json", '{"text": null}', ": no 'text': it is null"),
        ("a.json", '{"body": "x"}', ": no 'text', the fields are 'body'"),
        ("a.json", '[{"text": "x", "n": NaN}]', ": the metadata cannot be stored as JSON: NaN is"),
        ("a.json", "[" * 100_000, ": not JSON: maximum recursion depth exceeded"),
        ("a.jsonl", '{"text": "x"},\n', " row 1: not JSON: Extra data: line 1 column 14 (char 13); remove"),
        ("a.jsonl", '{"text": "x"}{"text": "y"}', " row 1: not JSON: Extra data: line 1 column 14 (char 13)"),
        ("a.jsonl", '[{"text": "x"}]', " row 1: a document is an object with a 'text', not list; write an"),
        ("a.jsonl", '[\n{"text": "x"}\n]', " row 1: not JSON Lines: an array begins here"),
        ("a.jsonl", '{\n"text": "x"\n}', " row 1: not JSON Lines: an object begins here"),
        ("a.jsonl", '{"text": null, "a": 1}', " row 1: no 'text': it is null"),
        ("a.jsonl", '{"text": "x", "n": 1' + "0" * 5000 + "}", " row 1: not JSON: Exceeds the limit"),
    ],
    ids=range(16),
)  # fmt: skip
def test_json_that_cannot_be_used(tmp_path: Path, name: str, data: str, said: str) -> None:
    file = written(tmp_path, name, data)
    (problem,) = problems_of(file)
    assert str(problem).startswith(f"{file}{said}")
    assert "\n" not in str(problem)


# -- tables


@given(
    st.lists(st.tuples(texts, texts), min_size=1, max_size=5),
    st.sampled_from(",;\t|"),
    st.sampled_from(["csv", "TSV"]),
)
def test_tables_with_any_delimiter(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str, suffix: str
) -> None:
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter=delimiter)
    writer.writerow(["id", "text", "more"])
    writer.writerows([str(number), *row] for number, row in enumerate(rows))
    file = written(tmp_path_factory.mktemp("table"), f"rows.{suffix}", table.getvalue())
    expected = [TextDocument(str(number), text, {"more": more}) for number, (text, more) in enumerate(rows)]
    assert read(file) == expected


def test_the_column_of_the_text_chooses_the_delimiter(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "text,a;b;c\nx,y\n")
    assert [(one.text, one.metadata) for one in read(file)] == [("x", {"a;b;c": "y"})]


def test_excel_names_the_delimiter_in_the_first_line(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "sep=|\nid|text\n1|one\n2|\n")
    assert [one.id for one in read_documents([file], on_bad=lambda _: None)] == ["1"]
    assert str(problems_of(file)[0]) == f"{file} row 4: the text is empty"


def test_a_row_with_line_breaks_is_named_by_its_row_and_line(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", 'id,text\n1,"two\nlines"\n2,\n\n3,"x\ny",z\n4,fine\n5,"open\n')
    assert [one.id for one in read_documents([file], on_bad=lambda _: None)] == ["1", "4"]
    said = [str(problem).removeprefix(str(file)) for problem in problems_of(file)]
    assert said[0] == " row 3 (line 4): the text is empty"
    assert said[1] == " row 5 (line 6): the row has 3 cells, but the header names 2 columns"
    assert said[2].startswith(
        " line 9: not a table: unexpected end of data: a quote that is opened in this row"
    )
    assert len(said) == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text,a,b,a\nx,1,2,3\n", ": columns 2 and 4 are both named 'a': rename one of them"),
        ("text,text\nx,y\n", ": columns 1 and 2 are both named 'text'"),
        ("id,text\n", ": the file has names of columns, but no rows"),
        ("\n\n", ": the file is empty"),
        ("id;body\n1;x\n", ": no 'text', the fields are 'body': name the field"),
        ("id,text\n1,x\0y\n", " row 2: binary data (a NUL byte at 3 of line 2), not text"),
        ("id,text\r1,x\r", " line 1: not a table: a line ends in a lone carriage return"),
        ("text,,\nx,,5\n", " row 2: column 3 has no name, but a value in this row"),
    ],
    ids=range(8),
)
def test_tables_that_cannot_be_used(tmp_path: Path, data: str, said: str) -> None:
    file = written(tmp_path, "a.csv", data)
    problem = problems_of(file)[0]
    assert str(problem).startswith(f"{file}{said}")
    assert "\n" not in str(problem)


def test_columns_without_a_name_may_be_empty(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.csv", "id,text,,\n1,x,,\n")) == [TextDocument("1", "x")]


def test_a_bad_character_costs_one_row(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", b'id,text\n1,one\n2,"caf\xe9\n,more"\n3,three\n')
    assert [one.id for one in read_documents([file], on_bad=lambda _: None)] == ["1", "3"]
    (problem,) = problems_of(file)
    assert str(problem).startswith(
        f"{file} row 3: not UTF-8: byte 0xe9 at 6 of line 3; save it as UTF-8, or give"
    )


def test_wide_and_long_tables(tmp_path: Path) -> None:
    columns = ["text", *(f"c{at}" for at in range(5000))]
    data = ",".join(columns) + "\n" + ",".join(["word " * 100_000, *("v" for _ in range(5000))]) + "\n"
    (found,) = read(written(tmp_path, "a.csv", data))
    assert (len(found.text), len(found.metadata)) == (500_000, 5000)


# -- encodings

SAMPLE = "id,text\n1,Käse – €\n"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "cp1252", "utf-8", "UTF-8-SIG"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.txt", "a.txt.gz", "a.html", "a.ipynb"])
def test_another_encoding_is_read_where_it_is_named(tmp_path: Path, encoding: str, name: str) -> None:
    text = "Käse – €"
    cells = [{"cell_type": "markdown", "source": text}]
    whole = {
        "csv": SAMPLE,
        "jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n",
        "json": json.dumps([{"text": text}], ensure_ascii=False),
        "html": f"<p>{text}</p>",
        "ipynb": json.dumps({"cells": cells}, ensure_ascii=False),
    }.get(name.split(".")[1], text)
    data = whole.encode(encoding)
    file = written(tmp_path, name, gzip.compress(data) if name.endswith(".gz") else data)
    assert [one.text for one in read(file, encoding=encoding)] == [text]
    if encoding.lower() in ("utf-8", "utf-8-sig"):
        return
    for problem in problems_of(file):
        assert problem.reason in ("not UTF-8", "binary")
        assert "--encoding" in str(problem)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            "boat".encode("utf-32"),
            "its first bytes mark it as UTF-32: save it as UTF-8, or give --encoding utf-32",
        ),
        (
            "boat".encode("utf-16"),
            "its first bytes mark it as UTF-16: save it as UTF-8, or give --encoding utf-16",
        ),
        ("a boat".encode("utf-16-be"), "binary data (a NUL byte at 0), not text; it looks like UTF-16-BE"),
        ("a boat".encode("utf-32-le"), "binary data (a NUL byte at 1), not text; it looks like UTF-32-LE"),
        (
            b"one\ntwo\ncaf\xe9",
            "not UTF-8: byte 0xe9 at 11 (line 3); save it as UTF-8, or give --encoding cp1252",
        ),
        (b"\xef\xbb\xbfcaf\xe9", "not UTF-8: byte 0xe9 at 6 (line 1)"),
        (b"\xef\xbb\xbf", "the text is empty"),
        (b"a\0b", "binary data (a NUL byte at 1), not text"),
    ],
    ids=range(8),
)
def test_encodings_are_called_by_their_names(tmp_path: Path, data: bytes, said: str) -> None:
    file = written(tmp_path, "a.txt", data)
    (problem,) = problems_of(file)
    assert str(problem).startswith(f"{file}: {said}")


def test_an_encoding_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "x")
    for name in ("nothing", "hex", ""):
        with pytest.raises(InputError, match="there is no encoding"):
            check_paths([file], encoding=name)
        with pytest.raises(InputError, match="there is no encoding"):
            read_documents([file], encoding=name)
    for name in ("a.txt", "b.csv", "c.jsonl"):
        (problem,) = problems_of(written(tmp_path, name, b"text\n\xff\n"), encoding="ascii")
        assert "not ascii" in str(problem)


# -- notebooks and pages


def test_a_notebook_is_what_was_written_into_it(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Words."]},
        {"cell_type": "code", "source": "print(5)\n", "outputs": [{"text": "the output"}]},
        {"cell_type": "raw", "source": "raw"},
        {"cell_type": "code", "source": []},
    ]
    file = written(tmp_path, "a.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    assert read(file) == [TextDocument("a.ipynb", "# Title\nWords.\n\nprint(5)")]
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["a = 1"]}]}], "nbformat": 3}
    assert read(written(tmp_path, "b.ipynb", json.dumps(old)))[0].text == "a = 1"
    for data, said in (
        ("{}", "not a notebook: there is no list of 'cells'"),
        ("[]", "not a notebook: there is no list of 'cells'"),
        ("{", "not a notebook: not JSON: Expecting property name"),
        ('{"cells": []}', "the notebook has no markdown and no code"),
        (
            '{"cells": [5, {"cell_type": "code"}, {"cell_type": "code", "source": [5]}]}',
            "the notebook has no",
        ),
    ):
        (problem,) = problems_of(written(tmp_path, "c.ipynb", data))
        assert str(problem).startswith(f"{tmp_path}/c.ipynb: {said}")
        assert problem.id == "c.ipynb"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>One</p><p>two</p>", "One\ntwo"),
        ("<p>a  b\n c<br>d &amp; &eacute;&#8211;", "a b c\nd & é–"),
        ("<style>p {}</style><script>if (a < b) '<p>no</p>'</script><p>yes", "yes"),
        ("<SCRIPT>no</SCRIPT>x<noscript>no</noscript><template><p>no</p></template>y", "xy"),
        ("<table><tr><th>a<th>b<tr><td>1</td> <td>2</td></table>", "a\tb\n1\t2"),
        ("<pre>def f():\n    return 1\n</pre>after", "def f():\n    return 1\nafter"),
        ("plain, no tags", "plain, no tags"),
        ("<body><svg><text>no</text></svg>yes<!-- no --></body>", "yes"),
        ("<ul><li>one<li>two</ul><b>bo</b>ld", "one\ntwo\nbold"),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_page_is_the_text_that_is_seen(tmp_path: Path, page: str, text: str) -> None:
    file = written(tmp_path, "a.HTM", f"<!DOCTYPE html><title>The\n title</title>{page}")
    assert read(file) == [TextDocument("a.HTM", text, {"title": "The title"})]


def test_a_page_may_name_its_encoding(tmp_path: Path) -> None:
    page = '<meta http-equiv="Content-Type" content="text/html; charset=ISO-8859-1"><p>café €'
    assert read(written(tmp_path, "a.html", page.encode("cp1252")))[0].text == "café €"
    (problem,) = problems_of(written(tmp_path, "a.html", b"<p>caf\xe9"))
    assert "not UTF-8: byte 0xe9 at 6" in str(problem)
    (problem,) = problems_of(written(tmp_path, "a.html", "<script>x</script>"))
    assert str(problem).endswith(": the page has no text")


@given(st.text(alphabet="<>/!-[]=\"' abpscriptr&;#x1?", max_size=60))
def test_any_page_gives_a_text_or_one_line(tmp_path_factory: pytest.TempPathFactory, page: str) -> None:
    file = written(tmp_path_factory.mktemp("page"), "a.html", page)
    for problem in problems_of(file):
        assert "\n" not in str(problem)


# -- mail

WHEN = datetime(2024, 2, 29, 13, 5, tzinfo=UTC)


def mail(body: str, **headers: str) -> EmailMessage:
    message = EmailMessage()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    message.set_content(body)
    return message


def test_a_mailbox_is_its_messages(tmp_path: Path) -> None:
    first = mail(
        "Body ünd more.\nFrom here on a line begins so.\n",
        Subject="Grüße aus Köln",
        From="Jörg <j@example.com>",
        Date=format_datetime(WHEN),
        Message_ID="<one@example.com>",
    )
    first.add_alternative("<p>not this</p>", subtype="html")
    first.add_attachment(b"text of the attachment", maintype="text", subtype="plain", filename="a.txt")
    second = mail("unused", Subject="page")
    second.set_content("<p>Only <b>a page</b></p>", subtype="html")
    box = mailbox.mbox(tmp_path / "in.mbox")
    for message in (first, second, mail("", Subject="empty")):
        box.add(message)
    box.close()
    found: list[UnusableDocumentError] = []
    one, two = read_documents([tmp_path / "in.mbox"], on_bad=found.append)
    assert one == TextDocument(
        "one@example.com",
        "Body ünd more.\nFrom here on a line begins so.",
        {"subject": "Grüße aus Köln", "from": "Jörg <j@example.com>", "date": "2024-02-29T13:05:00+00:00"},
    )
    assert (two.text, two.metadata, two.id) == (
        "Only a page",
        {"subject": "page"},
        TextDocument.from_row(two.text).id,
    )
    assert str(found[0]).startswith(f"{tmp_path}/in.mbox message 3 (line ")
    assert str(found[0]).endswith(": the message has no text")
    packed = written(tmp_path, "in.mbox.gz", gzip.compress((tmp_path / "in.mbox").read_bytes()))
    assert [document.text for document in read_documents([packed], on_bad=lambda _: None)] == [
        one.text,
        two.text,
    ]


def test_a_line_that_begins_with_from_is_no_message_in_a_text(tmp_path: Path) -> None:
    first = "From a@b.c\nSubject: x\n\nOne.\n\nFrom the sea came a wind.\n\nTwo.\n\n"
    data = first + "From a@b.c\nSubject: y\n\n>From here.\n"
    found = read(written(tmp_path, "a.mbox", data))
    assert [one.text for one in found] == ["One.\n\nFrom the sea came a wind.\n\nTwo.", "From here."]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", ": the file is empty"),
        (b"\n\n", ": not a mailbox: no line 'From ...' begins a message"),
        (b"hello\n", ": not a mailbox: it does not begin with a line 'From ...'"),
        (b"From the sea\n\nhello\n", ": not a mailbox"),
    ],
)
def test_what_is_no_mailbox(tmp_path: Path, data: bytes, said: str) -> None:
    (problem,) = problems_of(written(tmp_path, "a.mbox", data))
    assert str(problem).startswith(f"{tmp_path}/a.mbox{said}")


def test_messages_with_odd_headers_and_encodings(tmp_path: Path) -> None:
    data = (
        b"From a Thu Feb 29 13:05:00 2024\nSubject: =?nothing?Q?x?=\nDate: never\n"
        b"Content-Type: text/plain; charset=no-such\n\nna\xefve\n\n"
        b"From a Thu Feb 29 13:05:00 2024\nSubject: caf\xe9\n"
        b"Content-Type: text/plain; charset=utf-8\n\nna\xc3\xafve too\n"
    )
    one, two = read(written(tmp_path, "a.mbox", data))
    assert (one.text, two.text) == ("naïve", "naïve too")
    assert one.metadata["date"] == "never"


# -- links, devices and bounds


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A folder with a text, beside another with a secret."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key.txt").write_text("a private key")
    (tmp_path / "inside" / "deep").mkdir(parents=True)
    (tmp_path / "inside" / "deep" / "a.txt").write_text("text")
    return tmp_path / "inside"


def test_links_are_followed_in_the_folder_only(inside: Path) -> None:
    key = inside.parent / "outside" / "key.txt"
    (inside / "key.txt").symlink_to(key)
    (inside / "relative.txt").symlink_to("../outside/key.txt")
    (inside / "twice.txt").symlink_to("relative.txt")
    (inside / "zero.txt").symlink_to("/dev/zero")
    (inside / "same.txt").symlink_to("deep/a.txt")
    (inside / "folder").symlink_to("../outside")
    (inside / "around").symlink_to(".")
    os.link(inside / "deep" / "a.txt", inside / "hard.txt")
    found: list[UnusableDocumentError] = []
    assert [one.id for one in read_documents([inside], on_bad=found.append)] == [
        "deep/a.txt",
        "hard.txt",
        "same.txt",
    ]
    assert sorted(Path(problem.where).name for problem in found) == [
        "around", "folder", "key.txt", "relative.txt", "twice.txt", "zero.txt",
    ]  # fmt: skip
    assert all(problem.in_folder and "link" in problem.reason for problem in found)
    assert estimate_size([inside]) == 12
    # What is named is the user's choice, through links too.
    assert read(inside / "key.txt")[0].text == "a private key"
    (inside.parent / "linked").symlink_to(inside)
    assert {one.id for one in read_documents([inside.parent / "linked"], on_bad=lambda _: None)} == {
        "deep/a.txt", "hard.txt", "same.txt",
    }  # fmt: skip


def test_a_link_that_is_put_there_meanwhile_is_not_followed(inside: Path) -> None:
    (inside / "deep" / "b.txt").write_text("fine")
    documents = read_documents([inside], on_bad=(found := []).append)  # type: ignore[var-annotated]
    assert next(documents).id == "deep/a.txt"
    (inside / "deep" / "b.txt").unlink()
    (inside / "deep" / "b.txt").symlink_to(inside.parent / "outside" / "key.txt")
    assert list(documents) == []
    assert ", outside the folder: to read it, give that path" in str(found[0])


def test_only_regular_files_are_read(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inside)  # names of sockets are short
    os.mkfifo("pipe.txt")
    os.mkfifo("pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.csv")
        (inside / "folder.txt").mkdir()
        found: list[UnusableDocumentError] = []
        assert [one.id for one in read_documents([inside], on_bad=found.append)] == ["deep/a.txt"]
        assert {Path(problem.where).name for problem in found} == {"pipe.txt", "pipe.jsonl", "socket.csv"}
        assert {problem.reason for problem in found} == {"no regular file"}
        for name in ("pipe.txt", "pipe.jsonl", "socket.csv"):
            (problem,) = problems_of(inside / name)
            assert ": not a regular file: it is a " in str(problem)
            with pytest.raises(UnusableDocumentError, match="not a regular file"):
                check_paths([inside / name])
    (inside / "device.txt").symlink_to("/dev/zero")
    (problem,) = problems_of(inside / "device.txt")
    assert str(problem).endswith(": not a regular file: it is a device")


def bombs() -> Iterable[tuple[str, Callable[[int], bytes]]]:
    """Files that are small, and a document or a row of which is longer than so many bytes."""
    row = b"From a\nSubject: x\n\n"
    return [
        ("a.txt", lambda size: b"a" * (size + 1)),
        ("a.txt.gz", lambda size: gzip.compress(b"a" * (size + 1))),
        ("a.jsonl.gz", lambda size: gzip.compress(b" " * (size + 1))),
        ("a.json.gz", lambda size: gzip.compress(b" " * (size + 1))),
        ("a.csv.gz", lambda size: gzip.compress(b"text\n" + b"a" * (size + 1))),
        ("b.csv.gz", lambda size: gzip.compress(b'text\n"' + b"a\n" * size)),
        ("a.mbox.gz", lambda size: gzip.compress(row + b"a\n" * size)),
        ("a.html.gz", lambda size: gzip.compress(b"a" * (size + 1))),
        ("a.ipynb.gz", lambda size: gzip.compress(b" " * (size + 1))),
    ]


@pytest.mark.parametrize(("name", "make"), bombs(), ids=[name for name, _ in bombs()])
def test_a_document_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[int], bytes]
) -> None:
    size = 1 << 20
    for module in (
        source_files,
        *(__import__(f"knnstore.documents.{one}", fromlist=[""]) for one in ("row_files", "text_extraction")),
    ):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", size)
    file = written(tmp_path, name, make(size))
    (problem,) = problems_of(file)
    assert problem.reason == "too large"
    assert "has more than 1 MiB, the limit for one document" in str(problem)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_lines_after_one_that_is_too_long_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    for name in ("source_files", "row_files"):
        module = __import__(f"knnstore.documents.{name}", fromlist=[""])
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
    for longest in (988, 989, 990, 2500):  # the row, with what stands around its text, has 12 bytes more
        rows = ["first", "x" * longest, "last"]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode(encoding)
        problems = list[UnusableDocumentError]()
        file = written(tmp_path, "a.jsonl", lines)
        found = [one.text for one in read_documents([file], encoding=encoding, on_bad=problems.append)]
        if longest + 13 <= 1000:  # with the end of the line
            assert (found, problems) == (rows, [])
        else:
            assert found == ["first", "last"]
            assert [str(one).split(": the line has more than")[0] for one in problems] == [f"{file} row 2"]


def test_many_rows_may_be_longer_together_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        source_files,
        *(__import__(f"knnstore.documents.{one}", fromlist=[""]) for one in ("row_files", "text_extraction")),
    ):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
    rows = [f"{number}{'x' * 300}" for number in range(20)]
    assert len(read(written(tmp_path, "a.csv", "text\n" + "\n".join(rows) + "\n"))) == 20
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    assert len(read(written(tmp_path, "a.jsonl", lines))) == 20
    box = "".join(f"From a\nSubject: x\n\n{row}\n\n" for row in rows)
    assert len(read(written(tmp_path, "a.mbox", box))) == 20


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz", "a.mbox.gz", "a.json.gz"])
def test_a_file_that_is_cut_off_says_so(tmp_path: Path, name: str) -> None:
    data = {"j": b'{"text": "%s"}\n', "c": b"text\n%s\n", "m": b"From a\nSubject: x\n\n%s\n"}.get(
        {"json": "j", "csv": "c", "mbox": "m"}.get(name.split(".")[1].removesuffix("l"), ""), b"%s"
    )
    whole = gzip.compress(data % os.urandom(2000).hex().encode())
    (problem,) = problems_of(written(tmp_path, name, whole[:-200]))
    assert "cannot be read: Compressed file ended" in str(problem)
    assert problem.reason == "unreadable"
