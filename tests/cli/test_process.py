"""What only a process of its own shows: what is imported, signals, closed pipes."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KNNSTORE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


ROW = b'{"id": "p-1", "text": "The boat came in."}\n'


def test_commands_without_a_model_load_neither_torch_nor_transformers(store):
    program = (
        "import sys; from typer.testing import CliRunner; from knnstore.cli import app\n"
        "for line in sys.argv[1:]: assert CliRunner().invoke(app, line.split()).exit_code == 0, line\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    lines = [
        "domains", "documents", "show n-17", "tag n-17 --add t", "info", "verify", "repair", "optimize",
        "adapters", "move --store faiss", "remove --domain news", "db upgrade",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_help_loads_no_database_and_no_engine():
    program = (
        "import sys; from typer.testing import CliRunner; from knnstore.cli import app\n"
        "assert CliRunner().invoke(app, ['add', '--help']).exit_code == 0\n"
        "print(sorted({'sqlalchemy', 'faiss', 'numpy', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@contextmanager
def adding() -> Iterator[subprocess.Popen[str]]:
    """A process that adds what comes through a pipe and has read the first row."""
    reading, pipe = os.pipe()
    process = subprocess.Popen(
        [*KNNSTORE, "add", "-", "--domain", "piped"],
        stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(reading)
    try:
        os.write(pipe, ROW)
        while unread(pipe):
            assert process.poll() is None
            time.sleep(0.05)
        yield process
    finally:
        os.close(pipe)
        process.communicate(timeout=60)


def unread(pipe: int) -> int:
    """How many bytes nobody has read yet."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def test_ctrl_c_keeps_what_was_committed_and_the_same_command_goes_on(knnstore, store):
    with adding() as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted; what was committed stays, run the same command again to go on\n"
    again = knnstore("add - --domain piped --json", stdin=ROW)
    assert (again.status, again.err, again.json["added"]) == (0, "", 1)


def test_two_processes_cannot_write_at_once(knnstore, store):
    with adding() as first:
        second = knnstore("remove --domain news")
        assert (second.status, second.out) == (1, "")
        assert f"process {first.pid} on " in second.err
        assert second.err.count("\n") == 1
    assert first.returncode == 0
    assert {row["name"] for row in knnstore("domains --json").json} == {"letters", "news", "piped"}


def test_a_reader_that_has_seen_enough(store):
    done = subprocess.run(
        f"{' '.join(map(repr, KNNSTORE))} documents | head -1",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("id ")
    assert done.stderr == ""


def test_a_store_without_room_says_so(store):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KNNSTORE, "domains"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
