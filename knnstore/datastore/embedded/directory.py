"""The directory of a datastore: creating its folders, saving its owner, and removing all its files.

The owner is the name of the store to which the keys in the directory belong. A separate small file holds the
owner, because the owner must stay readable when the manifest (the list of all other files) is damaged.
`erase_segments` removes this file last.
"""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from knnstore.datastore.embedded.manifest import NAME
from knnstore.durable import (
    WriterLock,
    read_file,
    remove_durably,
    remove_folder,
    sync_directory,
    write_atomically,
)
from knnstore.errors import CorruptDatastoreError, DatastoreError
from knnstore.space import choose_write_error

FOLDERS = ("segments", "indexes")
_OWN_FILE = re.compile(r"\d{8,}\.(keys|ids|digests|codec|index|part)")


def make_folders(root: Path) -> None:
    """Create the folders ``segments`` and ``indexes`` of a datastore, durably, if they are missing.

    Call this function before a manifest (the list of all files) names files in the folders.

    Args:
        root: the datastore's directory, which exists.
    """
    absent = [root / folder for folder in FOLDERS if not (root / folder).is_dir()]
    for folder in absent:
        folder.mkdir(mode=0o700)
    if absent:
        sync_directory(root)


def list_datastore_files(root: Path) -> list[Path]:
    """Return the paths of all files that knnstore wrote to a datastore's folders.

    The folders are ``segments`` and ``indexes``. The files are recognized by their names. The result includes
    files that are not in use.

    Args:
        root: the datastore's directory. If its folders do not exist, the result is empty.
    """
    folders = [root / folder for folder in FOLDERS if (root / folder).is_dir()]
    return [path for folder in folders for path in folder.iterdir() if _OWN_FILE.match(path.name)]


def remove_strays(root: Path, names_to_keep: Collection[str]) -> None:
    """Remove the files that a crash of a writer left behind in a datastore's folders.

    Only files with names of knnstore are removed, and only those that are not in use.

    Args:
        root: the datastore's directory.
        names_to_keep: paths of the files in use, relative to the directory; these files stay.
    """
    for path in list_datastore_files(root):
        if f"{path.parent.name}/{path.name}" not in names_to_keep:
            remove_durably(path)


def erase_segments(root: Path) -> None:
    """Remove all files of a datastore from its directory, and then the directory if it is empty.

    If the directory does not exist, the function does nothing. If a call was interrupted, another call
    removes the remaining files.

    Args:
        root: the datastore's directory.

    Raises:
        LockedError: another process has the directory open for writing.
    """
    if not root.is_dir():
        return
    lock = WriterLock(root)
    try:
        remove_durably(root / NAME)  # without it the other files are no datastore
        sync_directory(root)
        for path in list_datastore_files(root):
            remove_durably(path)
        for folder in FOLDERS:  # while these exist, a missing manifest is an error
            remove_folder(root / folder)
        sync_directory(root)  # the owner stays known as long as a file exists
        for name in (f"{NAME}.tmp", "writer.json", "writer.lock", "owner.tmp", "owner"):
            remove_durably(root / name)
        remove_folder(root)
        sync_directory(root.parent)
    finally:
        lock.release()


def read_owner(root: Path) -> str | None:
    """Return the name of the store to which the keys in a datastore's directory belong.

    Returns None if the directory has no file with an owner, or does not exist.

    Args:
        root: the datastore's directory.

    Raises:
        CorruptDatastoreError: the file with the owner is damaged.
        DatastoreError: the file cannot be read.
    """
    path = root / "owner"
    try:
        digest, _, owner = read_file(path).decode(errors="replace").rstrip("\n").partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror}") from error
    if digest != _hash_owner(owner):
        raise CorruptDatastoreError(
            f"{path}, which names the store that owns the keys, is damaged: restore it from a backup, or "
            "remove it if the keys belong to this store; keys outside the store's folder then need "
            "`knnstore repair --take-over`"
        )
    return owner


def write_owner(root: Path, owner: str) -> None:
    """Save the name of the store to which the keys in a datastore's directory belong, durably.

    Replaces a name that was saved before. The caller holds the writer's lock of the directory.

    Args:
        root: the datastore's directory.
        owner: name of the store, one line of text.

    Raises:
        DiskFullError: the disk is full.
        DatastoreError: the file cannot be written.
    """
    try:
        write_atomically(root / "owner", f"{_hash_owner(owner)} {owner}\n".encode(), "owner")
    except OSError as error:
        raise choose_write_error(error)(
            f"cannot write {root / 'owner'}: {error.strerror}; free space or repair the disk, then try again"
        ) from error


def _hash_owner(owner: str) -> str:
    """Return the SHA-256 of an owner's name as 64 hexadecimal digits."""
    return hashlib.sha256(owner.encode(errors="replace")).hexdigest()
