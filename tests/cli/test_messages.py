"""What is said while a command works, and in which form; what can be refused is refused before torch."""

import itertools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from knnstore.cli import app
from knnstore.cli.logs import LOG
from knnstore.cli.output import Bar, format_table

KNNSTORE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


@pytest.fixture(autouse=True)
def unasked():
    LOG.reset()
    yield
    LOG.reset()


def test_messages_are_objects_where_that_is_asked_for(knnstore, store):
    Path("letters/empty.txt").touch()
    for line in (
        "--log-format json -v add letters --domain d",
        "add letters --domain d --log-format json -v",
    ):
        done = knnstore(line)
        rows = [json.loads(line) for line in done.err.splitlines()]
        assert all({"time", "level", "message"} == row.keys() for row in rows)
        assert "skipped letters/empty.txt: the file is empty" in [row["message"] for row in rows]
        assert any(row["message"].startswith("loading model") for row in rows)
    refused = knnstore("show nothing --log-format json")
    (row,) = [json.loads(line) for line in refused.err.splitlines()]
    assert (refused.status, row["level"], row["message"]) == (1, "error", "no document 'nothing'")
    warned = knnstore("eval news.jsonl --json --log-format json").err.splitlines()
    assert [json.loads(line)["level"] for line in warned] == ["warning"]
    assert knnstore("show nothing").err == "error: no document 'nothing'\n"


REFUSED = [
    ("add doc --domain d", "doc: no such file or folder"),
    ("add wrong.jsonl --domain d", "wrong.jsonl row 1: no 'text', the fields are 'body'"),
    ("eval nowhere.jsonl", "nowhere.jsonl: cannot be read"),
    ("eval held-out.jsonl --domain nothing", "no domain 'nothing'"),
    ("eval held-out.jsonl --per-token missing/t.tsv", "missing/t.tsv cannot be written"),
    ("calibrate held-out.jsonl --domain nothing", "no domain 'nothing'"),
    ("generate x --domain nothing", "no domain 'nothing'"),
    ("search x --home nowhere", "no knnstore at nowhere"),
    ("init --home new --model no/such/model", "the model 'no/such/model' cannot be loaded"),
    ("init --home new --model examples/tiny-lm --store nope", "no adapter 'nope'"),
    ("show x --domain nothing", "no document 'x' in domain 'nothing', which does not exist"),
    (
        "generate x --model-at gone/for/good",
        "the model 'gone/for/good' cannot be loaded: no such folder; ",
    ),
    ("sync letters --domain letters --dry-run", ""),
    ("serve --home nowhere", "no knnstore at nowhere"),
]
"""Commands and why each is refused; the empty reason is that of a command that ends well."""


@pytest.mark.slow
def test_what_can_be_refused_is_refused_before_torch_is_imported(store):
    Path("wrong.jsonl").write_text('{"body": "x"}\n')
    program = (
        "import json, sys; from typer.testing import CliRunner; from knnstore.cli import app\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    done = CliRunner().invoke(app, line.split())\n"
        "    print(json.dumps([done.exit_code, 'torch' in sys.modules, done.stderr]))"
    )
    lines = [*(line for line, _ in REFUSED), "serve --port 99999999"]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)], capture_output=True, text=True, check=False
    )
    *ended, (status, has_torch, said) = map(json.loads, done.stdout.splitlines())
    assert len(ended) == len(REFUSED), done.stderr
    for (line, problem), (status_of_line, *others) in zip(REFUSED, ended, strict=True):
        assert status_of_line == int(bool(problem)), line
        assert others[0] is False, f"{line} imported torch"
        assert others[1].startswith(f"{'error: ' * bool(problem)}{problem}"), line
    assert (status, has_torch) == (2, False)
    assert "65535" in said


def test_an_upstream_that_cannot_be_used_is_refused_before_the_model_is_loaded(store, monkeypatch):
    for url, problem in (
        ("ftp://127.0.0.1", "expected a URL such as"),
        ("127.0.0.1:8001", "expected a URL such as"),
        ("http://me:secret@127.0.0.1", "put the key into KNNSTORE_UPSTREAM_KEY"),
    ):
        done = CliRunner().invoke(app, ["serve", "--upstream", url])
        assert done.exit_code == 2
        assert problem in " ".join(done.stderr.split())
        assert "secret" not in done.stderr
    monkeypatch.setattr("knnstore.load", lambda *_, **__: pytest.fail("the model is loaded"))
    done = CliRunner().invoke(app, ["serve", "--upstream", "http://127.0.0.1:9/v1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9 cannot be used: ConnectError")


def test_progress_is_said_now_and_then_without_a_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("knnstore.cli.output.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("knnstore.cli.output.SECONDS_BETWEEN_LINES", 5)
    with Bar() as bar:
        bar.start("adding to d", total=400)
        for _ in range(4):
            now[0] += 3
            bar.advance(100)
        LOG.as_json = True
        bar.start("reading")
        now[0] += 6
        bar.advance(7)
    first, second, last = capsys.readouterr().err.splitlines()
    assert first == "adding to d: 200 of 400 tok, 33 tok/s, 0:00:06 left"
    assert second == "adding to d: 400 of 400 tok, 33 tok/s, 0:00:00 left"
    row = json.loads(last)
    assert (row["done"], row["total"], row["unit"]) == (7, None, "tok")


def test_tables_fit_the_terminal():
    rows = [{"id": "x" * 60, "tokens": 1234567, "domain": "y" * 40, "tags": "short"}] * 2
    whole = format_table(rows, ["id", "tokens", "domain", "tags"])
    assert "x" * 60 in whole
    fitted = format_table(rows, ["id", "tokens", "domain", "tags"], width=80).splitlines()
    assert max(map(len, fitted)) == 80
    assert all("1,234,567" in line and "short" in line for line in fitted[1:])
    assert fitted[1].count("…") == 2


# The command, which says on stderr when it writes to the system and when the model has run.
WATCHED = """
import io, sys
import torch

class Watched(io.FileIO):
    def write(self, data):
        print("wrote", file=sys.stderr)
        return super().write(data)

def ran(module, *_):
    if type(module).__name__.endswith("LMHeadModel"):
        print("ran", file=sys.stderr)

torch.nn.modules.module.register_module_forward_hook(ran)
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Watched(1, "w", closefd=False)), encoding="utf-8")
from knnstore.cli import main
main()
"""


@pytest.mark.slow
def test_text_comes_as_it_is_written(knnstore, store):
    """The prompt is there before the text is done, and together they are what they are without a stream."""
    line = ["generate", "The harbour", "--max-new-tokens", "24", "--lambda", "0.9"]
    expected = knnstore(*line, "--json").json
    done = subprocess.run([sys.executable, "-c", WATCHED, *line], capture_output=True, check=True)
    assert done.stdout.decode() == f"The harbour{expected['continuation']}\n"
    events = [event for event in done.stderr.decode().split() if event in ("wrote", "ran")]
    assert events[-1] == "wrote"
    changes = sum(one != other for one, other in itertools.pairwise(events))
    assert changes > 6, "it was not written between the runs of the model"


@pytest.mark.slow
def test_a_domain_is_not_removed_at_a_terminal_without_a_yes(store):
    def answered(answer: bytes) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [*KNNSTORE, "remove", "--domain", "news"],
            stdin=theirs, stdout=subprocess.PIPE, stderr=theirs,
        ) as process:  # fmt: skip
            os.write(ours, answer)
            process.wait(240)
        os.close(theirs)
        said = os.read(ours, 1 << 16).decode()
        os.close(ours)
        return process.returncode, said

    status, said = answered(b"n\n")
    assert status == 1
    assert "all 3 documents of news will be removed. Go on?" in said
    assert "error: nothing was changed" in said
    assert answered(b"y\n")[0] == 0
