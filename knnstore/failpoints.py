"""Named places where a test may make the process fail.

A failpoint does nothing unless the environment names it when the process starts::

    KNNSTORE_FAILPOINT=segments.manifest.renamed        kill -9 at the first passage
    KNNSTORE_FAILPOINT=segments.manifest.renamed:3      ... at the third
    KNNSTORE_FAILPOINT=segments.manifest.renamed=enospc an OSError there instead
    KNNSTORE_FAILPOINT=:7                               kill -9 at the seventh passage of any
"""

import errno
import os
import signal

VARIABLE = "KNNSTORE_FAILPOINT"
"""The environment variable that arms a failpoint."""


class Failpoint:
    """An armed failpoint: a place in the code at which this process will fail, for tests.

    A passage is one execution of the place. The failpoint counts passages, and fires at one of them: it kills
    the process or raises OSError.

    Args:
        specification: ``name[:passage][=kill|eio|enospc]``; see the module's docstring. An empty name counts
            the passages of all failpoints.
    """

    def __init__(self, specification: str) -> None:
        place, _, action = specification.partition("=")
        name, _, passage = place.partition(":")
        self.name = name
        self.action = action or "kill"
        self.passages_left = int(passage or 1)

    def count_passage(self) -> None:
        """Count one passage; at the specified passage kill the process, or raise OSError."""
        self.passages_left -= 1
        if self.passages_left != 0:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = {"eio": errno.EIO, "enospc": errno.ENOSPC}[self.action]
        raise OSError(code, os.strerror(code), f"failpoint {self.name}")


_armed = Failpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def arm(specification: str | None) -> None:
    """Choose the failpoint (named place in the code) at which this process fails; for tests that fork.

    Only one failpoint is armed at a time: the new one replaces the failpoint that was armed before.

    Args:
        specification: ``name[:passage][=kill|eio|enospc]``, see `Failpoint`. With None or an empty text no
            failpoint is armed afterwards.
    """
    global _armed
    _armed = Failpoint(specification) if specification else None


_recorded: list[str] | None = None


def record() -> list[str]:
    """Start to record the names of all failpoints that the process passes; for tests.

    Returns:
        An empty list. Each time the process passes a failpoint from now on, the failpoint's name is appended.
    """
    global _recorded
    _recorded = []
    return _recorded


def failpoint(name: str) -> None:
    """Mark a place in the code where a test can make the process fail.

    Does nothing, at almost no cost, if no failpoint is armed. An armed failpoint may kill the process here.

    Args:
        name: name of the place.

    Raises:
        OSError: a failpoint with this name and an error action fires here.
    """
    if _recorded is not None:
        _recorded.append(name)
    if _armed is not None and _armed.name in ("", name):
        _armed.count_passage()
