"""Schema of the catalog's database: creation, check of the version, and upgrade by Alembic."""

from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, delete, insert, inspect, select
from sqlalchemy import Engine as SqlEngine

from knnstore.catalog.connection import connect, exclusive, is_sqlite_file, render_location
from knnstore.catalog.digests import digest_of_store
from knnstore.catalog.tables import StoreRow
from knnstore.catalog.types import Engine, Identity
from knnstore.errors import (
    CatalogError,
    SchemaOutdatedError,
    SchemaTooNewError,
    StoreExistsError,
    StoreNotFoundError,
)
from knnstore.failpoints import failpoint

VERSION_TABLE = "knnstore_alembic_version"
"""Table of Alembic's version; another application in the same database may use the default name."""


def script_location() -> Path:
    """Return the folder of the migrations: inside the package if installed, next to it in a checkout.

    Raises:
        CatalogError: the folder is missing; the installation is broken.
    """
    package = Path(str(files("knnstore")))
    installed, checkout = package / "migrations", package.parent / "migrations"
    for folder in (installed, checkout):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError("the installation is broken: its migrations are missing; install knnstore again")


def is_empty(connection: Connection) -> bool:
    """Check whether the database has no catalog yet."""
    return not inspect(connection).has_table(VERSION_TABLE)


def not_found(url: URL) -> StoreNotFoundError:
    """Make the error for a database that holds no catalog."""
    return StoreNotFoundError(
        f"there is no catalog in {render_location(url)}; restore it from a backup, or make a store with "
        "`knnstore init`"
    )


def connect_existing(url: URL) -> SqlEngine:
    """Make an engine for an existing database; see `connect`.

    Raises:
        StoreNotFoundError: the SQLite file does not exist.
        ConfigError: see `connect`.
    """
    if is_sqlite_file(url) and not Path(str(url.database)).exists():  # connecting would create the file
        raise not_found(url)
    return connect(url)


def check(connection: Connection) -> None:
    """Check that the database holds a catalog with this package's schema.

    Raises:
        StoreNotFoundError: the database holds no catalog.
        SchemaOutdatedError, SchemaTooNewError: the schema differs from this package's.
    """
    if is_empty(connection):
        raise not_found(connection.engine.url)
    if not _is_newest(connection):
        raise SchemaOutdatedError(
            "the catalog's schema is older than this package: run `knnstore db upgrade`"
        )


def upgrade_catalog(url: URL) -> None:
    """Upgrade an existing catalog to this package's schema; does nothing if it has this schema.

    Raises:
        StoreNotFoundError: the database holds no store.
        SchemaTooNewError: the schema is newer than this package.
    """
    sql = connect_existing(url)
    try:
        with exclusive(sql) as connection:
            if is_empty(connection):
                raise not_found(url)
            upgrade(connection)
    finally:
        sql.dispose()


def upgrade(connection: Connection) -> None:
    """Create the tables, or upgrade them to the newest schema, in the caller's `exclusive` transaction."""
    if not _is_newest(connection):
        command.upgrade(_config(connection), "head")


def make(sql: SqlEngine, identity: Identity, engine: Engine, store_id: str | None) -> None:
    """Create the tables and the store's row in one transaction; see `Catalog.create`.

    Raises:
        StoreExistsError: the database holds another store, or this store and it was written to.
    """
    with exclusive(sql) as connection:
        if not is_empty(connection):
            check(connection)
            there = connection.execute(select(StoreRow.store_id, StoreRow.writer_epoch)).first()
            if there and (there.store_id != store_id or there.writer_epoch > 0):
                raise StoreExistsError(f"{render_location(sql.url)} already holds a store's catalog")
            connection.execute(delete(StoreRow))
        upgrade(connection)
        connection.execute(
            insert(StoreRow).values(
                id=1,
                store_id=store_id or uuid4().hex,
                **asdict(engine),
                **asdict(identity),
                digest=digest_of_store(identity, engine.params),
            )
        )
        failpoint("catalog.create.inside")


def _is_newest(connection: Connection) -> bool:
    """Check whether the schema is the newest; raises SchemaTooNewError for an unknown version."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    current = context.get_current_revision()
    scripts = ScriptDirectory.from_config(_config())
    known = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known:
        raise SchemaTooNewError(
            f"the catalog's schema ({current}) is newer than this package: upgrade knnstore"
        )
    return current == scripts.get_current_head()


def _config(connection: Connection | None = None) -> Config:
    """Build the configuration of Alembic; migrations run on `connection`."""
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
