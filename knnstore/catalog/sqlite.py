"""A catalog in a file: opening it where nothing can be written, and what its errors mean.

SQLite's log needs two files beside the database, also for reading. Where they cannot be made, on a
read-only medium or a full disk, the database is read as it is. That is right only as long as nobody
changes it, and somebody may: another machine, or a writer that found some space. So such a connection
knows what the files looked like, and whatever was read while they changed is read again.
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
_SECONDS_FOR_READERS = 1


class UnloggedConnection(sqlite3.Connection):
    """A connection without a log, to a file that nobody is to change meanwhile."""

    path: Path
    seen: tuple[int, ...]

    def is_stale(self) -> bool:
        """Whether the database was changed since this connection was made."""
        return _state(self.path) != self.seen


class Commits:
    """Tells whether anything was committed to a file since, at a hundredth of what a query costs.

    It has a connection of its own that never writes, for which SQLite counts the commits of all others, in
    whatever process. May be used by several threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._connection: PoolProxiedConnection | None = None

    def version(self) -> int | None:
        """A number that is another one after each commit; None where there is no telling, without a log."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._engine.raw_connection()
                driver: Any = self._connection.driver_connection
                if isinstance(driver, UnloggedConnection):
                    self._release()
                    return None
                ((version,),) = driver.execute("PRAGMA data_version").fetchall()
                return int(version)
            except (sqlite3.Error, SQLAlchemyError):  # whoever queries meets it, and says it
                self._release()
                return None

    def close(self) -> None:
        """Release the connection."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()


def prepare(engine: Engine) -> None:
    """Let an engine of a file make its connections here, with the function that conditions need."""
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "connect", _add_function)
    event.listen(engine, "checkout", _check)


def make_private(path: Path) -> None:
    """Make an empty database that nobody but its owner can read; the files beside it get the same mode."""
    with suppress(OSError):  # SQLite says what is wrong
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


@contextmanager
def unchanged(connection: Any) -> Iterator[None]:
    """Answer for what is read within the block.

    Raises:
        StoreUnavailableError: the database was changed meanwhile, where no log can be had.
    """
    try:
        yield
    finally:
        if isinstance(connection, UnloggedConnection) and connection.is_stale():
            raise StoreUnavailableError(f"{connection.path} was changed while it was read: try again")


def take_in_log(engine: Engine) -> None:
    """Write what is in the log to the database and empty the log, so that the one file is the catalog.

    Where a reader is in the way, or the disk is full, the log stays for the next connection.
    """
    with suppress(sqlite3.Error):
        connection = engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            driver.execute(f"PRAGMA busy_timeout={_SECONDS_FOR_READERS * 1000}").close()
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        finally:
            connection.invalidate()  # its timeout is not the others'


def medium_error(error: object, path: str) -> KnnstoreError | None:
    """What an error of SQLite says of the medium, if it does."""
    name = str(getattr(error, "sqlite_errorname", ""))
    # Without its log, as on a full disk, a database can only be read.
    if name.startswith("SQLITE_READONLY") and is_read_only(Path(path).parent):
        return ReadOnlyError(f"{path} is on a read-only medium or not yours to write: nothing can be changed")
    if name.startswith(("SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):
        return DiskFullError(f"{path} cannot be written, the disk is full: free some space and try again")
    return None


def _connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
    path = Path(arguments[0])
    connection = sqlite3.connect(*arguments, **options)
    connection.isolation_level = None  # we say BEGIN ourselves, so that DDL is transactional too
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()
        connection.execute("SELECT 1 FROM sqlite_master").close()  # opens the log
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if not error.sqlite_errorname.startswith(_MAY_BE_READ) or not path.exists():
            raise
        seen = _state(path)
        if seen[-1]:
            raise sqlite3.OperationalError(
                f"{error}; {path}-wal has changes that are not in {path.name} yet, and nothing can be "
                "written beside it: copy the folder to where one can write, or free some space"
            ) from error
    options = {**options, "uri": True, "factory": UnloggedConnection}
    unlogged: UnloggedConnection = sqlite3.connect(f"file:{quote(str(path))}?immutable=1", **options)
    unlogged.isolation_level = None
    unlogged.path, unlogged.seen = path, seen
    return unlogged


def _add_function(connection: Any, _record: object) -> None:
    connection.create_function("regexp_replace", 4, regexp_replace, deterministic=True)


def _check(connection: Any, _record: object, _proxy: object) -> None:
    if isinstance(connection, UnloggedConnection) and connection.is_stale():
        raise DisconnectionError  # the pool makes another connection, which may find a log now


def _state(path: Path) -> tuple[int, ...]:
    """What changes with every change of the database; at last the size of its log."""
    status, log = path.stat(), 0
    with suppress(FileNotFoundError):
        log = Path(f"{path}-wal").stat().st_size
    return status.st_ino, status.st_size, status.st_mtime_ns, log
