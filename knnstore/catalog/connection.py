"""Connecting to the catalog's database: SQLite in a file or in memory, PostgreSQL by URL."""

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
    "postgresql": "postgresql+psycopg",  # what the bare name stands for depends on SQLAlchemy's version
    "postgresql+psycopg": "postgresql+psycopg",
}
_EXPECTED = "expected postgresql+psycopg://USER@HOST/DATABASE or sqlite:///FILE"

_DAMAGE = (ValueError, TypeError, OverflowError, LookupError, AttributeError, zlib.error)
"""What a value of a wrong kind leads to, wherever it is read."""

_TOO_COMPLEX = re.compile(
    r"at most \d+ tables|too many|tree is too large|stack overflow|too complex|too big|stack depth limit"
)
"""Matches errors of SQLite and PostgreSQL about a statement that is too large or too deeply nested."""
_NO_TEXT = re.compile(r"Could not decode to UTF-8 column '([^']*)'")
_UNREACHABLE_SQLITE = (
    "SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL", "SQLITE_INTERRUPT",
    "SQLITE_NOMEM", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_PERM", "SQLITE_AUTH",
)  # fmt: skip
"""Errors of SQLite that come from outside of the statement and the data."""

PASSWORD_VARIABLE = "PGPASSWORD"  # noqa: S105  # its name
"""Environment variable of PostgreSQL's own clients with the password; that with a file's path is ours."""

_POSTGRESQL = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Options of libpq, unless the URL has others: where a network loses the server without a word, a command
ends after a minute, not after two hours. The last one is in milliseconds, the times before it in seconds."""

_BEGIN = "knnstore_begin"

SECONDS_TO_WAIT = 30
"""For what others lock or read."""

LOCK = 0x6B6E6E73
"""The first half of our advisory locks' keys on PostgreSQL; the second is the schema's hash."""


def parse_url(url: str) -> URL:
    """Read a SQLAlchemy URL and refuse databases that the catalog does not support.

    Raises:
        ConfigError: the URL cannot be read or names another database.
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
    """The URL of a database in a file."""
    return URL.create("sqlite", database=str(path))


def without_password(url: URL) -> str:
    """The same URL, fit to be written down and to be compared with another."""
    return url._replace(password=None).render_as_string()


def shown(url: URL) -> str:
    """The same URL, fit to be shown: a password as ***."""
    return url.render_as_string(hide_password=True)


def is_sqlite_file(url: URL) -> bool:
    """Whether the database is a file, and not in memory or on a server."""
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")


def connect(url: URL) -> Engine:
    """Make an engine with the durability settings that the commit protocol relies on.

    The password of PostgreSQL is the URL's, else that of PGPASSWORD, or of the file that PGPASSWORD_FILE
    names.

    Raises:
        ConfigError: the database driver is not installed, or the file of the password cannot be read.
    """
    options: dict[str, Any] = {}
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
    else:  # a second connection would have a database of its own, so threads take turns
        options |= {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
        options["connect_args"] = {"check_same_thread": False}
    try:
        engine = create_engine(
            url,
            hide_parameters=True,  # documents stay out of messages
            json_serializer=partial(json.dumps, allow_nan=False),  # PostgreSQL refuses NaN
            json_deserializer=_from_json,
            **options,
        )
    except ImportError as error:
        raise ConfigError(
            "PostgreSQL needs the driver psycopg. Install it with: pip install 'knnstore[postgres]'"
        ) from error
    if engine.dialect.name == "sqlite":
        sqlite.prepare(engine)
        event.listen(engine, "begin", _begin)
    else:
        event.listen(engine, "connect", _check_encoding, insert=True)  # before SQLAlchemy asks for text
    return engine


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        return TOO_DEEP


def _check_encoding(connection: Any, _record: object) -> None:
    info = connection.info
    if info.parameter_status("server_encoding") == "SQL_ASCII":  # then the driver gives bytes for text
        database = info.dbname
        connection.close()
        raise ConfigError(
            f"the database {database!r} has the encoding SQL_ASCII, which keeps bytes and no text: make "
            "another for the catalog, CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8'"
        )


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))


@contextmanager
def translated_errors(engine: Engine) -> Iterator[None]:
    """Turn the driver's exceptions into ours, the original chained.

    Raises:
        StoreUnavailableError: the database cannot be reached; trying again is safe.
        DiskFullError, ReadOnlyError: its medium takes no more, or nothing at all.
        ConfigError: the statement is too complex for the database, as a condition can make it.
        CatalogError: it refused a statement, or what it holds makes no sense.
    """
    try:
        yield
    except PoolTimeoutError as error:
        raise StoreUnavailableError(f"{place(engine.url)}: all connections are in use") from error
    except DBAPIError as error:
        medium = sqlite.medium_error(error.orig, place(engine.url))
        if medium is not None:
            raise medium from error
        lines = str(error.orig).strip().splitlines()  # the first has no values, later ones may
        reason = lines[0] if lines else type(error.orig).__name__
        undecoded = _NO_TEXT.match(reason)  # quotes the value, which may be a secret
        if undecoded is not None:
            raise CatalogError(
                f"the catalog's database ({place(engine.url)}) is damaged, restore it from a backup: "
                f"the column {undecoded[1]!r} holds bytes that are not UTF-8"
            ) from None
        if _is_too_complex(error, reason):
            raise ConfigError(
                f"so complex a condition or selection is refused by the catalog's database: {reason}; make "
                "it smaller"
            ) from error
        kind = StoreUnavailableError if _is_unreachable(error) else CatalogError
        if error.connection_invalidated:  # where it was lost in a commit, nobody knows whether that was made
            reason += "; try again: nothing is half done"
        raise kind(f"the catalog's database ({place(engine.url)}) failed: {reason}") from error
    except KnnstoreError:
        raise
    except _DAMAGE as error:
        raise CatalogError(
            f"the catalog's database ({place(engine.url)}) is damaged, restore it from a backup: it holds "
            f"a value that cannot be one ({type(error).__name__})"
        ) from error


def _is_too_complex(error: DBAPIError, reason: str) -> bool:
    """Check whether a smaller statement would have been run."""
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state:
        return state.startswith("54")  # program limit exceeded
    name = str(getattr(error.orig, "sqlite_errorname", ""))
    return name in ("SQLITE_ERROR", "SQLITE_TOOBIG") and _TOO_COMPLEX.search(reason) is not None


def _is_unreachable(error: DBAPIError) -> bool:
    """Check whether the database may answer later; otherwise the statement or the data are at fault."""
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        name = str(getattr(error.orig, "sqlite_errorname", ""))
        return not name or name.startswith(_UNREACHABLE_SQLITE)  # without a name: from `sqlite._connect`
    return True


def place(url: URL) -> str:
    """Where the database is, for messages: without a password or options."""
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    return url.set(query={}).render_as_string()  # a password as ***


def identify(engine: Engine) -> str:
    """What tells a database from a copy of it, one word.

    Of a file the number (inode) that the file system gave it, and its folder's: both stay when the folder
    is renamed. On PostgreSQL the numbers of the server's data and of the database in them.
    """
    if is_sqlite_file(engine.url):
        return identify_file(Path(str(engine.url.database)))
    if engine.dialect.name == "sqlite":
        return "memory"
    database = "SELECT oid FROM pg_database WHERE datname = current_database()"
    allowed = "SELECT has_function_privilege('pg_control_system()', 'execute')"
    with translated_errors(engine), engine.connect() as connection:
        server = "-"
        if connection.scalar(text(allowed)):
            server = connection.scalar(text("SELECT system_identifier FROM pg_control_system()"))
        return f"{server}-{connection.scalar(text(database))}"


def identify_file(path: Path) -> str:
    """Return what `identify` gives for a SQLite database in a file; raises OSError if there is none."""
    return f"{path.parent.stat().st_ino}-{path.stat().st_ino}"


@contextmanager
def session(engine: Engine) -> Iterator[Session]:
    """Run one transaction: committed at the end of the block, rolled back on an exception."""
    with (
        translated_errors(engine),
        Session(engine, expire_on_commit=False) as current,
        current.begin(),
        sqlite.unchanged(current.connection().connection.driver_connection),
    ):
        yield current


def reading(engine: Engine) -> AbstractContextManager[Session]:
    """Run several queries that all see the database as it was at one moment."""
    if engine.dialect.name == "postgresql":  # on SQLite every transaction is so
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    return session(engine)


@contextmanager
def exclusive(engine: Engine) -> Iterator[Connection]:
    """Run one transaction that may change the schema; others of its kind wait for its end."""
    with translated_errors(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            with connection.begin():
                lock = text("SELECT pg_advisory_xact_lock(:lock, hashtext(current_schema()))")
                connection.execute(lock, {"lock": LOCK})
                yield connection
            return
        connection.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        driver: Any = connection.connection.driver_connection
        # To alter a table SQLite must drop it, which would cascade; inside a transaction the
        # switch does nothing.
        driver.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                yield connection
        finally:
            driver.execute("PRAGMA foreign_keys=ON")
