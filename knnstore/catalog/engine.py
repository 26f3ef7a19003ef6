"""Connecting to the catalogue's database: SQLite in a file or in memory, PostgreSQL by URL."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from knnstore.errors import CatalogError, ConfigError, StoreUnavailableError

DIALECTS = ("sqlite", "postgresql")


def parse_url(url: str) -> URL:
    """Read a SQLAlchemy URL and refuse databases that the catalogue does not support.

    Raises:
        ConfigError: the URL cannot be read or names another database.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(
            "the catalogue's URL cannot be read; expected postgresql+psycopg://USER@HOST/DATABASE "
            "or sqlite:///FILE"
        ) from error
    if parsed.get_backend_name() not in DIALECTS:
        raise ConfigError(f"the catalogue runs on {' or '.join(DIALECTS)}, not {parsed.get_backend_name()}")
    return parsed


def connect(url: URL) -> Engine:
    """Make an engine with the durability settings that the commit protocol relies on.

    Raises:
        ConfigError: the database driver is not installed.
    """
    options: dict[str, Any] = {}
    if url.get_backend_name() == "postgresql":
        options["pool_pre_ping"] = True
    elif url.database in (None, "", ":memory:"):
        options["poolclass"] = StaticPool  # one connection, or every thread has a database of its own
        options["connect_args"] = {"check_same_thread": False}
    else:
        options["connect_args"] = {"timeout": 30}
    try:
        engine = create_engine(url, **options)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigError(
            "PostgreSQL needs the driver psycopg. Install it with: pip install 'knnstore[postgres]'"
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin)
    return engine


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, so that DDL is transactional too
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the driver's exceptions into ours, the original chained.

    Raises:
        StoreUnavailableError: the database cannot be reached; trying again is safe.
        CatalogError: it refused a statement.
    """
    try:
        yield
    except DBAPIError as error:
        message = str(error.orig).strip().splitlines()[0] if error.orig else type(error).__name__
        unreachable = error.connection_invalidated or isinstance(error, OperationalError)
        kind = StoreUnavailableError if unreachable else CatalogError
        raise kind(f"the catalogue's database failed: {message}") from error


@contextmanager
def session(engine: Engine) -> Iterator[Session]:
    """Run one transaction: committed at the end of the block, rolled back on an exception."""
    with translated_errors(), Session(engine, expire_on_commit=False) as current, current.begin():
        yield current
