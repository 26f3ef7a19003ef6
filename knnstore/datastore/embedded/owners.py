"""Whose the keys in a directory are: one small file, apart from what may be damaged, and the last to go."""

import hashlib
from pathlib import Path

from knnstore.durable import publish, read_file
from knnstore.errors import CorruptDatastoreError, DatastoreError
from knnstore.space import kind_of

OWNER_FILES = ("owner.tmp", "owner")


def read_owner(root: Path) -> str | None:
    """Who claimed a directory; None where nobody did. See `SupportsOwner.owner`.

    Raises:
        CorruptDatastoreError: the file that says so is damaged.
    """
    path = root / "owner"
    try:
        digest, _, owner = read_file(path).decode(errors="replace").rstrip("\n").partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror}") from error
    if digest != _digest(owner):
        raise CorruptDatastoreError(
            f"{path}, which says whose the keys are, is damaged: restore it from a backup, or remove it if "
            "you know that they are this store's; keys outside the home then need "
            "`knnstore repair --take-over`"
        )
    return owner


def write_owner(root: Path, owner: str) -> None:
    """Claim a directory, durably; whoever writes there holds its lock. See `SupportsOwner.claim`.

    Raises:
        DiskFullError: there is no room for it.
        DatastoreError: it cannot be written.
    """
    try:
        publish(root / "owner", f"{_digest(owner)} {owner}\n".encode(), "owner")
    except OSError as error:
        raise kind_of(error)(
            f"cannot write {root / 'owner'}: {error.strerror}; free space or repair the disk, then try again"
        ) from error


def _digest(owner: str) -> str:
    return hashlib.sha256(owner.encode(errors="replace")).hexdigest()
