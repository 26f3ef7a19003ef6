"""Erasure of deleted rows from the database's files: free pages, dead rows, statistics and logs.

A database only marks rows as deleted; the bytes of deleted rows stay in its pages and logs. SQLite overwrites
these bytes with zeros in its pages (``secure_delete``), but not in its log. PostgreSQL keeps the bytes until
it needs the space.
"""

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from knnstore.catalog.connection import SECONDS_TO_WAIT, is_sqlite_file, render_location, translate_errors
from knnstore.catalog.sqlite import convert_disk_error
from knnstore.catalog.tables import Base
from knnstore.durable import sync_file
from knnstore.errors import StoreUnavailableError
from knnstore.space import check_space

_PAUSE = 0.1
"""Seconds between attempts to rewrite a table."""
_FRAME = 24
"""Size of the header of a page in SQLite's log, in bytes."""


def vacuum(sql: Engine) -> list[str]:
    """Erase the bytes of deleted rows: rewrite all tables without these rows, and empty the database's logs.

    Args:
        sql: SQLAlchemy engine of the catalog's database.

    Returns:
        One message for each place that still has bytes of deleted rows, with the reason; empty if no bytes
        are left.

    Raises:
        StoreUnavailableError: other connections used the database for more than 30 seconds.
        DiskFullError, ReadOnlyError: SQLite cannot write to its disk.
    """
    if sql.dialect.name == "sqlite":
        _vacuum_sqlite(sql)
        return []
    return _vacuum_postgresql(sql)


def check_room(sql: Engine) -> None:
    """Check that the disks have enough free space for `vacuum` to rewrite a SQLite file.

    Does nothing on PostgreSQL and for a database in memory. SQLite builds the new database in its temporary
    folder, and then copies it through the log to the database file. So the disks of both folders are checked.

    Args:
        sql: SQLAlchemy engine of the catalog's database.

    Raises:
        DiskFullError: the free space is too small.
    """
    if not is_sqlite_file(sql.url):
        return
    with translate_errors(sql), sql.connect() as connection:
        pages, free, size = (
            int(connection.scalar(text(f"PRAGMA {name}")) or 0)
            for name in ("page_count", "freelist_count", "page_size")
        )
    needed = (pages - free) * (size + _FRAME)
    database_folder, temporary = Path(str(sql.url.database)).absolute().parent, _find_temporary_folder()
    if database_folder.stat().st_dev == temporary.stat().st_dev:
        needed *= 2
    else:
        check_space(temporary, needed, "erasing")
    check_space(database_folder, needed, "erasing")


def _find_temporary_folder() -> Path:
    """Return the folder where SQLite creates its temporary files.

    The result is the first writable folder in this list: the values of the environment variables
    SQLITE_TMPDIR and TMPDIR, /var/tmp, /usr/tmp and /tmp. If no folder is writable, the result is the current
    folder.
    """
    configured = (os.environ.get(name) for name in ("SQLITE_TMPDIR", "TMPDIR"))
    for path in map(Path, filter(None, [*configured, "/var/tmp", "/usr/tmp", "/tmp"])):  # noqa: S108  # as SQLite does
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
            return path
    return Path.cwd()


def _vacuum_sqlite(sql: Engine) -> None:
    """Rewrite a SQLite database without the bytes of deleted rows, and empty its log.

    Raises:
        StoreUnavailableError: another connection used the database for too long.
        DiskFullError, ReadOnlyError: SQLite cannot write to its disk.
    """
    with translate_errors(sql), sql.connect() as connection:
        driver: Any = connection.connection.driver_connection  # VACUUM cannot run in SQLAlchemy's transaction
        try:
            driver.execute("VACUUM").close()
            is_busy, *_ = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()  # waits for readers
        except sqlite3.Error as error:
            raise convert_disk_error(error, render_location(sql.url)) or StoreUnavailableError(
                f"{render_location(sql.url)} cannot be rewritten now ({error}): erase again"
            ) from error
    if is_busy:
        raise StoreUnavailableError(
            f"another process keeps reading {render_location(sql.url)}, so the log still contains what was "
            "removed: end that process, then erase again"
        )
    log = Path(f"{sql.url.database}-wal")
    if log.exists():  # SQLite does not fsync the truncated log; a power loss would restore the content
        sync_file(log)


def _vacuum_postgresql(sql: Engine) -> list[str]:
    """Rewrite all tables and statistics of a PostgreSQL database, and let the server drop old log files.

    Returns one message for each place that still has bytes of deleted rows, with the reason; empty if no
    bytes are left.
    """
    remainders = []
    with translate_errors(sql), sql.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"SET lock_timeout = '{SECONDS_TO_WAIT}s'"))
        for table in Base.metadata.sorted_tables:
            remainders += _rewrite_table(connection, table.name)
        try:  # the planner's statistics hold sampled values; ANALYZE has replaced the rows
            remainders += _rewrite_table(connection, "pg_catalog.pg_statistic", options="FULL")
        except DBAPIError as error:
            remainders.append(f"PostgreSQL's statistics of the columns: {_get_first_line(error)}")
        remainders += _switch_log_file(connection)
    return remainders


def _rewrite_table(connection: Connection, table: str, options: str = "FULL, ANALYZE") -> list[str]:
    """Rewrite a table of a PostgreSQL database repeatedly, until no deleted rows remain in the table.

    PostgreSQL keeps a deleted row as long as an older transaction can see it. After 30 seconds the function
    gives up.

    Args:
        connection: connection without a transaction, because VACUUM cannot run in a transaction.
        table: name of the table.
        options: options of the statement VACUUM.

    Returns:
        A list with one message if deleted rows remain at the end, else an empty list.
    """
    remaining: list[int] = []

    def record_remaining(diagnostic: Any) -> None:
        """Remember from a notice of the server how many deleted rows remain in the table."""
        # The detail of the notice is "N dead row versions cannot be removed yet."
        counts = [int(word) for word in (diagnostic.message_detail or "").split() if word.isdecimal()]
        remaining.extend(counts[:1])

    driver: Any = connection.connection.driver_connection
    driver.add_notice_handler(record_remaining)
    deadline = time.monotonic() + SECONDS_TO_WAIT
    try:
        while True:
            remaining.clear()
            connection.execute(text(f"VACUUM ({options}, VERBOSE) {table}"))
            if not any(remaining):
                return []
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
    finally:
        driver.remove_notice_handler(record_remaining)
    return [
        f"{sum(remaining)} dead rows of {table}, which an open transaction of another connection can "
        "still read"
    ]


def _switch_log_file(connection: Connection) -> list[str]:
    """Make PostgreSQL begin a new log file (WAL), so that the server can remove older log files.

    The older log files still contain deleted rows.

    Returns:
        One message for each reason why content of older log files remains; empty if nothing remains. If no
        new log file can be begun, for example because the database user lacks a right, the list has a
        message about this, and no error is raised.
    """
    try:
        connection.execute(text("SELECT pg_switch_wal()"))
        connection.execute(text("CHECKPOINT"))
    except DBAPIError as error:
        return [f"PostgreSQL's log, until the server has overwritten it: {_get_first_line(error)}"]
    remainders = []
    if connection.scalar(text("SHOW wal_recycle")) == "on":
        remainders.append(
            "PostgreSQL's log, until the server has overwritten it: it runs with wal_recycle = on"
        )
    if connection.scalar(text("SELECT count(*) FROM pg_replication_slots")):
        remainders.append("PostgreSQL's log, as long as a replication slot keeps it")
    if connection.scalar(text("SHOW archive_mode")) != "off":
        remainders.append("the archive of PostgreSQL's log")
    return remainders


def _get_first_line(error: DBAPIError) -> str:
    """Return the first line of a database error's message. Other lines may quote stored values."""
    return str(error.orig).strip().splitlines()[0]
