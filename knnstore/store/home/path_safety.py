"""Guard against symbolic links, hard links, mounts and URLs that lead out of a home (the folder of a store).

A home may come from an untrusted sender. So links and URLs that lead from a home to files or catalogs outside
of it are refused without the user's consent. Keys are the exception: they may be read on another disk or on a
server.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from knnstore.catalog import PASSWORD_VARIABLE, URL, mask_password
from knnstore.errors import ConfigError
from knnstore.secret_files import find_secret_variable

DESCRIPTION = "knnstore.json"
"""Name of the description file. A folder with this file is the home of a store."""

CATALOG_VARIABLE = "KNNSTORE_CATALOG"
"""Environment variable with the catalog's URL and password. The password is not written in the home.

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
"""Pattern of an escape of a space or another special byte in the kernel's list of mounts."""

_ALLOWED_OPTIONS = {
    "host",
    "port",
    "sslmode",
    "connect_timeout",
    "application_name",
    "options",
    "client_encoding",
}
"""Options of a PostgreSQL URL that are accepted, because they name no file of this machine and no secret."""

_KIND_CHECKS = {"file": stat.S_ISREG, "folder": stat.S_ISDIR}
"""For each kind of path, the function that recognizes its mode (`os.stat_result.st_mode`)."""


def check_files(home: Path) -> None:
    """Check that no file of a home (the folder of a store) leads out of the home. Missing files are accepted.

    The files that the store itself creates are checked, also all files in the folder ``weights``.

    Args:
        home: the folder.

    Raises:
        ConfigError: a path is a link that leads out of the home or nowhere; it is a folder, a pipe or a
            device in place of a regular file; or it cannot be read. The message names the path.
    """
    for name in _FILES:
        _check_path_stays_inside(home / name, home, "file")
    check_folder(home / "weights", home)


def check_folder(folder: Path, home: Path | None = None) -> None:
    """Check that no link in a folder, at any depth, leads out of the folder.

    Args:
        folder: folder to check; a missing folder is accepted. The folder itself may be a link.
        home: folder of a store, which `folder` must not leave; None lets `folder` be a link to any place.

    Raises:
        ConfigError: the folder contains a pipe, a device, or a link that leads out of the folder or nowhere;
            or `home` is given, and `folder` leads out of it or is a file. The message names the path.
    """
    if home is not None:
        _check_path_stays_inside(folder, home, "folder")
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
                _check_path_stays_inside(Path(entry.path), folder, "file", "folder")


def is_physically_inside(folder: Path, home: Path) -> bool:
    """Check whether a folder is physically inside a home, so that copying the home copies the folder.

    The result is False for a link that leads out of the home, and for a folder on another device. It is also
    False if a file system is mounted in the folder, at the folder, or between the home and the folder: a bind
    mount shows files that may belong to another store.

    Args:
        folder: folder to check, which need not exist.
        home: folder of the store.
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
    """Return the path of a mount point below a folder; None if no file system is mounted below it."""
    folder = folder.resolve()
    below = (point for point in _list_mount_points() if point.is_relative_to(folder) and point != folder)
    return next(below, None)


def _list_mount_points() -> list[Path]:
    """Return the paths of all mount points; empty if the system has no file /proc/self/mountinfo."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    return [Path(os.fsdecode(_OCTAL_ESCAPE.sub(_decode_octal, line.split(b" ")[4]))) for line in lines]


def _decode_octal(escaped: re.Match[bytes]) -> bytes:
    """Convert the match of an octal escape, a backslash and three digits, to the byte that it stands for."""
    return bytes([int(escaped[1], 8)])


def find_home_around(folder: Path, home: Path) -> Path | None:
    """Return the folder of another store that contains a folder.

    Args:
        folder: the folder, for example of keys.
        home: the folder of this store, which is not returned.

    Returns:
        The innermost such folder; None if no other store's folder contains `folder`.
    """
    for parent in folder.resolve().parents:
        if (parent / DESCRIPTION).is_file() and not parent.samefile(home):
            return parent
    return None


def find_home_containing(folder: Path, other: Path, home: Path) -> Path | None:
    """Check whether the folder of another store directly contains a folder, also by a bind mount.

    Inode numbers are compared, because a bind mount shows the same folder at another path.

    Args:
        folder: the folder, for example of keys.
        other: path of the folder of the other store.
        home: the folder of this store.

    Returns:
        `other` if it is the folder of another store than `home` and contains `folder`; else None.
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
    """Return the path of a file below a folder that has several hard links; None if each file has only one.

    Symbolic links are not followed.
    """
    for inner, _, names in os.walk(folder):
        for path in (Path(inner) / name for name in names):
            try:
                status = path.lstat()
            except FileNotFoundError:  # removed since the folder was listed
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                return path
    return None


def check_catalog_has_no_hard_link(home: Path, url: URL) -> None:
    """Check that the SQLite file of a catalog has no second name (a hard link): another store may use it.

    A catalog on a server, and a missing file, are accepted.

    Args:
        home: folder of the store, for the message.
        url: URL of the catalog.

    Raises:
        ConfigError: the database file or its log has a second name.
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
                f"{path} has a second name (a hard link), so a change in {home} also changes another store "
                "or backup: replace the file by a copy, made with `cp`"
            )


def _check_path_stays_inside(path: Path, within: Path, *kinds: Literal["file", "folder"]) -> None:
    """Check that a path does not lead out of a folder. A missing path is accepted.

    Args:
        path: path to check; links are followed.
        within: folder that the path must not leave.
        *kinds: kinds of path that are accepted: a regular file, a folder, or both.

    Raises:
        ConfigError: the path is a link that leads out of `within` or nowhere; it is of a kind that is not
            accepted, such as a pipe; or it cannot be read.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            return
        problem = "leads nowhere"
    except (OSError, ValueError):
        problem = "cannot be read"
    else:
        inside = path.resolve().is_relative_to(within.resolve())
        if inside and any(_KIND_CHECKS[kind](status.st_mode) for kind in kinds):
            return
        wanted = f"is neither a {' nor a '.join(kinds)}" if len(kinds) > 1 else f"is not a {kinds[0]}"
        problem = wanted if inside else "leads out of its folder"
    raise ConfigError(f"{path} {problem}, so a store may not use it: put the {kinds[0]} itself there")


def check_catalog(home: Path, url: URL, environment: Mapping[str, str], *, writing: bool) -> None:
    """Check that the catalog URL in a description file is safe, because a stranger may have written it.

    An unsafe URL could lead to another store's file, or send the user's password to a foreign server.

    Args:
        home: folder of the store.
        url: URL of the catalog in the description file. The user has given no URL.
        environment: environment variables of the user.
        writing: True if the store is opened for writing.

    Raises:
        ConfigError: the catalog is a SQLite file outside the home and `writing` is True; the URL has an
            option that is not allowed, see `_ALLOWED_OPTIONS`; or a password for a server is set in the
            environment (PGPASSWORD or PGPASSWORD_FILE), and PGHOST does not name the URL's server.
    """
    meant = f"if you want that, set {CATALOG_VARIABLE} to this URL"
    if url.get_backend_name() == "sqlite":
        inside = Path(url.database or "").resolve().is_relative_to(home.resolve())
        if url.query or (writing and not inside):
            raise ConfigError(
                f"the catalog of {home} is outside of that folder, {mask_password(url)}: {meant}"
            )
        return
    strange = sorted(url.query.keys() - _ALLOWED_OPTIONS)
    if strange:
        raise ConfigError(
            f"the catalog of {home} has the option {strange[0]!r}, {mask_password(url)}: {meant}"
        )
    hosts = {url.host or "", *_split_hosts(url.query.get("host", ""))} - {""}
    variable = find_secret_variable(PASSWORD_VARIABLE, environment)
    if variable and not hosts <= _split_hosts(environment.get("PGHOST", "")):
        raise ConfigError(
            f"the catalog of {home} is at {mask_password(url)}, and {variable} may be for another "
            f"server: set PGHOST to {','.join(sorted(hosts))}, or unset {variable}"
        )


def _split_hosts(hosts: str | tuple[str, ...]) -> set[str]:
    """Split comma-separated host names into a set; an empty text gives a set with one empty name."""
    return set((hosts if isinstance(hosts, str) else ",".join(hosts)).split(","))
