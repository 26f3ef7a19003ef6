"""`knnstore` in processes that are forked from one which has imported everything.

To import torch and transformers takes a process ten seconds of processor time on a slow machine; a fork has
them. The tutorial's commands, among others, run as processes of their own from the beginning.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TextIO

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "knnstore.cli",
        "knnstore.lm.model",
        "knnstore.server.running",
        "knnstore_cells",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)


class ForkedCommand:
    """A running `knnstore`, with those methods of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, dict(environment), writing), daemon=True
        )
        self._process.start()
        writing.close()
        self.stderr: TextIO = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("knnstore", seconds or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(*arguments: str) -> tuple[int, str]:
    """Run a command to its end, and return its exit status and what it wrote to standard error."""
    command = ForkedCommand([*arguments], os.environ)
    with command.stderr:
        said = command.stderr.read()
    return command.wait(), said


def _run(arguments: list[str], environment: Mapping[str, str], errors: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(errors.fileno(), 2)
    errors.close()
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    from knnstore.cli import main

    sys.argv = ["knnstore", *arguments]
    main()
