"""Free space on a disk: what will not fit is refused, and a reserve lets a full disk be emptied."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from knnstore.errors import DatastoreError, DiskFullError, KnnstoreError, ReadOnlyError

RESERVE = 2 << 20
"""Bytes of a `Reserve`."""

MARGIN = 2 * RESERVE
"""Bytes that `check_space` leaves free, so that only a removal needs the reserve."""

_SMALLEST = 64 << 10  # of a reserve

_FULL = errno.ENOSPC, errno.EDQUOT
_READ_ONLY = errno.EROFS, errno.EACCES, errno.EPERM


def free_space(path: Path) -> int:
    """Bytes that may still be written at a place, which need not be there yet."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_space(path: Path, needed: int, what: str) -> None:
    """Refuse what will not fit, before it begins.

    Args:
        path: where it is to be written; need not be there yet.
        needed: about how many bytes.
        what: the operation, as the subject of a sentence.

    Raises:
        DiskFullError: there are fewer, or `MARGIN` would not be left.
    """
    free = free_space(path)
    if free < needed + MARGIN:
        raise DiskFullError(
            f"{what} needs {needed + MARGIN:,} bytes at {path} and {free:,} are free: it was not begun; "
            "free some space and try again"
        )


def kind_of(error: OSError) -> type[DatastoreError]:
    """Return the class of error for a failed write."""
    return DiskFullError if error.errno in _FULL else DatastoreError


@contextmanager
def medium_errors(path: Path) -> Iterator[None]:
    """Give the errors of a full disk and of a read-only medium a class and a place.

    Raises:
        DiskFullError, ReadOnlyError: in place of such an `OSError`; others pass.
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
            why = "is on a read-only medium" if error.errno == errno.EROFS else "is not yours to write"
            raise ReadOnlyError(f"{place} {why}: it can be read, and nothing in it can be changed") from error
        raise


def allocate(descriptor: int, start: int, size: int) -> None:
    """Take space on the disk for some bytes of an open file, where the system can.

    Raises:
        OSError: there is none.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)


class Reserve:
    """A file that takes space for as long as nobody needs it, to be given back once the disk is full.

    Removing documents needs some space before it frees any: a database writes what it changes to its log.

    Args:
        folder: where the file is, on the disk that may become full.
    """

    NAME = "reserve"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME

    def keep(self) -> None:
        """Take the space, or what there is of it."""
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                taken = os.fstat(descriptor).st_size
                missing = min(RESERVE - taken, free_space(self._path))
                while missing >= _SMALLEST:
                    try:
                        allocate(descriptor, taken, missing)
                        break
                    except OSError:  # the file system needs some of it for itself
                        missing //= 2
            finally:
                os.close(descriptor)

    def give_back(self) -> None:
        """Free the space if there is little else."""
        with suppress(OSError):
            if free_space(self._path) < RESERVE:
                self._path.unlink(missing_ok=True)


def is_read_only(path: Path) -> bool:
    """Check whether an existing place is read-only, however much space is free."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY) or not os.access(path, os.W_OK)
