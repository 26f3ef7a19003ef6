"""What only a process of its own shows: what is imported, signals, closed pipes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KNNSTORE = [sys.executable, "-c", "from knnstore.cli import main; main()"]


def run(*arguments: str, **options):
    return subprocess.run([*KNNSTORE, *arguments], capture_output=True, text=True, check=False, **options)


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


def test_ctrl_c_keeps_what_was_committed_and_the_same_command_goes_on(store):
    reading, writing = os.pipe()
    adding = subprocess.Popen(
        [*KNNSTORE, "add", "-", "--domain", "piped"],
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b'{"id": "p-1", "text": "The boat came in."}\n')
        pipe.flush()
        lock = store / "writer.json"
        before = lock.stat().st_mtime_ns
        while lock.stat().st_mtime_ns == before:
            time.sleep(0.05)
        time.sleep(0.2)
        adding.send_signal(signal.SIGINT)
        out, err = adding.communicate(timeout=60)
    assert (adding.returncode, out) == (130, "")
    assert err == "interrupted; what was committed stays, run the same command again to go on\n"
    again = run("add", "-", "--domain", "piped", input='{"id": "p-1", "text": "The boat came in."}\n')
    assert (again.returncode, again.stderr) == (0, "")


def test_two_processes_cannot_write_at_once(store):
    reading, writing = os.pipe()
    first = subprocess.Popen([*KNNSTORE, "add", "-", "--domain", "piped"], stdin=reading)
    os.close(reading)
    try:
        lock = store / "writer.json"
        before = lock.stat().st_mtime_ns
        while lock.stat().st_mtime_ns == before:
            time.sleep(0.05)
        second = run("remove", "--domain", "news")
        assert (second.returncode, second.stdout) == (1, "")
        assert f"process {first.pid} on " in second.stderr
        assert second.stderr.count("\n") == 1
    finally:
        os.write(writing, b"The boat came in.")
        os.close(writing)
        assert first.wait(timeout=60) == 0


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
