"""Room on the disk for Qdrant's engine in this process.

The engine writes through maps of files that are mostly holes. Where such a write finds no space, the kernel
ends the process by a signal. So, unless there is plenty, space for the holes is taken before each change.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from knnstore.datastore import allocate, check_space, free_space
from knnstore.errors import DiskFullError

PLENTY = 1 << 30
"""Free bytes above which no change fills the disk."""

NEW_SHARD = 160 << 20
"""Bytes of an empty shard's files, holes included."""

_REMOVED = 128  # bytes written for each point that is removed
_FEW = 256 << 10  # ... and for any


def allocated(shard: Path) -> int:
    """Bytes that a shard takes on the disk."""
    return sum(path.stat().st_blocks * 512 for path in _files(shard))


def room_to_open(shard: Path) -> None:
    """Make sure that a shard can be opened.

    Opening reads what is searched. On a file system in memory (and on some others without a device of
    their own) reading a hole takes space.

    Raises:
        DiskFullError: there is too little.
    """
    if os.major(shard.stat().st_dev) == 0 and free_space(shard) < PLENTY:
        _take(shard, (path for path in _files(shard) if _SEARCHED & set(path.parts)))


def room_for(shard: Path, needed: int, what: str) -> None:
    """Make sure that a change will not end the process.

    Raises:
        DiskFullError: there is too little space for this.
    """
    if free_space(shard) < PLENTY + needed:
        check_space(shard, needed + _holes(_files(shard)), what)
        _take(shard, _files(shard))


def room_to_remove(shard: Path, points: int) -> None:
    """Make sure that removing points will not end the process; leaves nothing free beside that.

    Raises:
        DiskFullError: there is too little space for this.
    """
    if free_space(shard) < PLENTY:
        _take(shard, _files(shard), _FEW + points * _REMOVED)


_SEARCHED = {"payload_index", "vector_storage"}


def _take(shard: Path, paths: Iterable[Path], beside: int = 0) -> None:
    """Fill the holes of some files; so much must be left then."""
    holed = [path for path in paths if _holes([path])]
    needed, free = _holes(holed) + beside, free_space(shard)
    if needed > free:  # else the last free bytes would be taken in vain
        raise DiskFullError(
            f"Qdrant's engine needs {needed:,} bytes at {shard} to change anything and {free:,} are free: "
            "free some space and try again"
        )
    for path in holed:
        descriptor = os.open(path, os.O_RDWR)
        try:
            allocate(descriptor, 0, path.stat().st_size)
        except OSError as error:
            raise DiskFullError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            os.close(descriptor)


def _holes(paths: Iterable[Path]) -> int:
    """Bytes of some files that have no space on the disk yet."""
    found = [path.stat() for path in paths]
    return sum(max(0, one.st_size - one.st_blocks * 512) for one in found)


def _files(shard: Path) -> list[Path]:
    return [path for path in shard.rglob("*") if path.is_file()]
