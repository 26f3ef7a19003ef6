"""Removing the files of a datastore of durable segments."""

from contextlib import suppress
from pathlib import Path

from knnstore.datastore.embedded import manifest
from knnstore.datastore.embedded.log import OWN_FILE
from knnstore.durable import WriterLock, remove, sync_directory


def erase_segments(root: Path) -> None:
    """Remove what `KeySegments` keeps in a directory, and the directory when nothing else is in it.

    May be called again after it was interrupted, and where nothing is.

    Raises:
        LockedError: another process writes there.
    """
    if not root.is_dir():
        return
    lock = WriterLock(root)
    try:
        remove(root / manifest.NAME)  # from now on nobody takes the rest for a datastore
        sync_directory(root)
        for folder in (root / "segments", root / "indexes"):
            if folder.is_dir():
                for path in folder.iterdir():
                    if OWN_FILE.match(path.name):
                        remove(path)
                _remove_if_empty(folder)
        for name in (f"{manifest.NAME}.tmp", "writer.json", "writer.lock"):
            remove(root / name)
        _remove_if_empty(root)
        sync_directory(root.parent)
    finally:
        lock.release()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # somebody put something there
        folder.rmdir()
