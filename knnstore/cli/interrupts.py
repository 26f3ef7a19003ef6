"""Handling of Ctrl-C: the process prints one line and exits with status 130.

The first Ctrl-C during a command raises KeyboardInterrupt, so that the command closes its files. At any other
time, and at a second Ctrl-C, the process exits at once. A store stays whole in both cases.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, by the convention of shells: 128 + SIGINT."""

SAID = "interrupted; what was committed stays, run the same command again"


def prepare() -> None:
    """Exit at Ctrl-C from now on. Does nothing if the process ignores SIGINT, as a background job does."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C while the context is open.

    Does nothing if `prepare` was not called, as in the process of another program.
    """
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def was_interrupted() -> bool:
    """Check if Ctrl-C was pressed; call it inside `interruptible`.

    It is needed because a library can turn KeyboardInterrupt into another exception.
    """
    return signal.getsignal(signal.SIGINT) is _leave


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(*_: object) -> NoReturn:
    os.write(2, f"{SAID}\n".encode())
    os._exit(INTERRUPTED)
