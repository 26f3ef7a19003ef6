"""The folder beside a home in which the home is made: one process's alone."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from knnstore.errors import ConfigError, LockedError

LOCK = "creation.lock"
_TRIES = 1000
"""To make and lock the folder: more than other processes that come and go can spoil."""
NOTE = "creation.json"
"""What a creation that was interrupted must know again; stays until one goes through."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Have the folder to make a home in, empty but for the note.

    In the end it was renamed, or what was made goes, with the folders above it that were not there before.

    Raises:
        LockedError: another process makes the same home.
        ConfigError: something is there that no creation has left.
    """
    absent = [parent for parent in folder.parents if not parent.exists()]
    lock = _taken(folder)
    try:
        _clear(folder)
        try:
            yield
        except BaseException:
            _clear(folder)
            # From here on it is the next one's, who may be there already.
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
                for parent in absent:
                    parent.rmdir()
            raise
    finally:
        os.close(lock)


def _taken(folder: Path) -> int:
    """Make and lock the folder; the kernel drops the lock when its holder dies."""
    for _ in range(_TRIES):
        _check(folder)
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # whoever had it has just finished or given up
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(lock)
            raise LockedError(f"another process is just making a store, in {folder}: wait for it") from None
        os.close(lock)
    raise ConfigError(f"no folder can be made in {folder.parent}: choose another --home")


def _check(folder: Path) -> None:
    """Make the folder, or look that what is there was left by a creation."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        left = set(os.listdir(folder))
    except FileNotFoundError:  # see above
        return
    except (FileExistsError, NotADirectoryError):
        left = {"a file"}
    if folder.is_symlink() or (left and left.isdisjoint({LOCK, NOTE})):
        raise ConfigError(
            f"{folder}, where the store is to be made, holds what knnstore did not leave there: move it away"
        )


def _clear(folder: Path) -> None:
    """Remove what an interrupted creation left, but for what it knows of things outside."""
    for path in folder.iterdir():
        if path.name not in (LOCK, NOTE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
