"""SQLite files: connections, also to files that cannot be written, and the meaning of SQLite's errors.

SQLite's write-ahead log needs two more files next to the database, even for reading. If they cannot be
created, on a read-only or full disk, the database is opened as immutable, without the log. Reads are then
right only while the file does not change, but another machine or a writer that finds free space can still
change it. So an `UnloggedConnection` records the state of the files when it opens them. If the state changes,
reads fail with StoreUnavailableError, and the pool replaces the connection.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from sqlalchemy import Engine, PoolProxiedConnection, event
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError

from knnstore.catalog.conditions import regexp_replace
from knnstore.errors import DiskFullError, KnnstoreError, ReadOnlyError, StoreUnavailableError
from knnstore.space import is_read_only

_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",
    "wal_autocheckpoint=128",
)
_MAY_BE_READ = "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_FULL"
"""Errors at opening after which the database may be readable without its log."""
_SECONDS_FOR_READERS = 1
"""Seconds that `take_in_log` waits for readers."""


class UnloggedConnection(sqlite3.Connection):
    """Read-only connection that does not use the write-ahead log; see the module's docstring."""

    path: Path
    seen: tuple[int, ...]
    """State of the files when the connection was opened; see `_read_file_state`."""

    def is_stale(self) -> bool:
        """Check whether the database has changed since the connection was opened."""
        return _read_file_state(self.path) != self.seen


class Commits:
    """Detects commits to a SQLite file, at a hundredth of the cost of a query. Thread-safe.

    Uses a separate connection that never writes. SQLite counts the commits of all other connections for it,
    including connections of other processes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._connection: PoolProxiedConnection | None = None

    def version(self) -> int | None:
        """Return a number that changes with each commit of another connection. Opens a connection if needed.

        Returns None if commits cannot be detected: the database is open without its write-ahead log, or
        cannot be read. No error is raised then.
        """
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._engine.raw_connection()
                driver: Any = self._connection.driver_connection
                if isinstance(driver, UnloggedConnection):
                    self._close_connection()
                    return None
                ((version,),) = driver.execute("PRAGMA data_version").fetchall()
                return int(version)
            except (sqlite3.Error, SQLAlchemyError):  # the caller's query will raise the error
                self._close_connection()
                return None

    def close(self) -> None:
        """Close the connection, if one is open; the next call of `version` opens a new connection."""
        with self._lock:
            self._close_connection()

    def _close_connection(self) -> None:
        """Close the connection if one is open. The caller holds the lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()


def register_handlers(engine: Engine) -> None:
    """Register this module's event handlers with a SQLAlchemy engine for SQLite.

    The engine then opens connections by `_open_connection` and defines the SQL function `regexp_replace` in
    each. When the pool hands out a connection, a stale `UnloggedConnection` is replaced.
    """
    event.listen(engine, "do_connect", _open_connection)
    event.listen(engine, "connect", _add_regexp_replace)
    event.listen(engine, "checkout", _refuse_stale)


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read (mode 600); an existing file is not changed.

    SQLite gives the files of its log the same mode. Errors are ignored.
    """
    with suppress(OSError):  # SQLite reports the error when it opens the file
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


@contextmanager
def fail_if_changed(connection: Any) -> Iterator[None]:
    """Check at the end of the block that the database file did not change since the connection was opened.

    Only an `UnloggedConnection` is checked; with any other connection, SQLite isolates reads itself.

    Args:
        connection: the driver's connection that the block uses.

    Raises:
        StoreUnavailableError: the database changed, so the block's reads may be inconsistent.
    """
    try:
        yield
    finally:
        if isinstance(connection, UnloggedConnection) and connection.is_stale():
            raise StoreUnavailableError(f"{connection.path} was changed while it was read: try again")


def take_in_log(engine: Engine) -> None:
    """Copy the write-ahead log into the database file and empty the log.

    The database file then contains all commits. If a reader blocks the copy for a second, or the disk is
    full, the log stays as it is and the next connection reads it; no error is raised.
    """
    with suppress(sqlite3.Error):
        connection = engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            driver.execute(f"PRAGMA busy_timeout={_SECONDS_FOR_READERS * 1000}").close()
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        finally:
            connection.invalidate()  # its busy_timeout differs, so it must not return to the pool


def convert_disk_error(error: object, path: str) -> KnnstoreError | None:
    """Convert a SQLite error about the disk to a ReadOnlyError or DiskFullError, without raising it.

    Returns None for any other error. `path` is the database file.
    """
    name = str(getattr(error, "sqlite_errorname", ""))
    # An immutable connection on a full disk also reports SQLITE_READONLY.
    if name.startswith("SQLITE_READONLY") and is_read_only(Path(path).parent):
        return ReadOnlyError(f"{path} is on a read-only medium or not yours to write: nothing can be changed")
    if name.startswith(("SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):
        return DiskFullError(f"{path} cannot be written, the disk is full: free some space and try again")
    return None


def _open_connection(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Open a connection that uses the write-ahead log, or an `UnloggedConnection` if the log cannot be used.

    Args:
        arguments: positional arguments of `sqlite3.connect`; the first is the path of the database.
        options: keyword arguments of `sqlite3.connect`.

    Raises:
        sqlite3.OperationalError: the database cannot be read, or its log holds changes and cannot be used.
    """
    path = Path(arguments[0])
    connection = sqlite3.connect(*arguments, **options)
    connection.isolation_level = (
        None  # `connection._begin_transaction` runs BEGIN, so that DDL is transactional too
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()
        connection.execute("SELECT 1 FROM sqlite_master").close()  # opens the log
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if not error.sqlite_errorname.startswith(_MAY_BE_READ) or not path.exists():
            raise
        file_state = _read_file_state(path)
        if file_state[-1]:
            raise sqlite3.OperationalError(
                f"{error}; {path}-wal has changes that are not in {path.name} yet, and nothing can be "
                "written beside it: copy the folder to where one can write, or free some space"
            ) from error
    options = {**options, "uri": True, "factory": UnloggedConnection}
    unlogged: UnloggedConnection = sqlite3.connect(f"file:{quote(str(path))}?immutable=1", **options)
    unlogged.isolation_level = None
    unlogged.path, unlogged.seen = path, file_state
    return unlogged


def _add_regexp_replace(connection: Any, _record: object) -> None:
    """Define the SQL function `regexp_replace`, which conditions on metadata use, in a connection."""
    connection.create_function("regexp_replace", 4, regexp_replace, deterministic=True)


def _refuse_stale(connection: Any, _record: object, _proxy: object) -> None:
    """Raise DisconnectionError for a stale `UnloggedConnection`. The pool then opens a new connection."""
    if isinstance(connection, UnloggedConnection) and connection.is_stale():
        raise DisconnectionError


def _read_file_state(path: Path) -> tuple[int, ...]:
    """Return inode, size and time of change in ns of the database file, and the size of its log.

    The size of the log is 0 if no log exists. Raises FileNotFoundError if the database file does not exist.
    """
    status, log = path.stat(), 0
    with suppress(FileNotFoundError):
        log = Path(f"{path}-wal").stat().st_size
    return status.st_ino, status.st_size, status.st_mtime_ns, log
