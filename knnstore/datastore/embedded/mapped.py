"""Files that are mapped into memory, and whose content is compared with a SHA-256 before its first use."""

import ctypes
import errno
import hashlib
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from knnstore.durable import BLOCK, NoFileError, StoredFile, open_file, read_file
from knnstore.errors import CorruptDatastoreError, DatastoreError

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_HASHING_THREADS = 2  # hashlib releases the GIL; a second thread nearly doubles the rate


class MappedFile:
    """A file that is mapped into memory for reading, with checks of its content.

    The methods `check` and `check_rows` compare content with SHA-256 digests, each block of the file at most
    once. The mapped content stays readable when the file is removed. The map holds no open file descriptor,
    because a store may have more files than a process may have descriptors.

    Args:
        root: the datastore's directory.
        file: name, size and hash of the file, as the manifest (the list of all files in use) has them.
        digests: name of a file with the SHA-256 digest of each block of the mapped file. With None, every
            check reads the whole file.
        trusted: True if this process wrote and hashed the file itself. Then the content is never checked.

    Raises:
        FileNotFoundError: the file does not exist; a newer manifest may have replaced it.
        CorruptDatastoreError: the path is not a regular file, or the file's size is wrong.
        DatastoreError: the system allows no more maps.
    """

    def __init__(
        self, root: Path, file: StoredFile, *, digests: str | None = None, trusted: bool = False
    ) -> None:
        self.file = file
        self.path = root / file.name
        with self._open_file() as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.size:
                raise self._make_damage_error(f"has {size} bytes instead of {file.size}")
            self.bytes = _map_file(self.path, opened.fileno(), size)
        self.checked = trusted
        self.lacks_digests = False
        """True if the file with the digests of the blocks is missing or damaged."""
        self._digests = None
        if digests and not trusted:
            self._digests = read_digests(root / digests, file)
            self.lacks_digests = self._digests is None
        self._checked_blocks = np.zeros(-(-size // BLOCK), bool)

    def check(self) -> None:
        """Compare the content with the file's SHA-256. If the whole content was compared before, do nothing.

        Raises:
            CorruptDatastoreError: the content differs.
        """
        if not self.checked:
            self.compute_block_digests()

    def compute_block_digests(self) -> bytes:
        """Return the SHA-256 digest of each block of the file, after comparing the content with its SHA-256.

        The SHA-256 of the file is the hash of all digests.

        Returns:
            The digests, 32 bytes each, one after another.

        Raises:
            CorruptDatastoreError: the content is not the content that was written.
        """
        digests = b"".join(self._hash_blocks(np.arange(len(self._checked_blocks))))
        if hashlib.sha256(digests).hexdigest() != self.file.sha256:
            raise self._make_damage_error("does not match its SHA-256")
        self.checked = True
        return digests

    def check_rows(self, rows: NDArray[np.int64], row_size: int) -> None:
        """Compare the blocks of the file that contain the given rows with the blocks' SHA-256 digests.

        Blocks that were compared before are skipped. If the digests of the blocks are not known, or if a row
        is larger than a block, the whole file is compared.

        Args:
            rows: row numbers, any shape; row i begins at byte i * row_size. An empty array checks nothing.
            row_size: number of bytes of a row.

        Raises:
            CorruptDatastoreError: the content of a block differs.
        """
        if self.checked or rows.size == 0:
            return
        if self._digests is None or row_size > BLOCK:
            self.check()
            return
        is_needed = np.zeros_like(self._checked_blocks)
        is_needed[rows * row_size // BLOCK] = True
        is_needed[((rows + 1) * row_size - 1) // BLOCK] = True
        blocks = np.flatnonzero(is_needed & ~self._checked_blocks)
        for block, digest in zip(blocks.tolist(), self._hash_blocks(blocks), strict=True):
            if digest != self._digests[block * 32 : block * 32 + 32]:
                raise self._make_damage_error("does not match its SHA-256")
        self._checked_blocks[blocks] = True
        self.checked = bool(self._checked_blocks.all())

    def _hash_blocks(self, blocks: NDArray[np.int64]) -> list[bytes]:
        """Return the SHA-256 digests of some blocks, 32 bytes each, in the order of `blocks`.

        Two threads hash 16 or more blocks.

        Args:
            blocks: numbers of the blocks, shape (n,).
        """

        def digest(block: int) -> bytes:
            """Return the SHA-256 digest of one block, 32 bytes."""
            return hashlib.sha256(self.bytes[block * BLOCK : (block + 1) * BLOCK].data).digest()

        if len(blocks) < 16:
            return [digest(block) for block in blocks.tolist()]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            parts = np.array_split(blocks, _HASHING_THREADS)
            hashed = pool.map(lambda part: [digest(block) for block in part.tolist()], parts)
            return [digest for part in hashed for digest in part]

    def _open_file(self) -> BinaryIO:
        """Open the file for reading; raises CorruptDatastoreError if the path is not a regular file."""
        try:
            return open_file(self.path)
        except NoFileError as error:
            raise self._make_damage_error("is not a file") from error

    def _make_damage_error(self, problem: str) -> CorruptDatastoreError:
        """Return, without raising it, an error whose message is the file's path and `problem`."""
        return CorruptDatastoreError(f"{self.path} {problem}")


def read_digests(path: Path, file: StoredFile) -> bytes | None:
    """Read a file with the SHA-256 digests of another file's blocks, 32 bytes for each block.

    Args:
        path: path of the file with the digests.
        file: entry of the file whose blocks were hashed; its `sha256` is the hash of the digests.

    Returns:
        The digests, one after another; None if the file with the digests is missing or damaged.
    """
    try:
        digests = read_file(path)
    except OSError:
        return None
    return digests if hashlib.sha256(digests).hexdigest() == file.sha256 else None


def _map_file(path: Path, descriptor: int, size: int) -> NDArray[np.uint8]:
    """Map a file into memory, and return its content as a read-only array, uint8, shape (size,).

    The descriptor can be closed afterwards. The memory is unmapped when the last reference to the array is
    gone. `mmap.mmap` is not used, because before Python 3.13 it keeps a copy of the descriptor.

    Args:
        path: the file's path, used in the error message.
        descriptor: open descriptor of the file.
        size: the file's size in bytes; 0 gives an empty array.

    Raises:
        DatastoreError: the system cannot map the file.
    """
    if size == 0:  # there is nothing to map
        return np.zeros(0, np.uint8)
    address = _C.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        hint = "; optimize the store, or raise vm.max_map_count" if code == errno.ENOMEM else ""
        raise DatastoreError(f"cannot map {path}: {os.strerror(code)}{hint}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _C.munmap, address, size).atexit = False  # a thread may still read it then
    content: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    content.flags.writeable = False
    return content
