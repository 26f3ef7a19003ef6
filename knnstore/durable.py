"""Durable files: the one place where the embedded datastores touch the disk.

A file is written once, hashed on the way, synced, and named in a manifest with its size and
SHA-256. It is mapped for reading only, and only after its size was checked: touching a page
beyond the end of a short file kills the process. Nothing is ever written through a map, where a
full disk would kill the process as well. After a failed fsync the kernel may have dropped the
dirty pages, so the operation fails for good and the file is written anew.
"""

import errno
import hashlib
import json
import os
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from knnstore.errors import DatastoreError, LockedError
from knnstore.failpoints import failpoint
from knnstore.space import medium_errors

_OWNER_ONLY = 0o600

BLOCK = 1 << 16
"""Bytes hashed at a time; also what a search checks when it touches a row for the first time."""

_MOST_BYTES = 4 << 30
"""Most bytes of a file that is read as a whole. A damaged or sparse file may claim any size."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The entry of one file in a manifest."""

    name: str
    """The path relative to the datastore's directory."""

    size: int
    """Length in bytes."""

    sha256: str
    """Hexadecimal SHA-256 of the concatenated SHA-256 digests of the file's blocks of 64 KiB.

    A hash tree of two levels: threads can share the work, and one block can be checked alone.
    """


class NoFileError(OSError):
    """Something stands where a file is to be that is no file, or claims a size that no such file has."""


class FileWriter:
    """Writes one new file, hashing on the way; the file is synced by `finish` or removed.

    Args:
        root: the datastore's directory.
        name: the new file's path below it; must not exist.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._path = root / name
        self._name = name
        self._size = 0
        self._block = hashlib.sha256()
        self._digests = bytearray()
        failpoint("segments.file.create")
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._descriptor >= 0:  # not finished
            os.close(self._descriptor)
            with suppress(OSError):
                self._path.unlink()

    def write(self, data: NDArray[Any] | bytes) -> None:
        """Append the bytes of an array or a buffer."""
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        failpoint("segments.file.write")
        while view:
            piece = view[: BLOCK - self._size % BLOCK]
            self._block.update(piece)
            self._size += len(piece)
            view = view[len(piece) :]
            if self._size % BLOCK == 0:
                self._digests += self._block.digest()
                self._block = hashlib.sha256()
            while piece:  # os.write may take only a part
                piece = piece[os.write(self._descriptor, piece) :]
        failpoint("segments.file.written")

    def finish(self) -> StoredFile:
        """Sync and close the file; its name is durable only after `sync_directory`."""
        os.fsync(self._descriptor)
        failpoint("segments.file.synced")
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        if self._size % BLOCK:
            self._digests += self._block.digest()
        return StoredFile(self._name, self._size, hashlib.sha256(self._digests).hexdigest())

    @property
    def digests(self) -> bytes:
        """The digests of the finished file's blocks, 32 bytes each."""
        return bytes(self._digests)


def open_file(path: Path) -> BinaryIO:
    """Open a file of a home for reading; what stands in its place keeps nobody waiting.

    Raises:
        FileNotFoundError: nothing is there.
        NoFileError: a folder, a pipe or a device is.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoFileError(errno.EINVAL, "is no file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Read a small file of a home as a whole; see `open_file`.

    Raises:
        NoFileError: also if the file claims more bytes than any such file has, before they are read.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise NoFileError(errno.EFBIG, "is too large to be one of a store", str(path))
        return file.read()


def sync_directory(path: Path) -> None:
    """Make names that were created, replaced or removed in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    failpoint("segments.directory.synced")


def sync_file(path: Path) -> None:
    """Make what a library did to a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def publish(path: Path, content: bytes, what: str) -> None:
    """Replace a small file atomically and durably: readers see the old or the new content.

    Args:
        path: the file; a crash leaves at most ``<name>.tmp`` beside it.
        content: all of its bytes.
        what: the name of the failpoints passed on the way, ``segments.<what>.…``.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with FileWriter(path.parent, temporary.name) as writer:
        writer.write(content)
        writer.finish()
    failpoint(f"segments.{what}.written")
    try:
        _remove_folder(path)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    failpoint(f"segments.{what}.renamed")
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file that nothing names any more; a missing one is fine, for a crash may repeat this."""
    failpoint("segments.file.unlink")
    _remove_folder(path)
    with suppress(IsADirectoryError):  # it is somebody's
        path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """Remove an empty folder that stands where a file is to be."""
    with suppress(OSError):
        path.rmdir()


def remove_folder(path: Path) -> None:
    """Remove a folder, or where something is in it still, make durable what went from it."""
    try:
        path.rmdir()
    except FileNotFoundError:  # a crash may repeat this
        pass
    except OSError:
        if path.is_dir():
            sync_directory(path)


class WriterLock:
    """The lock that keeps a second writer out; the kernel drops it when its holder dies.

    The lock file is never removed, for that would let two processes lock two files of one name.
    Who holds it stands beside it, for the error message only.

    Args:
        root: the datastore's directory.

    Raises:
        LockedError: another handle holds the lock; names its process.
        ReadOnlyError: nothing can be written there.
    """

    def __init__(self, root: Path) -> None:
        self._lock = FileLock(
            root / "writer.lock",
            timeout=0,
            mode=_OWNER_ONLY,
            thread_local=False,
            fallback_to_soft=False,
            preserve_lock_file=True,
        )
        holder = root / "writer.json"
        try:
            with medium_errors(root):
                self._lock.acquire()
        except Timeout:
            raise LockedError(
                f"{root} is being written by {_described(holder)}: end that first; mode 'r' may read"
            ) from None
        except OSError as error:
            raise DatastoreError(f"cannot lock {root}: {error}; is it on a local, writable disk?") from error
        # Not the whole command line, which may hold a password.
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
        here = {"pid": os.getpid(), "host": socket.gethostname(), "command": command}
        with suppress(OSError):  # it serves a message only
            holder.touch(mode=_OWNER_ONLY)
            holder.write_text(json.dumps(here))

    def release(self) -> None:
        """Release the lock for the next writer."""
        self._lock.release()


def _described(holder: Path) -> str:
    """Say who holds a lock, as far as is known."""
    try:
        known = json.loads(read_file(holder))
        return f"process {known['pid']} on {known['host']} ({known['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
