"""Handling of Ctrl-C: the process prints one line and exits with status 130.

The first Ctrl-C during a command raises KeyboardInterrupt, so that the command closes its files. At any other
time, and at a second Ctrl-C, the process exits at once. A store stays consistent in both cases.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, by the convention of shells: 128 + SIGINT."""

INTERRUPTED_MESSAGE = "interrupted; what was committed stays, run the same command again"


def exit_on_interrupt() -> None:
    """Install a handler that exits with status 130 at Ctrl-C, until `enable_keyboard_interrupt` replaces it.

    Does nothing if the process ignores SIGINT, as a background job does.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit_interrupted)


@contextmanager
def enable_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C while the context is open.

    Does nothing if `exit_on_interrupt` was not called, as in the process of another program.
    """
    if signal.getsignal(signal.SIGINT) is not _exit_interrupted:
        yield
        return
    signal.signal(signal.SIGINT, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _exit_interrupted)


def was_interrupted() -> bool:
    """Check whether Ctrl-C was pressed since the context `enable_keyboard_interrupt` was opened.

    Call this function inside the context. A library can turn KeyboardInterrupt into another exception, so the
    type of an exception does not show whether Ctrl-C was pressed.
    """
    return signal.getsignal(signal.SIGINT) is _exit_interrupted


def _raise_interrupt(*_: object) -> NoReturn:
    """Handle the first Ctrl-C: raise KeyboardInterrupt, and let the next Ctrl-C end the process at once."""
    signal.signal(signal.SIGINT, _exit_interrupted)
    raise KeyboardInterrupt


def _exit_interrupted(*_: object) -> NoReturn:
    """Handle Ctrl-C: print one line on stderr and end the process at once with status 130."""
    os.write(2, f"{INTERRUPTED_MESSAGE}\n".encode())
    os._exit(INTERRUPTED)
