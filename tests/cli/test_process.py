"""What only a process of its own shows: what is imported, signals, closed pipes."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest

import knnstore as library

KNNSTORE = [sys.executable, "-m", "knnstore"]
ROW = b'{"id": "p-1", "text": "The boat came in."}\n'


@pytest.mark.slow
def test_help_loads_no_engine_and_commands_without_a_model_load_no_torch(store):
    program = (
        "import sys; from typer.testing import CliRunner; from knnstore.cli import app\n"
        "def loaded(*names): print(sorted(set(names) & sys.modules.keys()))\n"
        "assert CliRunner().invoke(app, ['add', '--help']).exit_code == 0\n"
        "loaded('sqlalchemy', 'faiss', 'numpy', 'torch')\n"
        "for line in sys.argv[1:]: assert CliRunner().invoke(app, line.split()).exit_code == 0, line\n"
        "loaded('torch', 'transformers')"
    )
    lines = [
        "domains", "documents", "show n-17", "tag n-17 --add t", "info", "verify", "repair", "optimize",
        "adapters", "move --store faiss", "remove --domain news --yes", "db upgrade",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, *lines], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr


def unread(pipe: int) -> int:
    """How many bytes nobody has read yet."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_committed_and_the_same_command_goes_on(knnstore, store):
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
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        os.close(pipe)
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted; what was committed stays, run the same command again\n"
    again = knnstore("add - --domain piped --json", stdin=ROW)
    assert (again.status, again.err, again.json["added"]) == (0, "", 1)


def test_two_processes_cannot_write_at_once(knnstore, store):
    with library.open(store, "a") as first:
        second = subprocess.run(
            [*KNNSTORE, "remove", "--domain", "news", "--yes"], capture_output=True, text=True, check=False
        )
        assert (second.returncode, second.stdout) == (1, "")
        assert f"is being written by process {os.getpid()} on " in second.stderr
        assert second.stderr.count("\n") == 1
        assert len(knnstore("domains --json").json) == 2
        first.remove_domain("letters")
    assert [row["name"] for row in knnstore("domains --json").json] == ["news"]
    assert knnstore("remove --domain news --yes").status == 0


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(store):
    done = subprocess.run(
        f"{' '.join(map(repr, KNNSTORE))} documents | head -1",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("id ")
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["domains", "--help", "--version"])
def test_a_full_disk_behind_the_output_is_one_line(store, command):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KNNSTORE, command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    # The interpreter itself cannot flush the output at its end, and prints a line of its own.
    assert done.stderr.splitlines()[0].endswith("No space left on device"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("moment", ["starting", "closing"])
def test_ctrl_c_before_and_after_a_command_is_one_line(tmp_path, moment):
    """While the libraries are imported, and when the interpreter closes."""
    wait = "import os, time\nos.write(1, b'here\\n')\ntime.sleep(60)\n"
    if moment == "starting":
        (tmp_path / "typer.py").write_text(wait)
    else:
        hook = "".join(f"    {line}\n" for line in wait.splitlines())
        (tmp_path / "sitecustomize.py").write_text(
            f"import atexit\ndef wait():\n{hook}atexit.register(wait)\n"
        )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [*KNNSTORE, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            while process.stdout.readline() not in ("here\n", ""):
                pass
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert err == "interrupted; what was committed stays, run the same command again\n"
    assert process.returncode == 130
