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

from knnstore.catalog.connection import connect, is_sqlite_file, render_location, run_exclusive_transaction
from knnstore.catalog.digests import hash_store_identity
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


def lacks_catalog(connection: Connection) -> bool:
    """Check whether the database holds no catalog; other tables do not matter."""
    return not inspect(connection).has_table(VERSION_TABLE)


def make_not_found_error(url: URL) -> StoreNotFoundError:
    """Make the error for a database that holds no catalog, without raising it."""
    return StoreNotFoundError(
        f"there is no catalog in {render_location(url)}; restore it from a backup, or make a store with "
        "`knnstore init`"
    )


def connect_existing(url: URL) -> SqlEngine:
    """Make a SQLAlchemy engine for an existing database; see `connect`. Does not check for a catalog.

    Raises:
        StoreNotFoundError: the SQLite file does not exist.
        ConfigError: see `connect`.
    """
    if is_sqlite_file(url) and not Path(str(url.database)).exists():  # connecting would create the file
        raise make_not_found_error(url)
    return connect(url)


def check_version(connection: Connection) -> None:
    """Check that the database holds a catalog with this package's schema.

    Raises:
        StoreNotFoundError: the database holds no catalog.
        SchemaOutdatedError, SchemaTooNewError: the schema differs from this package's.
    """
    if lacks_catalog(connection):
        raise make_not_found_error(connection.engine.url)
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
        with run_exclusive_transaction(sql) as connection:
            if lacks_catalog(connection):
                raise make_not_found_error(url)
            upgrade(connection)
    finally:
        sql.dispose()


def upgrade(connection: Connection) -> None:
    """Create the tables, or upgrade them to the newest schema; does nothing if the schema is the newest.

    Args:
        connection: connection in a transaction of `run_exclusive_transaction`, which the caller commits.

    Raises:
        SchemaTooNewError: the schema is newer than this package.
    """
    if not _is_newest(connection):
        command.upgrade(_make_config(connection), "head")


def create_store(sql: SqlEngine, identity: Identity, engine: Engine, store_id: str | None) -> None:
    """Create the tables and the store's row in one transaction; see `Catalog.create`.

    An existing row with `store_id`, left by an interrupted creation, is replaced.

    Raises:
        StoreExistsError: the database holds a store with another id, or this store after a writer opened it.
    """
    with run_exclusive_transaction(sql) as connection:
        if not lacks_catalog(connection):
            check_version(connection)
            existing = connection.execute(select(StoreRow.store_id, StoreRow.writer_epoch)).first()
            if existing and (existing.store_id != store_id or existing.writer_epoch > 0):
                raise StoreExistsError(f"{render_location(sql.url)} already holds a store's catalog")
            connection.execute(delete(StoreRow))
        upgrade(connection)
        connection.execute(
            insert(StoreRow).values(
                id=1,
                store_id=store_id or uuid4().hex,
                **asdict(engine),
                **asdict(identity),
                digest=hash_store_identity(identity, engine.params),
            )
        )
        failpoint("catalog.create.inside")


def _is_newest(connection: Connection) -> bool:
    """Check whether the database has the newest schema; False also for a database without a catalog.

    Raises SchemaTooNewError if this package does not know the schema's version.
    """
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    current = context.get_current_revision()
    scripts = ScriptDirectory.from_config(_make_config())
    known_versions = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known_versions:
        raise SchemaTooNewError(
            f"the catalog's schema ({current}) is newer than this package: upgrade knnstore"
        )
    return current == scripts.get_current_head()


def _make_config(connection: Connection | None = None) -> Config:
    """Build the configuration of Alembic. Migrations run on `connection`, if it is not None."""
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
