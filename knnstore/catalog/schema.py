"""Bringing the database to this package's schema, and refusing one that does not fit."""

from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

import knnstore
from knnstore.catalog.engine import translated_errors
from knnstore.errors import CatalogError, SchemaOutdatedError, SchemaTooNewError

VERSION_TABLE = "knnstore_alembic_version"
"""Not Alembic's default, which another application in the same database may hold."""


def script_location() -> Path:
    """The folder of the migrations: inside the wheel, or beside the package in a checkout.

    Raises:
        CatalogError: the folder is missing; the installation is broken.
    """
    installed = Path(str(files(knnstore) / "migrations"))
    checkout = Path(knnstore.__file__).parent.parent / "migrations"
    for folder in (installed, checkout):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogError("the installation is broken: its migrations are missing; install knnstore again")


def upgrade(engine: Engine) -> None:
    """Bring the database to the newest schema; a new database gets all its tables."""
    with translated_errors(), engine.begin() as connection:
        command.upgrade(_config(connection), "head")


def check(engine: Engine) -> None:
    """Refuse a database whose schema is not this package's.

    Raises:
        SchemaOutdatedError: older; says which command to run.
        SchemaTooNewError: newer; says to upgrade the package.
    """
    with translated_errors(), engine.connect() as connection:
        current = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE}
        ).get_current_revision()
    scripts = ScriptDirectory.from_config(_config())
    if current == scripts.get_current_head():
        return
    if current is None or current in {script.revision for script in scripts.walk_revisions()}:
        raise SchemaOutdatedError(
            "the catalogue's schema is older than this package: run `knnstore db upgrade`"
        )
    raise SchemaTooNewError(
        f"the catalogue's schema ({current}) is newer than this package: upgrade knnstore"
    )


def is_empty(engine: Engine) -> bool:
    """Whether the database has no catalogue yet."""
    with translated_errors(), engine.connect() as connection:
        return not inspect(connection).has_table(VERSION_TABLE)


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
