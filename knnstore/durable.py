"""Durable files: all writes of the embedded datastores go through this module.

A file is written once, hashed while it is written, synced, and named in a manifest with its size and SHA-256.
Files are mapped into memory for reading only, and only after their size was checked: reading a page beyond
the end of a short file kills the process. Nothing is written through a map, because a full disk would kill
the process too. After a failed fsync the kernel may have dropped the dirty pages, so the operation fails for
good and the file must be written again.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import DatastoreError, LockedError
from knnstore.failpoints import failpoint
from knnstore.space import convert_disk_errors

_OWNER_ONLY = 0o600

BLOCK = 1 << 16
"""Number of bytes that are hashed together. Reading a row for the first time checks whole blocks."""

_MOST_BYTES = 4 << 30
"""Maximum size in bytes of a file that is read as a whole. A damaged or sparse file may have any size."""

_LOCK_ATTEMPTS = 100
"""Maximum number of attempts to open and lock a lock file that is removed at the same time. Some network and
overlay file systems report that every open file is removed."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Entry of a file in a manifest (the list of files in use): name, size and hash."""

    name: str
    """Path relative to the datastore's directory."""

    size: int
    """Size in bytes."""

    sha256: str
    """Hexadecimal SHA-256 of the concatenated SHA-256 digests of the file's blocks of 64 KiB.

    With this hash tree of two levels, threads can share the work, and a single block can be checked.
    """


class NoFileError(OSError):
    """A path that should be a file of a store is not a regular file, or the file is too large for one."""


class FileWriter:
    """Writes a new file and hashes its content.

    A context manager: if `finish` was not called when the context ends, the file is removed.

    Args:
        root: the datastore's directory.
        name: path of the new file relative to the directory.

    Raises:
        FileExistsError: the file exists already.
        OSError: the file cannot be created.
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
        """Append bytes, or the bytes of an array in C order, to the file.

        Raises:
            OSError: the disk is full or fails.
        """
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
        """Make the content durable (fsync), close the file, and return its name, size and hash.

        The file's name is durable only after `sync_directory`.
        """
        os.fsync(self._descriptor)
        failpoint("segments.file.synced")
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        if self._size % BLOCK:
            self._digests += self._block.digest()
        return StoredFile(self._name, self._size, hashlib.sha256(self._digests).hexdigest())

    @property
    def digests(self) -> bytes:
        """SHA-256 digests of the blocks of the finished file, 32 bytes each, one after another."""
        return bytes(self._digests)


def open_file(path: Path) -> BinaryIO:
    """Open a file of a store for reading in binary mode.

    A path that leads to a pipe is refused at once, without waiting for a writer of the pipe.

    Raises:
        FileNotFoundError: the path does not exist.
        NoFileError: the path is a folder, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoFileError(errno.EINVAL, "is not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Read the whole content of a file of a store.

    Raises:
        FileNotFoundError: the path does not exist.
        NoFileError: the path is not a regular file, or the file has more than 4 GiB. Then nothing is read.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise NoFileError(errno.EFBIG, "is too large to be a file of a store", str(path))
        return file.read()


def sync_directory(path: Path) -> None:
    """Make earlier changes of names in a directory (files created, replaced, removed) durable with fsync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    failpoint("segments.directory.synced")


def sync_file(path: Path) -> None:
    """Make the content of an existing file durable with fsync; another library may have written it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes, what: str) -> None:
    """Create or replace a small file atomically and durably: readers see the old or the new content.

    Also removes an empty folder at the path.

    Args:
        path: the file. A crash leaves at most a file ``<name>.tmp`` in the same folder.
        content: the whole new content.
        what: middle part of the names of two failpoints (places where tests make the process fail),
            ``segments.<what>.written`` and ``segments.<what>.renamed``.

    Raises:
        OSError: the disk is full or fails. The old content stays, unless the last step, syncing the
            directory, fails.
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


def remove_durably(path: Path) -> None:
    """Remove a file, or an empty folder at its path; does nothing if the path does not exist.

    A folder that is not empty stays. The removal is durable only after `sync_directory`.

    Raises:
        OSError: the file cannot be removed.
    """
    failpoint("segments.file.unlink")
    _remove_folder(path)
    with suppress(IsADirectoryError):  # it is somebody's
        path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    """Remove a folder if it is empty; do nothing for any other path."""
    with suppress(OSError):
        path.rmdir()


def remove_folder(path: Path) -> None:
    """Remove a folder if it is empty; otherwise make the removal of files from it durable.

    Does nothing if the folder does not exist. The removal of the folder is durable only after
    `sync_directory` of its parent.
    """
    try:
        path.rmdir()
    except FileNotFoundError:  # a crash may repeat this
        pass
    except OSError:
        if path.is_dir():
            sync_directory(path)


class WriterLock:
    """Lock of a datastore's directory that only one writer can hold at a time.

    The constructor takes the lock without waiting.

    The kernel releases the lock when the holding process ends. A forked child process shares the lock, but
    cannot release it. The lock file is removed only together with the whole datastore. The file
    ``writer.json`` describes the holder, only for error messages.

    Args:
        root: the datastore's directory, which exists.

    Raises:
        LockedError: another handle or process holds the lock; the message names the process.
        ReadOnlyError, DiskFullError: the lock file cannot be written.
        DatastoreError: the file system does not support locks.
    """

    def __init__(self, root: Path) -> None:
        holder_path = root / "writer.json"
        try:
            with convert_disk_errors(root):
                self._descriptor = _open_and_lock(root / "writer.lock")
        except BlockingIOError:
            holder = _describe_holder(holder_path)
            raise LockedError(
                f"{root} is being written by {holder}: stop that process, or open the store with mode "
                "'r' to read it"
            ) from None
        except OSError as error:
            raise DatastoreError(f"cannot lock {root}: {error}; is it on a local, writable disk?") from error
        self._process = os.getpid()
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # other functions that run at exit may still write
        # Not the whole command line, which may hold a password.
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        command = " ".join([name, *sys.argv[1:2]])
        this_process = {"pid": os.getpid(), "host": socket.gethostname(), "command": command}
        with suppress(OSError):  # it serves a message only
            holder_path.touch(mode=_OWNER_ONLY)
            holder_path.write_text(json.dumps(this_process))

    def release(self) -> None:
        """Release the lock, so that the next writer can take it. A second call does nothing.

        In a forked child process, this only closes the child's copy of the file.
        """
        if self._close.alive and self._process == os.getpid():
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()


def _open_and_lock(path: Path) -> int:
    """Open a lock file, which is created if it is missing, and lock it. Returns the file's descriptor.

    Raises:
        BlockingIOError: another descriptor has the lock.
        OSError: the file cannot be opened, or the file system does not support locks.
    """
    for _ in range(_LOCK_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _OWNER_ONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EACCES:  # so some file systems report a lock that is taken
                raise BlockingIOError(errno.EAGAIN, "the lock is taken") from error
            raise
        os.close(descriptor)  # the file was removed before it was locked
    raise OSError(errno.ENOLCK, f"{path.name} has no link after it was opened {_LOCK_ATTEMPTS} times")


def _describe_holder(holder: Path) -> str:
    """Describe the process that holds a lock (process number, host, command), for an error message.

    Returns "another process" if the file cannot be read.

    Args:
        holder: path of the file ``writer.json``.
    """
    try:
        holder_info = json.loads(read_file(holder))
        return f"process {holder_info['pid']} on {holder_info['host']} ({holder_info['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
