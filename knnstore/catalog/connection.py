"""Connections to the catalog's database: SQLite in a file or in memory, or PostgreSQL by URL.

The module parses and renders database URLs, makes SQLAlchemy engines, runs transactions, and converts the
exceptions of the database drivers to exceptions of knnstore.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from knnstore.catalog import sqlite
from knnstore.checks import TOO_DEEP
from knnstore.errors import CatalogError, ConfigError, KnnstoreError, StoreUnavailableError
from knnstore.secret_files import read_secret

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",  # the default driver depends on SQLAlchemy's version
    "postgresql+psycopg": "postgresql+psycopg",
}
_EXPECTED = "expected postgresql+psycopg://USER@HOST/DATABASE or sqlite:///FILE"

_DAMAGE = (ValueError, TypeError, OverflowError, LookupError, AttributeError, zlib.error)
"""Exceptions that reading a damaged database may raise, because a stored value has a wrong type."""

_TOO_COMPLEX = re.compile(
    r"at most \d+ tables|too many|tree is too large|stack overflow|too complex|too big|stack depth limit"
)
"""Pattern of error messages of SQLite about a statement that is too large or too deeply nested."""
_NO_TEXT = re.compile(r"Could not decode to UTF-8 column '([^']*)'")
_UNREACHABLE_SQLITE = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_PROTOCOL",
    "SQLITE_INTERRUPT",
    "SQLITE_NOMEM",
    "SQLITE_READONLY",
    "SQLITE_FULL",
    "SQLITE_PERM",
    "SQLITE_AUTH",
)
"""Prefixes of the names of SQLite errors that mean that the database cannot be used now, such as a lock."""

PASSWORD_VARIABLE = "PGPASSWORD"  # noqa: S105  # the variable's name, not a password
"""Environment variable with the password of PostgreSQL, as for PostgreSQL's own clients.

PGPASSWORD_FILE may name a file with the password instead.
"""

_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Options of libpq that apply unless the URL sets them. With them a command fails after one minute, not after
two hours, if the connection is lost silently. `tcp_user_timeout` is in milliseconds, the rest in seconds."""

_BEGIN = "knnstore_begin"
"""Name of an execution option of SQLAlchemy; its value is the statement that begins a SQLite transaction."""

SECONDS_TO_WAIT = 30
"""Seconds that a statement waits for locks and readers of other connections."""

LOCK = 0x6B6E6E73
"""First half of the key of knnstore's advisory locks on PostgreSQL.

The second half is a hash that contains the name of the database schema.
"""


def parse_url(url: str) -> URL:
    """Parse the URL of a catalog's database, and set the driver that knnstore uses (psycopg on PostgreSQL).

    Args:
        url: URL in SQLAlchemy's form, for example ``postgresql://USER@HOST/DATABASE``.

    Raises:
        ConfigError: the URL is not valid, names an unsupported database, or has its password as an option.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # may quote the URL, password included: not chained
        raise ConfigError(f"the catalog's URL cannot be read; {_EXPECTED}") from None
    if parsed.drivername not in _DRIVERS:
        raise ConfigError(f"the catalog does not run on {parsed.drivername}; {_EXPECTED}")
    if "@" in (parsed.host or ""):
        raise ConfigError("the catalog's URL has two @: write one in a password as %40")
    if "password" in parsed.query:
        raise ConfigError("give the catalog's password as USER:PASSWORD@HOST, not as ?password=")
    return parsed.set(drivername=_DRIVERS[parsed.drivername])


def sqlite_url(path: Path) -> URL:
    """Return the SQLAlchemy URL of the SQLite database in the file `path`.

    The file is neither opened nor created.
    """
    return URL.create("sqlite", database=str(path))


def remove_password(url: URL) -> str:
    """Convert a database URL to text without its password, so that the text can be stored or compared."""
    return url._replace(password=None).render_as_string()


def mask_password(url: URL) -> str:
    """Convert a database URL to text for messages, with *** in place of the password."""
    return url.render_as_string(hide_password=True)


def is_sqlite_file(url: URL) -> bool:
    """Check whether a URL names a SQLite database in a file.

    Returns False for a SQLite database in memory, and for a database on a server.
    """
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")


def create_durable_engine(url: URL) -> Engine:
    """Make a SQLAlchemy engine for the catalog's database, set up so that commits are durable.

    The function does not connect to the database yet. The password of PostgreSQL comes from the URL, else
    from the environment variable PGPASSWORD or the file that PGPASSWORD_FILE names. A database in memory has
    a single connection, so threads wait for each other.

    Args:
        url: URL of the database, a result of `parse_url` or `sqlite_url`.

    Raises:
        ConfigError: the database driver is not installed, or the password file cannot be read.
    """
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":  # compiled statements are shared by all engines
        url = url.set(drivername=sqlite.DRIVER)
        options["execution_options"] = {"compiled_cache": sqlite.COMPILED_STATEMENTS}
    if url.get_backend_name() == "postgresql":
        options["pool_pre_ping"] = True
        arguments: dict[str, Any] = {
            name: value for name, value in _POSTGRESQL.items() if name not in url.query
        }
        if url.password is None and (password := read_secret(PASSWORD_VARIABLE)) is not None:
            arguments["password"] = password
        options["connect_args"] = arguments
    elif is_sqlite_file(url):
        options["connect_args"] = {"timeout": SECONDS_TO_WAIT}
    else:  # a second connection to :memory: would open another database
        options |= {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
        options["connect_args"] = {"check_same_thread": False}
    try:
        engine = create_engine(
            url,
            hide_parameters=True,  # error messages must not contain documents
            json_serializer=partial(json.dumps, allow_nan=False),  # PostgreSQL refuses NaN
            json_deserializer=_parse_json,
            **options,
        )
    except ImportError as error:
        raise ConfigError(
            "PostgreSQL needs the driver psycopg. Install it with: pip install 'knnstore[postgres]'"
        ) from error
    if engine.dialect.name == "sqlite":
        sqlite.register_handlers(engine)
        event.listen(engine, "begin", _begin_transaction)
    else:
        event.listen(engine, "connect", _check_encoding, insert=True)  # runs before SQLAlchemy reads text
    return engine


def _parse_json(text: str) -> Any:
    """Parse JSON text from the database, and return the value.

    If the value is nested too deeply for Python's parser, the placeholder `TOO_DEEP` is returned.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return TOO_DEEP


def _check_encoding(connection: Any, _record: object) -> None:
    """Check that a PostgreSQL database does not have the encoding SQL_ASCII, which stores bytes and no text.

    SQLAlchemy calls this function for each new connection.

    Args:
        connection: the driver's new connection; it is closed if the encoding is SQL_ASCII.
        _record: ignored.

    Raises:
        ConfigError: the database has the encoding SQL_ASCII.
    """
    info = connection.info
    if info.parameter_status("server_encoding") == "SQL_ASCII":  # the driver would return bytes as text
        database = info.dbname
        connection.close()
        raise ConfigError(
            f"the database {database!r} has the encoding SQL_ASCII, which stores bytes instead of text: "
            "make another for the catalog with CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8'"
        )


def _begin_transaction(connection: Connection) -> None:
    """Begin a transaction on SQLite.

    The statement is ``BEGIN``, unless the connection's execution option `_BEGIN` holds another statement.
    """
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


@contextmanager
def translate_errors(engine: Engine) -> Iterator[None]:
    """Convert exceptions of database drivers and SQLAlchemy in the ``with`` block to KnnstoreErrors.

    A KnnstoreError that the block raises passes unchanged.

    Args:
        engine: SQLAlchemy engine that the block uses; messages name the location of its database.

    Raises:
        StoreUnavailableError: the database cannot be reached; trying again is safe.
        DiskFullError, ReadOnlyError: SQLite cannot write to its disk.
        ConfigError: the statement is too complex for the database, for example because of a condition.
        CatalogError: the database refused a statement, or a stored value is damaged.
    """
    try:
        yield
    except PoolTimeoutError as error:
        raise StoreUnavailableError(f"{render_location(engine.url)}: all connections are in use") from error
    except DBAPIError as error:
        disk_error = sqlite.convert_disk_error(error.orig, render_location(engine.url))
        if disk_error is not None:
            raise disk_error from error
        lines = str(error.orig).strip().splitlines()  # lines after the first may quote stored values
        reason = lines[0] if lines else type(error.orig).__name__
        undecoded = _NO_TEXT.match(reason)
        if undecoded is not None:  # not chained: SQLite's message quotes the value, which may be a secret
            raise CatalogError(
                f"the catalog's database ({render_location(engine.url)}) is damaged, restore it from a "
                f"backup: the column {undecoded[1]!r} holds bytes that are not UTF-8"
            ) from None
        if _is_too_complex(error, reason):
            raise ConfigError(
                f"the condition or selection is too complex for the catalog's database: {reason}; make it "
                "smaller"
            ) from error
        kind = StoreUnavailableError if _is_unreachable(error) else CatalogError
        if error.connection_invalidated:  # a commit during which the connection was lost may have succeeded
            reason += "; try again: nothing is half done"
        raise kind(f"the catalog's database ({render_location(engine.url)}) failed: {reason}") from error
    except KnnstoreError:
        raise
    except _DAMAGE as error:
        raise CatalogError(
            f"the catalog's database ({render_location(engine.url)}) is damaged, restore it from a backup: "
            f"it contains a value that is not valid ({type(error).__name__})"
        ) from error


def _is_too_complex(error: DBAPIError, reason: str) -> bool:
    """Check whether the database refused a statement because it is too large or too deeply nested.

    Args:
        error: the driver's error. PostgreSQL's errors are recognized by their SQLSTATE.
        reason: first line of the driver's message, by which SQLite's errors are recognized.
    """
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state:
        return state.startswith("54")  # program limit exceeded
    name = str(getattr(error.orig, "sqlite_errorname", ""))
    return name in ("SQLITE_ERROR", "SQLITE_TOOBIG") and _TOO_COMPLEX.search(reason) is not None


def _is_unreachable(error: DBAPIError) -> bool:
    """Check whether a database error means that the database cannot be reached or used at the moment.

    Returns True if the connection was lost, the database is locked or its disk fails, so that the same
    statement may succeed later. Returns False if the statement or the stored data caused the error.

    Args:
        error: the error that SQLAlchemy raised.
    """
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        name = str(getattr(error.orig, "sqlite_errorname", ""))
        return not name or name.startswith(
            _UNREACHABLE_SQLITE
        )  # errors of `sqlite._open_connection` have no name
    return True


def render_location(url: URL) -> str:
    """Return the location of a database as text for messages.

    The text for a SQLite file is its path, and for a database in memory ":memory:". For PostgreSQL, it is the
    URL without options and with *** in place of the password.
    """
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    return url.set(query={}).render_as_string()  # renders the password as ***


def identify_database(engine: Engine) -> str:
    """Return an identifier of a database. A copy of the database has another identifier.

    For a SQLite file, the identifier is made of the inode numbers of its folder and of the file; renaming
    changes neither. On PostgreSQL, it is made of the server's system identifier ("-" if this user may not
    read it) and the database's OID. For a database in memory, it is "memory".

    Args:
        engine: SQLAlchemy engine of the database.
    """
    if is_sqlite_file(engine.url):
        return identify_file(Path(str(engine.url.database)))
    if engine.dialect.name == "sqlite":
        return "memory"
    database = "SELECT oid FROM pg_database WHERE datname = current_database()"
    allowed = "SELECT has_function_privilege('pg_control_system()', 'execute')"
    with translate_errors(engine), engine.connect() as connection:
        server = "-"
        if connection.scalar(text(allowed)):
            server = connection.scalar(text("SELECT system_identifier FROM pg_control_system()"))
        return f"{server}-{connection.scalar(text(database))}"


def identify_file(path: Path) -> str:
    """Return an identifier of a file: the inode numbers of its folder and of the file, joined by "-".

    A copy of the file has another identifier. Raises OSError if the file does not exist.
    """
    return f"{path.parent.stat().st_ino}-{path.stat().st_ino}"


@contextmanager
def run_transaction(engine: Engine) -> Iterator[Session]:
    """Run the ``with`` block in one transaction, and yield the SQLAlchemy session of the transaction.

    The transaction is committed at the end of the block, and rolled back if the block raises an exception.

    Args:
        engine: SQLAlchemy engine of the database.

    Raises:
        StoreUnavailableError: the database cannot be reached; or the SQLite file was opened without its log,
            and was changed by another process during the block. Trying again is safe.
        KnnstoreError: the database failed in another way, see `translate_errors`.
    """
    with (
        translate_errors(engine),
        Session(engine, expire_on_commit=False) as opened_session,
        opened_session.begin(),
        sqlite.fail_if_changed(opened_session.connection().connection.driver_connection),
    ):
        yield opened_session


def run_read_transaction(engine: Engine) -> AbstractContextManager[Session]:
    """Run the ``with`` block in one transaction, and yield the SQLAlchemy session of the transaction.

    All queries in the block see the same state of the database, also if another process changes it.

    Args:
        engine: SQLAlchemy engine of the database.

    Raises:
        StoreUnavailableError: the database cannot be reached; trying again is safe.
        KnnstoreError: the database failed in another way, see `translate_errors`.
    """
    if engine.dialect.name == "postgresql":  # SQLite isolates every transaction in this way
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    return run_transaction(engine)


@contextmanager
def run_exclusive_transaction(engine: Engine) -> Iterator[Connection]:
    """Run the ``with`` block in one transaction that may change the tables, and yield its connection.

    The transaction is committed at the end of the block, and rolled back if the block raises an exception.
    Another call of this function, in this or another process, waits until the transaction ends. On SQLite,
    foreign keys are not enforced in the block.

    Args:
        engine: SQLAlchemy engine of the database.

    Raises:
        KnnstoreError: the database cannot be reached or failed, see `translate_errors`.
    """
    with translate_errors(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            with connection.begin():
                lock = text("SELECT pg_advisory_xact_lock(:lock, hashtext(current_schema()))")
                connection.execute(lock, {"lock": LOCK})
                yield connection
            return
        connection.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        driver: Any = connection.connection.driver_connection
        # Migrations on SQLite drop and rebuild tables, which would cascade to other tables. The pragma has no
        # effect inside a transaction, so it is set before.
        driver.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                yield connection
        finally:
            driver.execute("PRAGMA foreign_keys=ON")
