"""The files that a datastore of durable segments has in its directory, and removing them."""

import re
from collections.abc import Collection
from pathlib import Path

from knnstore.datastore.embedded.manifest import NAME
from knnstore.datastore.embedded.owners import OWNER_FILES
from knnstore.durable import WriterLock, remove, remove_folder, sync_directory

FOLDERS = ("segments", "indexes")
_OWN_FILE = re.compile(r"\d{8,}\.(keys|ids|digests|codec|index|part)")


def make_folders(root: Path) -> None:
    """Make the folders of segments and indexes, durably: before a manifest names what is in them."""
    absent = [root / folder for folder in FOLDERS if not (root / folder).is_dir()]
    for folder in absent:
        folder.mkdir(mode=0o700)
    if absent:
        sync_directory(root)


def own_files(root: Path) -> list[Path]:
    """The files of segments and indexes that are there, named by a manifest or not."""
    folders = [root / folder for folder in FOLDERS if (root / folder).is_dir()]
    return [path for folder in folders for path in folder.iterdir() if _OWN_FILE.match(path.name)]


def remove_strays(root: Path, named: Collection[str]) -> None:
    """Remove what a crash left behind: files that no manifest names."""
    for path in own_files(root):
        if f"{path.parent.name}/{path.name}" not in named:
            remove(path)


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
        remove(root / NAME)  # from now on nobody takes the rest for a datastore
        sync_directory(root)
        for path in own_files(root):
            remove(path)
        for folder in FOLDERS:  # while they are there, a manifest is missed
            remove_folder(root / folder)
        sync_directory(root)  # whose they are is known as long as anything is there
        for name in (f"{NAME}.tmp", "writer.json", "writer.lock", *OWNER_FILES):
            remove(root / name)
        remove_folder(root)
        sync_directory(root.parent)
    finally:
        lock.release()
