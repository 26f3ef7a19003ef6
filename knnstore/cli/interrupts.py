"""Ctrl-C: one line and exit status 130, whenever it comes.

A command that is under way closes what it has open. Before and after, and at a second Ctrl-C, the process
ends at once: whatever a store was doing then, it is whole.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

SAID = "interrupted; what was committed stays, run the same command again"


def prepare() -> None:
    """From now on end at Ctrl-C, unless this process is to ignore it, as a job in the background."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """While a command is under way, raise KeyboardInterrupt at the first Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is not _leave:  # called in a process of somebody else's
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


def was_interrupted() -> bool:
    """Whether Ctrl-C came in the block, of which a library may have made another exception."""
    return signal.getsignal(signal.SIGINT) is _leave


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(*_: object) -> NoReturn:
    os.write(2, f"{SAID}\n".encode())
    os._exit(INTERRUPTED)
