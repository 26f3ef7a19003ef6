"""Durable files: the one place where the embedded datastores touch the disk.

A file is written once, hashed on the way, synced, and named in a manifest with its size and
SHA-256. It is mapped for reading only, and only after its size was checked: touching a page
beyond the end of a short file kills the process. Nothing is ever written through a map, where a
full disk would kill the process as well. After a failed fsync the kernel may have dropped the
dirty pages, so the operation fails for good and the file is written anew.
"""

import hashlib
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from knnstore.errors import CorruptDatastoreError, DatastoreError, LockedError
from knnstore.failpoints import failpoint

_OWNER_ONLY = 0o600
_HASHING_THREADS = 2  # hashlib releases the GIL; a second thread nearly doubles the rate

BLOCK = 1 << 16
"""Bytes hashed at a time; also what a search checks when it touches a row for the first time."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a manifest says about one file."""

    name: str
    """The path relative to the datastore's directory."""

    size: int
    """Length in bytes."""

    sha256: str
    """Hexadecimal SHA-256 of the concatenated SHA-256 digests of the file's blocks of 64 KiB.

    A hash tree of two levels: threads can share the work, and one block can be checked alone.
    """


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def sync_directory(path: Path) -> None:
    """Make names that were created, replaced or removed in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    failpoint("segments.directory.synced")


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
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    failpoint(f"segments.{what}.renamed")
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Remove a file that nothing names any more; a missing one is fine, for a crash may repeat this."""
    failpoint("segments.file.unlink")
    path.unlink(missing_ok=True)


class MappedFile:
    """A file mapped for reading; what is used of it is checked once, before its first use.

    Args:
        root: the datastore's directory.
        file: what the manifest says about it.
        digests: name of a file with the digests of its blocks, without which it is checked as a whole.
        trusted: this process wrote the file itself and hashed it on the way.

    Raises:
        FileNotFoundError: the file is not there; a newer manifest may have replaced it.
        CorruptDatastoreError: its size is wrong.
    """

    def __init__(
        self, root: Path, file: StoredFile, *, digests: str | None = None, trusted: bool = False
    ) -> None:
        self.file = file
        self.path = root / file.name
        with self.path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.size:
                raise self._damaged(f"has {size} bytes instead of {file.size}")
            self.bytes: NDArray[np.uint8] = np.memmap(opened, np.uint8, "r")
        self.checked = trusted
        self._digests = self._read_digests(root / digests) if digests and not trusted else None
        self._checked_blocks = np.zeros(-(-size // BLOCK), bool)

    def check(self) -> None:
        """Compare the whole content with the manifest, the first time.

        Raises:
            CorruptDatastoreError: it differs.
        """
        if not self.checked:
            blocks = np.arange(len(self._checked_blocks))
            if hashlib.sha256(b"".join(self._hash(blocks))).hexdigest() != self.file.sha256:
                raise self._damaged("does not match its SHA-256")
            self.checked = True

    def check_rows(self, rows: NDArray[np.int64], row_size: int) -> None:
        """Compare the blocks that hold some rows with the manifest, each the first time.

        Args:
            rows: row numbers, any shape.
            row_size: bytes of a row.

        Raises:
            CorruptDatastoreError: a block differs.
        """
        if self.checked or rows.size == 0:
            return
        if self._digests is None or row_size > BLOCK:
            self.check()
            return
        wanted = np.zeros_like(self._checked_blocks)
        wanted[rows * row_size // BLOCK] = True
        wanted[((rows + 1) * row_size - 1) // BLOCK] = True
        blocks = np.flatnonzero(wanted & ~self._checked_blocks)
        for block, digest in zip(blocks.tolist(), self._hash(blocks), strict=True):
            if digest != self._digests[block * 32 : block * 32 + 32]:
                raise self._damaged("does not match its SHA-256")
        self._checked_blocks[blocks] = True

    def _read_digests(self, path: Path) -> bytes | None:
        """Read the digests of the blocks; None where they are lost or damaged, for they are derived."""
        try:
            digests = path.read_bytes()
        except OSError:
            return None
        return digests if hashlib.sha256(digests).hexdigest() == self.file.sha256 else None

    def _hash(self, blocks: NDArray[np.int64]) -> list[bytes]:
        def digest(block: int) -> bytes:
            return hashlib.sha256(self.bytes[block * BLOCK : (block + 1) * BLOCK].data).digest()

        if len(blocks) < 16:
            return [digest(block) for block in blocks.tolist()]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            parts = np.array_split(blocks, _HASHING_THREADS)
            hashed = pool.map(lambda part: [digest(block) for block in part.tolist()], parts)
            return [digest for part in hashed for digest in part]

    def _damaged(self, how: str) -> CorruptDatastoreError:
        return CorruptDatastoreError(
            f"{self.path} {how}: restore it from a backup, or remove its documents and add them again"
        )


class WriterLock:
    """The lock that keeps a second writer out; the kernel drops it when its holder dies.

    The lock file is never removed, for that would let two processes lock two files of one name.
    Who holds it stands beside it, for the error message only.

    Args:
        root: the datastore's directory.

    Raises:
        LockedError: another handle holds the lock; names its process.
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
            self._lock.acquire()
        except Timeout:
            raise LockedError(
                f"{root} is being written by {_described(holder)}: close it first or open with mode 'r'"
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
        """Let the next writer in."""
        self._lock.release()


def _described(holder: Path) -> str:
    """Say who holds a lock, as far as is known."""
    try:
        known = json.loads(holder.read_text())
        return f"process {known['pid']} on {known['host']} ({known['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
