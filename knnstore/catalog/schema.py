"""The schema (tables) of the catalog's database: creation, check of the version, and upgrade by Alembic."""

from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, column, delete, insert, inspect, select, table
from sqlalchemy import Engine as SqlEngine

from knnstore.catalog.connection import (
    create_durable_engine,
    is_sqlite_file,
    render_location,
    run_exclusive_transaction,
)
from knnstore.catalog.digests import hash_store_identity
from knnstore.catalog.tables import Base, StoreRow
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


def find_migrations_folder() -> Path:
    """Return the folder of Alembic's migrations (scripts that create and change the tables).

    The folder is inside the installed package, or next to the package in a checkout of the repository.

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
    """Return True if a database has no catalog, else False. Tables of other applications are ignored."""
    return not inspect(connection).has_table(VERSION_TABLE)


def make_not_found_error(url: URL) -> StoreNotFoundError:
    """Return, without raising it, the error for a database that has no catalog."""
    return StoreNotFoundError(
        f"there is no catalog in {render_location(url)}; restore it from a backup, or make a store with "
        "`knnstore init`"
    )


def connect_existing(url: URL) -> SqlEngine:
    """Make a SQLAlchemy engine for an existing database.

    The function checks that a SQLite file exists, and nothing else; the database may lack a catalog.

    Args:
        url: URL of the database.

    Raises:
        StoreNotFoundError: the SQLite file does not exist.
        ConfigError: the database driver is not installed, or the password file cannot be read.
    """
    if is_sqlite_file(url) and not Path(str(url.database)).exists():  # connecting would create the file
        raise make_not_found_error(url)
    return create_durable_engine(url)


def check_version(connection: Connection) -> None:
    """Check that this version of knnstore can use the catalog in a database.

    Raises:
        StoreNotFoundError: the database has no catalog.
        SchemaOutdatedError: an older version of knnstore made the tables.
        SchemaTooNewError: a newer version of knnstore made the tables.
    """
    if lacks_catalog(connection):
        raise make_not_found_error(connection.engine.url)
    if not _is_newest(connection):
        raise SchemaOutdatedError(
            "the catalog's schema is older than this package: run `knnstore db upgrade`"
        )


def upgrade_catalog(url: URL) -> None:
    """Upgrade the tables of an existing catalog to this version of knnstore.

    Does nothing if the tables are up to date.

    Args:
        url: URL of the catalog's database.

    Raises:
        StoreNotFoundError: the database has no catalog.
        SchemaTooNewError: a newer version of knnstore made the tables.
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
    """Create the tables of a catalog, or upgrade old tables to this version of knnstore.

    New tables are created from the classes of `tables`; only old tables go through the migrations. Both ways
    lead to the same tables. Does nothing if the tables are up to date.

    Args:
        connection: connection in a transaction of `run_exclusive_transaction`, which the caller commits.

    Raises:
        SchemaTooNewError: a newer version of knnstore made the tables.
    """
    if lacks_catalog(connection):
        Base.metadata.create_all(connection)
        versions = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        versions.stamp(_load_migrations(find_migrations_folder()), "head")
    elif not _is_newest(connection):
        config = _make_config(find_migrations_folder())
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def create_store(sql: SqlEngine, identity: Identity, engine: Engine, store_id: str | None) -> None:
    """Create the tables of a catalog and the row that describes the store, in one transaction.

    Args:
        sql: SQLAlchemy engine of the database.
        identity: model and parameters of the store.
        engine: vector engine that holds the keys: name, location and parameters.
        store_id: id of the store; None chooses a random id. If the database has a store with this id that was
            never opened for writing, its creation was interrupted, and its row is replaced.

    Raises:
        StoreExistsError: the database has a store with another id, or a store with this id that was opened
            for writing.
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
    """Check whether a catalog has the tables of this version of knnstore; older tables return False.

    Raises SchemaTooNewError if a newer version of knnstore made the tables.
    """
    versions = table(VERSION_TABLE, column("version_num"))
    current = connection.scalar(select(versions.c.version_num))
    migrations = _load_migrations(find_migrations_folder())
    known_versions = {script.revision for script in migrations.walk_revisions()}
    if current is not None and current not in known_versions:
        raise SchemaTooNewError(
            f"the catalog's schema ({current}) is newer than this package: upgrade knnstore"
        )
    return current == migrations.get_current_head()


@cache
def _load_migrations(location: Path) -> ScriptDirectory:
    """Load the migrations in a folder, once in each process."""
    return ScriptDirectory.from_config(_make_config(location))


def _make_config(location: Path) -> Config:
    """Build Alembic's configuration for the migrations in a folder."""
    config = Config()
    config.set_main_option("script_location", str(location).replace("%", "%%"))
    return config
