"""The lock of a datastore's directory. tests/store/test_forks.py forks with a whole store open."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from knnstore.durable import WriterLock
from knnstore.errors import DatastoreError, LockedError

AT_EXIT = """
import atexit, sys
from pathlib import Path


@atexit.register  # runs after all functions that are registered later
def try_lock():
    try:
        WriterLock(root)
    except LockedError:
        print("locked")


from knnstore.durable import WriterLock
from knnstore.errors import LockedError

root = Path(sys.argv[1])
lock = WriterLock(root)
"""


def test_the_lock_is_held_until_the_process_has_ended(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path)], capture_output=True, check=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("locked\n", "")
    WriterLock(tmp_path).release()


def test_the_holder_is_named_by_program_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in "/bin/knnstore", "/lib/knnstore/__main__.py":
        monkeypatch.setattr(sys, "argv", [program, "serve", "--api-key", "secret"])
        lock = WriterLock(tmp_path)
        with pytest.raises(LockedError, match=r"by process \d+ on \S+ \(knnstore serve\): stop that process"):
            WriterLock(tmp_path)
        lock.release()


def test_a_forked_process_cannot_release_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    if (child := os.fork()) == 0:
        try:
            lock.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(LockedError):
        WriterLock(tmp_path)
    lock.release()
    WriterLock(tmp_path).release()


def test_a_permission_that_is_denied_for_the_lock_alone_means_that_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some file systems report a lock that is taken; no file is left open."""
    before = len(os.listdir("/proc/self/fd"))

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LockedError, match="is being written by"):
        WriterLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another process erases the datastore at the same time."""
    flock, removed = fcntl.flock, list[Path]()

    def remove_first(descriptor: int, operation: int) -> Any:
        if not removed:
            removed.append(tmp_path / "writer.lock")
            removed[0].unlink()
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = WriterLock(tmp_path)
    with pytest.raises(LockedError):
        WriterLock(tmp_path)
    lock.release()
    WriterLock(tmp_path).release()


def test_a_file_system_without_link_counts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some report that every open file has been removed; no file is left open."""
    before, fstat = len(os.listdir("/proc/self/fd")), os.fstat

    def report_removed(descriptor: int) -> os.stat_result:
        return os.stat_result([*fstat(descriptor)[:3], 0, *fstat(descriptor)[4:]])

    monkeypatch.setattr(os, "fstat", report_removed)
    with pytest.raises(
        DatastoreError, match=r"cannot lock .*writer.lock has no link .* local, writable disk"
    ):
        WriterLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
