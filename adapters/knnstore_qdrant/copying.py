"""Opening a copy of a shard, whose files are large and mostly empty, while nobody changes it."""

import errno
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from qdrant_edge import EdgeShard

from knnstore.datastore import NoFileError, check_space, medium_errors, open_file
from knnstore.errors import CorruptDatastoreError, DatastoreError, StoreUnavailableError
from knnstore_qdrant.room import allocated, room_to_open
from knnstore_qdrant.shard import load_shard

COPY = "qdrant-copy-"
"""How the names of copies begin."""

LOCK = "changing.lock"
"""Held by the writer during a change, by a reader while it copies."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.02
_UNSUPPORTED = errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EBADF


def no_copying(root: Path) -> AbstractContextManager[None]:
    """Keep readers from copying during a change; waits for those that are.

    Raises:
        CorruptDatastoreError: the lock's file is lost.
    """
    return _locked(root, fcntl.LOCK_EX, float("inf"))


def no_changing(root: Path, timeout: float) -> AbstractContextManager[None]:
    """Keep the writer from changing anything during a copy.

    Raises:
        StoreUnavailableError: it goes on with a change for longer than `timeout` seconds.
        CorruptDatastoreError: the lock's file is lost.
    """
    return _locked(root, fcntl.LOCK_SH, timeout)


@contextmanager
def _locked(root: Path, kind: int, timeout: float) -> Iterator[None]:
    deadline, lock = time.monotonic() + timeout, root / LOCK
    try:
        file = open_file(lock)
    except (FileNotFoundError, NoFileError) as error:
        raise CorruptDatastoreError(f"{lock} is missing or no file: put an empty file there") from error
    with file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"store unavailable: {root} is being changed, probably optimized; try again"
                )
            time.sleep(_POLL_SECONDS)
        yield


def remove_copies(root: Path) -> None:
    """Remove the copies of readers that were killed."""
    with no_copying(root):  # so no reader is just opening one of these
        for copy in root.glob(f"{COPY}*"):
            shutil.rmtree(copy)


def open_copy(shard: Path, folder: Path) -> EdgeShard:
    """Open a copy of a shard that no other process changes meanwhile; its files have no names any more.

    Args:
        shard: the shard's directory.
        folder: where the copy is made, unless nothing can be written there or it does not fit.

    Raises:
        DiskFullError: there is no room for a copy.
    """
    try:
        return _open_copy(shard, folder)
    except CorruptDatastoreError:
        raise
    except DatastoreError:  # a read-only medium, or a full disk
        return _open_copy(shard, Path(tempfile.gettempdir()))


def _open_copy(shard: Path, folder: Path) -> EdgeShard:
    check_space(folder, allocated(shard), f"to read {shard.parent}, a copy")
    with medium_errors(folder):
        copy = Path(tempfile.mkdtemp(prefix=COPY, dir=folder)) / shard.name
    try:
        with medium_errors(copy):
            copy_directory(shard, copy)
        room_to_open(copy)
        return load_shard(copy, copy_of=shard)
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)


def copy_directory(source: Path, target: Path) -> None:
    """Copy a directory; holes stay holes, and file systems that can share blocks do.

    The copy can be written, whatever the modes of the source say.
    """
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        into.mkdir(mode=0o700)
        for name in names:
            _copy_file(Path(folder) / name, into / name)


def _copy_file(source: Path, target: Path) -> None:
    if sys.platform != "linux":
        shutil.copyfile(source, target)
        return
    with open_file(source) as read, target.open("wb") as written:
        size = os.fstat(read.fileno()).st_size
        written.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            stop = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            while at < stop:
                at += _copy_range(read.fileno(), written.fileno(), at, stop)


def _copy_range(read: int, written: int, at: int, stop: int) -> int:
    """Copy bytes to the same place of another file; returns how many, at least one."""
    try:
        copied = os.copy_file_range(read, written, stop - at, at, at)
        if copied:
            return copied
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    # Between two file systems, or where one of them cannot do it.
    return os.pwrite(written, os.pread(read, min(stop - at, _CHUNK), at), at)
