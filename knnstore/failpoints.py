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
    """One armed place: its name, the passage at which it fires, and what it does.

    Args:
        specification: ``name[:passage][=kill|eio|enospc]``; see the module's text.
    """

    def __init__(self, specification: str) -> None:
        place, _, action = specification.partition("=")
        name, _, passage = place.partition(":")
        self.name = name
        self.action = action or "kill"
        self.passages_left = int(passage or 1)

    def passed(self) -> None:
        """Count one passage and fire when it is the one that was asked for."""
        self.passages_left -= 1
        if self.passages_left != 0:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = {"eio": errno.EIO, "enospc": errno.ENOSPC}[self.action]
        raise OSError(code, os.strerror(code), f"failpoint {self.name}")


_armed = Failpoint(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def arm(specification: str | None) -> None:
    """Arm a failpoint in this process (for tests that fork), or disarm with None."""
    global _armed
    _armed = Failpoint(specification) if specification else None


_recorded: list[str] | None = None


def record() -> list[str]:
    """Note the name of every failpoint passed from now on, in order (for tests).

    Returns:
        The list that grows.
    """
    global _recorded
    _recorded = []
    return _recorded


def failpoint(name: str) -> None:
    """Mark a place where a test may make the process fail; free when none is armed."""
    if _recorded is not None:
        _recorded.append(name)
    if _armed is not None and _armed.name in ("", name):
        _armed.passed()
