"""Disks of any size and state: file systems in memory, mounted for one test."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STEPS = Path(__file__).with_name("steps.py")


class Disk:
    """A mounted file system of a certain size."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={size},mode=755", "none", path)

    def unmount(self) -> None:
        _run("umount", "--lazy", self.path)

    def remount(self, *options: str) -> None:
        """Change its size, or make it read-only: ``size=N``, ``ro``, ``rw``."""
        _mount("-o", ",".join(["remount", *options]), "none", self.path)

    def resize(self, size: int) -> None:
        self.remount(f"size={size}")

    def fill(self) -> None:
        """Leave not one byte free."""
        with (self.path / "filling").open("ab", 0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break
        assert self.free == 0

    def relieve(self) -> None:
        """Take away what `fill` wrote."""
        (self.path / "filling").unlink()

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.path).free


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Disk]]:
    """Makes a disk of so many bytes."""
    made: list[Disk] = []

    def make(size: int) -> Disk:
        made.append(Disk(tmp_path / f"disk-{len(made)}", size))
        return made[-1]

    yield make
    for one in made:
        one.unmount()


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"nothing can be mounted here ({done.stderr.strip()}): be root, or run in `unshare -Urm`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@dataclass(frozen=True)
class Ended:
    """How a step ended."""

    status: int
    out: str
    err: str

    @property
    def ids(self) -> list[str]:
        return self.out.split()


class Steps:
    """Runs the steps of steps.py, each in a process of its own."""

    def __init__(self, scratch: Path, *before: str) -> None:
        command = [*before, sys.executable, str(STEPS), str(scratch)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, name: str, *arguments: object, **options: object) -> Ended:
        """Do a step, which must end well, or by exit status 1 and one line that says why."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([name, arguments, options], default=str), file=self._process.stdin, flush=True)
        ended = Ended(**json.loads(self._process.stdout.readline()))
        assert ended.status in (0, 1), ended
        lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == ended.status, ended.err
        return ended

    def well(self, name: str, *arguments: object, **options: object) -> Ended:
        """Do a step that must end well."""
        ended = self(name, *arguments, **options)
        assert ended.status == 0, ended.err
        return ended

    def refused(self, name: str, *arguments: object, **options: Any) -> str:
        """Do a step that must be refused; returns the one line."""
        ended = self(name, *arguments, **options)
        assert ended.status == 1, ended.out
        assert ended.err.count("\n") == 1, ended.err
        return ended.err

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """Runs steps; see `Steps`."""
    started = Steps(tmp_path_factory.mktemp("steps"))
    yield started
    started.end()


@pytest.fixture
def plain_steps(tmp_path: Path) -> Iterator[Steps]:
    """Runs steps without the right to ignore permissions: even root is then a user like any other."""
    without = "-dac_override,-dac_read_search"
    started = Steps(tmp_path, "setpriv", f"--bounding-set={without}", f"--inh-caps={without}")
    yield started
    started.end()
