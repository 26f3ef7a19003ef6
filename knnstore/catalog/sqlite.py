"""SQLite files: connections, also to files that cannot be written, and the meaning of SQLite's errors.

`EqualDialect` lets all SQLite engines of the process share their compiled statements.

SQLite's write-ahead log needs two more files next to the database, even for reading. If these files cannot be
created, on a read-only or full disk, the database is opened as immutable, without the log. Reads are then
right only while the database file does not change; but another machine, or a writer that finds free space,
can still change it. So an `UnloggedConnection` remembers the state of the files when it opens them. If the
state changes, reads fail with StoreUnavailableError, and the pool replaces the connection.
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
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.util import LRUCache

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

DRIVER = "sqlite+knnstore"
"""Driver name of URLs with which SQLAlchemy makes an engine with an `EqualDialect`."""
COMPILED_STATEMENTS: LRUCache[Any, Any] = LRUCache(500)  # the size that SQLAlchemy gives a single engine
"""Compiled statements of all SQLite engines of the process, for the execution option ``compiled_cache``."""


class EqualDialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's dialect for SQLite, in which all instances are equal.

    Each store has an engine, and each engine a dialect. SQLAlchemy looks up compiled statements by dialect
    and statement, so with unequal dialects each store would compile every statement again: two fifths of the
    processor time of opening a catalog and reading its domains and settings. Compiled statements depend on
    the version of the SQLite library and on options of `create_engine`, which are the same for all stores of
    the process.
    """

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        """Return True for every other `EqualDialect`."""
        return type(other) is type(self)

    def __hash__(self) -> int:
        """Return the same hash for all instances."""
        return hash(type(self))


registry.register(DRIVER.replace("+", "."), __name__, EqualDialect.__name__)


class UnloggedConnection(sqlite3.Connection):
    """Read-only connection that does not use SQLite's write-ahead log, for disks that cannot be written.

    Its reads are right only as long as the database file does not change; `is_stale` checks this.
    """

    path: Path
    """The database file."""
    seen: tuple[int, ...]
    """State of the files when the connection was opened, a result of `_read_file_state`."""

    def is_stale(self) -> bool:
        """Return True if the database file or its log has changed since the connection was opened."""
        return _read_file_state(self.path) != self.seen


class Commits:
    """Detects commits to a SQLite file, in a hundredth of the time of a query. Thread-safe.

    The object has a separate connection that never writes. For this connection, SQLite counts the commits of
    all other connections, also in other processes.

    Args:
        engine: SQLAlchemy engine of the SQLite file.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._connection: PoolProxiedConnection | None = None

    def read_data_version(self) -> int | None:
        """Return a number that changes whenever another connection, of any process, commits to the file.

        The separate connection is opened if it is not open. If commits cannot be detected, the method returns
        None and raises no error. This is the case if the database was opened without its write-ahead log, or
        cannot be read.
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
        """Close the separate connection if it is open. `read_data_version` opens a new connection."""
        with self._lock:
            self._close_connection()

    def _close_connection(self) -> None:
        """Close the separate connection if it is open. The caller holds `_lock`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()


def register_handlers(engine: Engine) -> None:
    """Register this module's event handlers with a SQLAlchemy engine for SQLite.

    Afterwards the engine opens connections by `_open_connection`, and defines the SQL function
    ``regexp_replace`` in each connection. If the pool would hand out an `UnloggedConnection` (a connection
    without the write-ahead log) whose file has changed, it opens a new connection instead.

    Args:
        engine: the engine, before its first connection.
    """
    event.listen(engine, "do_connect", _open_connection)
    event.listen(engine, "connect", _add_regexp_replace)
    event.listen(engine, "checkout", _raise_if_stale)


def create_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read and write (mode 600).

    An existing file is not changed. Errors are ignored. SQLite later gives the files of its log the same
    mode.

    Args:
        path: path of the file.
    """
    with suppress(OSError):  # SQLite reports the error when it opens the file
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


@contextmanager
def fail_if_changed(connection: Any) -> Iterator[None]:
    """Check at the end of the ``with`` block that the database file has not changed.

    Only an `UnloggedConnection` is checked: its file must not change after the connection was opened. For any
    other connection, SQLite itself protects reads from changes.

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
    """Copy SQLite's write-ahead log into the database file, and empty the log.

    Afterwards the database file contains all commits. If a reader blocks the copy for a second, or the disk
    is full, the log is not emptied, and no error is raised. Nothing is lost in this case, because every
    connection also reads the log.

    Args:
        engine: SQLAlchemy engine of the SQLite file.
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
    """Return, without raising it, a ReadOnlyError or DiskFullError for a SQLite error about the disk.

    Args:
        error: exception of the SQLite driver.
        path: path of the database file.

    Returns:
        The converted error; None if the disk did not cause `error`.
    """
    name = str(getattr(error, "sqlite_errorname", ""))
    # An immutable connection on a full disk also reports SQLITE_READONLY.
    if name.startswith("SQLITE_READONLY") and is_read_only(Path(path).parent):
        return ReadOnlyError(
            f"{path} cannot be written: it is on a read-only file system, or you have no permission"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):
        return DiskFullError(f"{path} cannot be written, the disk is full: free some space and try again")
    return None


def _open_connection(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Open a connection that uses the write-ahead log, or an `UnloggedConnection` if the log cannot be used.

    SQLAlchemy calls this function in place of `sqlite3.connect`.

    Args:
        _dialect: ignored.
        _record: ignored.
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
                f"{error}; {path}-wal has changes that are not in {path.name} yet, but its folder cannot "
                "be written: copy the folder to a disk that can be written, or free some space"
            ) from error
    options = {**options, "uri": True, "factory": UnloggedConnection}
    unlogged: UnloggedConnection = sqlite3.connect(f"file:{quote(str(path))}?immutable=1", **options)
    unlogged.isolation_level = None
    unlogged.path, unlogged.seen = path, file_state
    return unlogged


def _add_regexp_replace(connection: Any, _record: object) -> None:
    """Define the SQL function ``regexp_replace``, which conditions on metadata use, in a new connection."""
    connection.create_function("regexp_replace", 4, regexp_replace, deterministic=True)


def _raise_if_stale(connection: Any, _record: object, _proxy: object) -> None:
    """Raise DisconnectionError for an `UnloggedConnection` whose database file has changed.

    SQLAlchemy calls this function when the pool hands out a connection. After the error, the pool opens a new
    connection.
    """
    if isinstance(connection, UnloggedConnection) and connection.is_stale():
        raise DisconnectionError


def _read_file_state(path: Path) -> tuple[int, ...]:
    """Return a tuple that changes when a SQLite file or its write-ahead log changes.

    The tuple holds the inode, size and modification time in ns of the database file, and the size of its log
    (0 if no log exists). Raises FileNotFoundError if the database file does not exist.
    """
    status, log = path.stat(), 0
    with suppress(FileNotFoundError):
        log = Path(f"{path}-wal").stat().st_size
    return status.st_ino, status.st_size, status.st_mtime_ns, log
