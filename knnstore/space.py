"""Free space on a disk: refusal of operations that do not fit, and a reserve file for removals.

`Reserve` keeps some space free, so that documents can be removed from a full disk.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from knnstore.errors import DatastoreError, DiskFullError, KnnstoreError, ReadOnlyError

RESERVE = 2 << 20
"""Size of the file of a `Reserve` in bytes."""

MARGIN = 2 * RESERVE
"""Free space in bytes that `check_space` keeps from all operations, so that documents can still be
removed."""

_SMALLEST = 64 << 10  # of a reserve

_FULL = errno.ENOSPC, errno.EDQUOT
_READ_ONLY = errno.EROFS, errno.EACCES, errno.EPERM


def free_space(path: Path) -> int:
    """Return the free space in bytes on the disk of a path, which need not exist yet."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_space(path: Path, needed: int, what: str) -> None:
    """Check before an operation that the disk has enough free space for the operation.

    Args:
        path: file or folder that the operation writes; it need not exist yet.
        needed: approximate number of bytes that the operation writes.
        what: name of the operation, as the subject of the message.

    Raises:
        DiskFullError: after the operation, less than `MARGIN` bytes would be free.
    """
    free = free_space(path)
    if free < needed + MARGIN:
        raise DiskFullError(
            f"{what} needs {needed + MARGIN:,} bytes at {path}, but only {free:,} are free, so it was not "
            "started: free some space and try again"
        )


def choose_write_error(error: OSError) -> type[DatastoreError]:
    """Return the class of the error to raise for a failed write.

    Args:
        error: the error of the operating system.

    Returns:
        `DiskFullError` if the disk or the quota is full, else `DatastoreError`.
    """
    return DiskFullError if error.errno in _FULL else DatastoreError


@contextmanager
def convert_disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError about the disk, raised inside the ``with`` block, to an error of knnstore.

    Errors about other problems pass unchanged.

    Args:
        path: path that the message names if the OSError has no file name.

    Raises:
        DiskFullError: the disk or the quota is full.
        ReadOnlyError: the disk is read-only, or the user may not write to the path.
    """
    try:
        yield
    except KnnstoreError:  # some are an `OSError` too
        raise
    except OSError as error:
        place = error.filename or path
        if error.errno in _FULL:
            raise DiskFullError(f"{place} cannot be written, the disk is full: free some space") from error
        if error.errno in _READ_ONLY:
            why = (
                "is on a read-only file system"
                if error.errno == errno.EROFS
                else "may not be written by this user"
            )
            raise ReadOnlyError(f"{place} {why}: it can be read but not changed") from error
        raise


def allocate(descriptor: int, start: int, size: int) -> None:
    """Allocate disk space for a range of bytes of an open file.

    The file grows to the end of the range if it is shorter.

    Does nothing if the operating system does not support it.

    Args:
        descriptor: descriptor of the file, open for writing.
        start: first byte.
        size: number of bytes, >= 1.

    Raises:
        OSError: the disk has too little free space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)


class Reserve:
    """A file that occupies disk space, which is freed when the disk is full and documents must be removed.

    Removing documents needs some space before it frees any, because a database writes changes to its log.

    Args:
        folder: folder of the file, on the disk that may become full.
    """

    NAME = "reserve"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME

    def ensure_reserved(self) -> None:
        """Create the file with `RESERVE` bytes, or enlarge it to this size.

        If the disk has less free space, the file gets a smaller size.

        Errors are ignored.
        """
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                missing = min(RESERVE - size, free_space(self._path))
                while missing >= _SMALLEST:
                    try:
                        allocate(descriptor, size, missing)
                        break
                    except OSError:  # the file system needs some of it for itself
                        missing //= 2
            finally:
                os.close(descriptor)

    def give_back(self) -> None:
        """Delete the file if less than `RESERVE` bytes are free on the disk. Errors are ignored."""
        with suppress(OSError):
            if free_space(self._path) < RESERVE:
                self._path.unlink(missing_ok=True)


def is_read_only(path: Path) -> bool:
    """Check whether an existing path cannot be written: a read-only file system, or missing permission.

    A full disk does not count as read-only.
    """
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) or not os.access(path, os.W_OK)
