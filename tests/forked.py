"""`knnstore` in processes that are forked from one which has imported everything.

To import torch and transformers takes a process ten seconds of processor time on a slow machine; a fork has
them. The commands of the README and those of `tests/cli/test_process.py` are processes of their own from the
beginning.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TextIO

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


@contextmanager
def forking_program(folder: Path) -> Iterator[Path]:
    """Write a program `knnstore` for shells, whose commands run in forks; returns its folder."""
    address = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        server = _CONTEXT.Process(target=_fork_commands, args=(listening,), daemon=True)
        server.start()
        program = folder / "knnstore"
        program.write_text(f"#!{sys.executable} -IS\n{_CLIENT.format(address=str(address))}")
        program.chmod(0o755)
        try:
            yield folder
        finally:
            server.kill()
            server.join()


_CLIENT = """
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
command = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(server, [command.encode() + b"\\n"], [0, 1, 2])
answer = server.makefile()
command_pid = int(answer.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(command_pid, number))
status = int(answer.readline())
sys.exit(status if status >= 0 else 128 - status)
"""


def _fork_commands(listening: socket.socket) -> NoReturn:
    """Fork a process for each client, which forks the command and tells the client its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of the clients
    while True:
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listening.close()
        message, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while not message.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                os._exit(1)  # the client has ended
            message += part
        arguments, folder, environment = json.loads(message)
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.chdir(folder)
            sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
            os._exit(_run_main(arguments, environment))
        connection.sendall(b"%d\n" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(b"%d\n" % status)
        os._exit(0)


def _run(arguments: list[str], environment: Mapping[str, str], errors: Connection) -> None:
    os.dup2(errors.fileno(), 2)
    errors.close()
    sys.exit(_run_main(arguments, environment))


def _run_main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run `knnstore` in this process, and return its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    from knnstore.cli import main

    sys.argv = ["knnstore", *arguments]
    try:
        main()
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    else:
        status = 0
    sys.stdout.flush()
    return status or 0
