"""A child process ends with its parent, also while it still imports what it is to run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, sys, time
from knnstore.child_process import run_with_parent

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=run_with_parent, args=("slow_work", "run"))
    process.start()
    time.sleep(600)
"""
WORK = """
import time

def wait():
    print("waiting", flush=True)
    time.sleep(600)
    print("outlived the parent", flush=True)

{importing}

def run():
    wait()
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=lambda ending: ending.name)
@pytest.mark.parametrize("importing", ["wait()", ""], ids=["importing", "working"])
def test_it_ends_with_its_parent(tmp_path: Path, importing: str, ending: signal.Signals) -> None:
    """The output, which the child inherits, ends with the last process that holds it."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "slow_work.py").write_text(WORK.format(importing=importing))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "parent.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        first = parent.stdout.readline()
        parent.send_signal(ending)
        assert (first, parent.stdout.read()) == ("waiting\n", "")


def test_the_module_is_imported_after_the_parent_is_watched() -> None:
    """`knnstore.child_process` itself imports nothing that takes long."""
    program = "import sys, knnstore.child_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "sqlalchemy"} & {*done.stdout.split()}
