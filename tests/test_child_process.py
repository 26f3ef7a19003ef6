"""A child process ends with its parent, also while it still imports what it is to run."""

import os
import signal
import subprocess
import sys
import time
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
import os, time
from pathlib import Path

Path("new").write_text(str(os.getpid()))
os.replace("new", "pid")
{importing}

def run():
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Check whether a process is there, and not a zombie that nobody has waited for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=lambda ending: ending.name)
@pytest.mark.parametrize("importing", ["time.sleep(600)", ""], ids=["importing", "working"])
def test_it_ends_with_its_parent(tmp_path: Path, importing: str, ending: signal.Signals) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "slow_work.py").write_text(WORK.format(importing=importing))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "parent.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "pid").exists():
                assert parent.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            child = int((tmp_path / "pid").read_text())
            assert is_running(child)
        finally:
            parent.send_signal(ending)
    deadline = time.monotonic() + 60  # a busy machine is no fault; the child would stay for 600 seconds
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    if is_running(child):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlives its parent")


def test_the_module_is_imported_after_the_parent_is_watched() -> None:
    """`knnstore.child_process` itself imports nothing that takes long."""
    program = "import sys, knnstore.child_process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "sqlalchemy"} & {*done.stdout.split()}
