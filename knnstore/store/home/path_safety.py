"""Guard against symbolic links, hard links, mounts and URLs that lead out of a home.

A home may come from an untrusted sender, so its files and its catalog are not followed out of its folder
without the user's consent. Keys are the exception: they may be read on another disk or on a server.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from knnstore.catalog import PASSWORD_VARIABLE, URL, mask_password
from knnstore.errors import ConfigError
from knnstore.secret_files import find_secret_variable

DESCRIPTION = "knnstore.json"
"""Name of the description file. A folder with this file is a home."""

CATALOG_VARIABLE = "KNNSTORE_CATALOG"
"""Environment variable with the catalog's URL and its password, which is not written in the home.

KNNSTORE_CATALOG_FILE may name a file with the same content instead.
"""

_FILES = [
    name + end
    for name, ends in {
        "knnstore.json": ("", ".tmp"),
        "catalog.db": ("", "-wal", "-shm", "-journal"),
        "writer": (".lock", ".json"),
        "move.json": ("", ".tmp"),
        "reserve": ("",),
    }.items()
    for end in ends
]

_OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")
"""Escape of a space or another special byte in the kernel's list of mounts."""

_ALLOWED_OPTIONS = {
    "host",
    "port",
    "sslmode",
    "connect_timeout",
    "application_name",
    "options",
    "client_encoding",
}
"""Options of a PostgreSQL URL that name no file of this machine and no secret."""


def check_files(home: Path) -> None:
    """Check that no file of a home leads a reader or a writer out of the home. Missing files are accepted.

    Raises:
        ConfigError: a file is a link that leads out, a folder, a pipe or a device; the error names it.
    """
    for name in _FILES:
        _check_path(home / name, home, folders=False)
    check_folder(home / "weights", home)


def check_folder(folder: Path, home: Path | None = None) -> None:
    """Check that nothing in a folder leads out of the folder, at any depth.

    Args:
        folder: folder to check; a missing folder is accepted. The folder itself may be a link.
        home: if set, the folder must not be a link that leads out of this home.

    Raises:
        ConfigError: the folder holds a link that leads out, a pipe or a device; the error names it.
    """
    if home is not None:
        _check_path(folder, home)
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                entries = list(found)
        except OSError:  # missing, just removed by a writer, or reported by the caller that opens it
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                _check_path(Path(entry.path), folder)


def is_physically_inside(folder: Path, home: Path) -> bool:
    """Check whether a folder is physically inside a home, so that a copy of the home contains it.

    A link that leads out of the home is not inside, and neither is a folder on another device, a mount
    point, or a folder below or above one: a bind mount shows files that may belong to another store.
    """
    folder, home = folder.resolve(), home.resolve()
    if not folder.is_relative_to(home):
        return False
    try:
        if folder.exists() and folder.stat().st_dev != home.stat().st_dev:
            return False
    except OSError:
        return False
    around = (point for point in _list_mount_points() if folder.is_relative_to(point) and point != home)
    return find_mount(folder) is None and not any(point.is_relative_to(home) for point in around)


def find_mount(folder: Path) -> Path | None:
    """Return a mount point below a folder; None if there is none."""
    folder = folder.resolve()
    below = (point for point in _list_mount_points() if point.is_relative_to(folder) and point != folder)
    return next(below, None)


def _list_mount_points() -> list[Path]:
    """Return all mount points of the system; empty if the system has no /proc/self/mountinfo."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    return [Path(os.fsdecode(_OCTAL_ESCAPE.sub(_decode_octal, line.split(b" ")[4]))) for line in lines]


def _decode_octal(escaped: re.Match[bytes]) -> bytes:
    return bytes([int(escaped[1], 8)])


def find_home_around(folder: Path, home: Path) -> Path | None:
    """Return the home that contains a folder; None if no home other than `home` contains it."""
    for parent in folder.resolve().parents:
        if (parent / DESCRIPTION).is_file() and not parent.samefile(home):
            return parent
    return None


def find_home_with(folder: Path, other: Path, home: Path) -> Path | None:
    """Return `other` if it is a home, differs from `home` and contains the same folder; else None.

    Compares inodes, so it also finds a folder that a bind mount shows at another path.
    """
    try:
        folder_status = folder.stat()
        if (other / DESCRIPTION).is_file() and not other.samefile(home):
            for path in other.iterdir():
                if path.is_dir() and os.path.samestat(path.stat(), folder_status):
                    return other
    except OSError:  # missing, or not readable by this user
        pass
    return None


def find_hard_link(folder: Path) -> Path | None:
    """Return a file below a folder that has several hard links, or None. Symbolic links are not followed."""
    for inner, _, names in os.walk(folder):
        for path in (Path(inner) / name for name in names):
            try:
                status = path.lstat()
            except FileNotFoundError:  # removed since the folder was listed
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                return path
    return None


def check_catalog_is_single(home: Path, url: URL) -> None:
    """Check that a SQLite catalog has no second hard link: another store might share the file.

    Other databases and missing files are accepted.

    Args:
        home: folder of the store, for the message.
        url: URL of the catalog.

    Raises:
        ConfigError: the file is hard-linked.
    """
    if url.get_backend_name() != "sqlite" or not url.database:
        return
    for end in ("", "-wal", "-journal"):
        path = Path(url.database + end)
        try:
            links = path.stat().st_nlink
        except OSError:  # missing, or reported by the caller that opens it
            continue
        if links > 1:
            raise ConfigError(
                f"{path} has a second name (a hard link), so what is written in {home} changes another store "
                "or backup too: replace it by a copy of it, made with `cp`"
            )


def _check_path(path: Path, within: Path, *, folders: bool = True) -> None:
    """Check that a path is missing, a file inside `within`, or, if `folders`, a folder inside `within`.

    Raises ConfigError for any other path, for example for a link that leads out of `within`.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            return
        kind = "leads nowhere"
    except (OSError, ValueError):
        kind = "cannot be read"
    else:
        inside = path.resolve().is_relative_to(within.resolve())
        if inside and (stat.S_ISREG(status.st_mode) or (folders and stat.S_ISDIR(status.st_mode))):
            return
        wanted = "is neither a file nor a folder" if folders else "is no file"
        kind = wanted if inside else "leads out of its folder"
    raise ConfigError(f"{path} {kind}: a store is followed to nothing of the kind; put the file itself there")


def check_catalog(home: Path, url: URL, environment: Mapping[str, str], *, writing: bool) -> None:
    """Check that a catalog URL from a home neither leads to another store's file nor leaks a password.

    Args:
        home: folder of the store.
        url: URL of the catalog that the home names. The user has named none.
        environment: environment variables of the user.
        writing: True if the store is opened for writing.

    Raises:
        ConfigError: the catalog is a file outside the home that would be written, a URL that names other
            files, or a server that is not the one that PGPASSWORD or PGPASSWORD_FILE is for.
    """
    meant = f"if that is meant, set {CATALOG_VARIABLE} to this URL"
    if url.get_backend_name() == "sqlite":
        inside = Path(url.database or "").resolve().is_relative_to(home.resolve())
        if url.query or (writing and not inside):
            raise ConfigError(f"{home} leads to a catalog outside of it, {mask_password(url)}: {meant}")
        return
    strange = sorted(url.query.keys() - _ALLOWED_OPTIONS)
    if strange:
        raise ConfigError(
            f"{home} names a catalog with the option {strange[0]!r}, {mask_password(url)}: {meant}"
        )
    hosts = {url.host or "", *_split_hosts(url.query.get("host", ""))} - {""}
    variable = find_secret_variable(PASSWORD_VARIABLE, environment)
    if variable and not hosts <= _split_hosts(environment.get("PGHOST", "")):
        raise ConfigError(
            f"{home} has its catalog at {mask_password(url)}, and nothing says that {variable} is for that "
            f"server: set PGHOST to {','.join(sorted(hosts))}, or unset {variable}"
        )


def _split_hosts(hosts: str | tuple[str, ...]) -> set[str]:
    """Split comma-separated host names; an empty text gives one empty name."""
    return set((hosts if isinstance(hosts, str) else ",".join(hosts)).split(","))
