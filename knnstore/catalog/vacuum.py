"""Freeing the database's own files of deleted rows: free pages, dead rows, statistics and logs.

A database marks rows deleted and keeps their bytes, in the pages and in the log of every change. SQLite
writes zeros over them (``secure_delete``), but not in its log; PostgreSQL keeps them until it needs the room.
"""

import sqlite3
import time
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from knnstore.catalog.connection import SECONDS_TO_WAIT, place, translated_errors
from knnstore.catalog.tables import Base
from knnstore.errors import StoreUnavailableError

_PAUSE = 0.1


def vacuum(sql: Engine) -> list[str]:
    """Rewrite the tables without deleted rows and empty the logs.

    Returns:
        What still holds deleted rows and why, one line each; nothing when nothing does.

    Raises:
        StoreUnavailableError: others kept the database in use for all of half a minute.
    """
    if sql.dialect.name == "sqlite":
        _vacuum_sqlite(sql)
        return []
    return _vacuum_postgresql(sql)


def _vacuum_sqlite(sql: Engine) -> None:
    with translated_errors(sql), sql.connect() as connection:
        driver: Any = connection.connection.driver_connection  # SQLAlchemy would begin a transaction
        try:
            driver.execute("VACUUM").close()
            is_busy, *_ = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()  # waits for readers
        except sqlite3.Error as error:
            raise StoreUnavailableError(
                f"{place(sql.url)} cannot be rewritten ({error}); then erase again"
            ) from error
    if is_busy:
        raise StoreUnavailableError(
            f"another process reads {place(sql.url)} without an end, and its log holds what was removed: "
            "end that process, then erase again"
        )


def _vacuum_postgresql(sql: Engine) -> list[str]:
    unreached = []
    with translated_errors(sql), sql.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"SET lock_timeout = '{SECONDS_TO_WAIT}s'"))
        for table in Base.metadata.sorted_tables:
            unreached += _rewrite(connection, table.name)
        try:  # samples of the columns, for the planner; ANALYZE has replaced them
            unreached += _rewrite(connection, "pg_catalog.pg_statistic", options="FULL")
        except DBAPIError as error:
            unreached.append(f"PostgreSQL's statistics of the columns: {_reason(error)}")
        unreached += _empty_log(connection)
    return unreached


def _rewrite(connection: Connection, table: str, options: str = "FULL, ANALYZE") -> list[str]:
    """Rewrite a table, as often as a transaction that began earlier still sees deleted rows of it."""
    remaining: list[int] = []

    def note(diagnostic: Any) -> None:  # its detail: "N dead row versions cannot be removed yet."
        found = [int(word) for word in (diagnostic.message_detail or "").split() if word.isdecimal()]
        remaining.extend(found[:1])

    driver: Any = connection.connection.driver_connection
    driver.add_notice_handler(note)
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
        driver.remove_notice_handler(note)
    return [f"{sum(remaining)} dead rows of {table}, which an open transaction of somebody still sees"]


def _empty_log(connection: Connection) -> list[str]:
    """Let the server drop the segments of its log that hold the deleted rows."""
    try:
        connection.execute(text("SELECT pg_switch_wal()"))
        connection.execute(text("CHECKPOINT"))
    except DBAPIError as error:
        return [f"PostgreSQL's log, until the server has overwritten it: {_reason(error)}"]
    kept = []
    if connection.scalar(text("SHOW wal_recycle")) == "on":
        kept.append("PostgreSQL's log, until the server has overwritten it: it runs with wal_recycle = on")
    if connection.scalar(text("SELECT count(*) FROM pg_replication_slots")):
        kept.append("PostgreSQL's log, as long as a replication slot holds it")
    if connection.scalar(text("SHOW archive_mode")) != "off":
        kept.append("the archive of PostgreSQL's log")
    return kept


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]
