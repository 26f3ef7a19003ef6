"""Making, upgrading and refusing schemas."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import URL, MetaData, inspect

from knnstore.catalog import Catalog, CatalogWriter, NewDocument, schema, upgrade_catalog
from knnstore.catalog.connection import create_durable_engine, run_exclusive_transaction
from knnstore.catalog.tables import Base
from knnstore.errors import (
    CatalogError,
    SchemaOutdatedError,
    SchemaTooNewError,
    StoreExistsError,
    StoreNotFoundError,
)

Make = Callable[..., NewDocument]
Creator = Callable[[URL], Catalog]

ASSETS = Path(__file__).parent / "assets"

# What a later release might do: on SQLite the table is dropped and built anew.
NEXT_MIGRATION = '''
"""A column more, and the table that others refer to built anew."""

import sqlalchemy as sa
from alembic import op

revision = "9998"
down_revision = "0011"


def upgrade() -> None:
    with op.batch_alter_table("knnstore_documents") as batch:
        batch.add_column(sa.Column("language", sa.String(), nullable=True))
        batch.alter_column("content_hash", type_=sa.String(128))
'''


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package had one migration more, in a folder whose name has a %."""
    folder = tmp_path / "100%" / "migrations"
    shutil.copytree(schema.find_migrations_folder(), folder)
    (folder / "versions" / "9998_next.py").write_text(NEXT_MIGRATION)
    monkeypatch.setattr(schema, "find_migrations_folder", lambda: folder)


def run(url: URL, *statements: str) -> None:
    engine = create_durable_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def describe_tables(url: URL) -> dict[str, Any]:
    """All that a database says of its tables but the order of their columns."""
    engine = create_durable_engine(url)
    found = inspect(engine)
    tables: dict[str, Any] = {
        name: (
            sorted(str(sorted(column.items(), key=str)) for column in found.get_columns(name)),
            found.get_pk_constraint(name),
            sorted(map(str, found.get_foreign_keys(name))),
            sorted(map(str, found.get_unique_constraints(name))),
            sorted(map(str, found.get_check_constraints(name))),
            [
                {**index, "dialect_options": {k: str(v) for k, v in index.get("dialect_options", {}).items()}}
                for index in sorted(found.get_indexes(name), key=lambda index: str(index["name"]))
            ],
        )
        for name in found.get_table_names()
    }
    if url.drivername == "sqlite":
        with engine.connect() as connection:
            made = connection.exec_driver_sql(
                "SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%'"
            )
            tables["ids are used once"] = sorted(made.scalars())
    engine.dispose()
    return tables


def test_migrations_lead_to_the_tables_of_a_new_catalog(catalog_url: URL, create: Creator) -> None:
    configuration = Config()
    configuration.set_main_option("script_location", str(schema.find_migrations_folder()))
    engine = create_durable_engine(catalog_url)
    with run_exclusive_transaction(engine) as connection:
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, "head")
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, Base.metadata) == []
    migrated = describe_tables(catalog_url)
    with engine.begin() as connection:
        found = MetaData()
        found.reflect(connection)
        found.drop_all(connection)
    engine.dispose()
    create(catalog_url).close()
    assert describe_tables(catalog_url) == migrated


def test_a_store_is_made_once(catalog_url: URL, create: Creator) -> None:
    with pytest.raises(StoreNotFoundError, match="knnstore init"):
        Catalog.open(catalog_url)
    if catalog_url.drivername == "sqlite":
        assert not Path(str(catalog_url.database)).exists(), "opening for reading made a file"
    made = create(catalog_url)
    with pytest.raises(StoreExistsError, match="already holds"):
        create(catalog_url)
    assert made.engine().params == {"nprobe": 32}
    again = Catalog.open(catalog_url)
    assert again.identity == made.identity
    again.close()


def test_other_tables_in_the_database_stay(catalog_url: URL, create: Creator) -> None:
    run(
        catalog_url,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('theirs')",
        "CREATE TABLE documents (id INTEGER PRIMARY KEY)",
    )
    with pytest.raises(StoreNotFoundError):
        Catalog.open(catalog_url)
    catalog = create(catalog_url)
    with catalog.sql.connect() as connection:
        assert connection.exec_driver_sql("SELECT * FROM alembic_version").all() == [("theirs",)]
        ours = set(inspect(connection).get_table_names()) - {"alembic_version", "documents"}
    assert ours
    assert all(name.startswith("knnstore_") for name in ours)


def test_an_unknown_schema_is_refused(catalog_url: URL, create: Creator) -> None:
    create(catalog_url).close()
    run(catalog_url, "UPDATE knnstore_alembic_version SET version_num = '9999'")
    for act in (Catalog.open, upgrade_catalog, create):
        with pytest.raises(SchemaTooNewError, match=r"9999.*upgrade knnstore"):
            act(catalog_url)


def test_an_older_schema_is_upgraded_on_request(
    catalog_url: URL, create: Creator, document: Make, request: pytest.FixtureRequest
) -> None:
    writer = CatalogWriter(create(catalog_url))
    (placed,) = writer.insert_pending_documents([document("a", tags=("x", "y"))])
    writer.make_documents_live([placed.row])
    request.getfixturevalue("next_release")
    for act in (Catalog.open, create):
        with pytest.raises(SchemaOutdatedError, match="knnstore db upgrade"):
            act(catalog_url)
    upgrade_catalog(catalog_url)
    upgrade_catalog(catalog_url)
    catalog = Catalog.open(catalog_url)
    assert "language" in {c["name"] for c in inspect(catalog.sql).get_columns("knnstore_documents")}
    assert catalog.documents()[0].tags == ("x", "y"), "rebuilding a table must not cascade"
    catalog.close()


def test_an_upgrade_that_fails_changes_nothing(
    catalog_url: URL, create: Creator, request: pytest.FixtureRequest
) -> None:
    create(catalog_url).close()
    before = describe_tables(catalog_url)
    request.getfixturevalue("next_release")
    failing = schema.find_migrations_folder() / "versions" / "9998_next.py"
    failing.write_text(NEXT_MIGRATION + "    raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        upgrade_catalog(catalog_url)
    assert describe_tables(catalog_url) == before
    with pytest.raises(SchemaOutdatedError):
        Catalog.open(catalog_url)


def test_a_store_that_was_pruned_is_refused_and_stays_as_it_is(
    catalog_url: URL, create: Creator, document: Make
) -> None:
    """Documents that are being removed do not count."""
    writer = CatalogWriter(create(catalog_url))
    placed = writer.insert_pending_documents([document("a", "law"), document("b", "tax")])
    writer.make_documents_live([one.row for one in placed])
    writer.mark_as_deleting([placed[1].row])
    writer.catalog.close()
    run(
        catalog_url,
        "DROP TABLE knnstore_leases",
        "DROP TABLE knnstore_withdrawals",
        "CREATE TABLE knnstore_document_pruned (document_id BIGINT PRIMARY KEY)",
        *(f"INSERT INTO knnstore_document_pruned VALUES ({one.row})" for one in placed),
        "UPDATE knnstore_alembic_version SET version_num = '0008'",
    )
    for _ in range(2):
        with pytest.raises(CatalogError, match=r"the documents of 'law' were: make the store again"):
            upgrade_catalog(catalog_url)
    with pytest.raises(SchemaOutdatedError):
        Catalog.open(catalog_url)
    run(catalog_url, f"DELETE FROM knnstore_document_pruned WHERE document_id = {placed[0].row}")
    upgrade_catalog(catalog_url)
    catalog = Catalog.open(catalog_url)
    assert not inspect(catalog.sql).has_table("knnstore_document_pruned")
    assert [one.id for one in catalog.documents()] == ["a"]
    catalog.close()


def test_a_second_process_waits_for_the_first_to_make_the_tables(catalog_url: URL, create: Creator) -> None:
    engine = create_durable_engine(catalog_url)
    made: list[Catalog] = []
    second = threading.Thread(target=lambda: made.append(create(catalog_url)))
    with run_exclusive_transaction(engine) as connection:
        schema.upgrade(connection)
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join()
    engine.dispose()
    assert made[0].documents() == []


def test_copies_that_are_upgraded_apart_are_known_as_one_store(tmp_path: Path) -> None:
    ids = {}
    for asset in sorted(ASSETS.glob("*.db")):
        for copy in (tmp_path / "a.db", tmp_path / "b.db"):
            shutil.copy(asset, copy)
            url = URL.create("sqlite", database=str(copy))
            upgrade_catalog(url)
            catalog = Catalog.open(url)
            ids[asset.stem, copy.stem] = catalog.store_id
            catalog.close()
    assert all(len(bytes.fromhex(id)) == 16 for id in ids.values())
    assert all(ids[release, "a"] == ids[release, "b"] for release, _ in ids)
    assert len(set(ids.values())) == len(ids) // 2, "two stores have one id"


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.db")), ids=lambda path: path.stem)
def test_the_database_of_each_release_is_usable(asset: Path, tmp_path: Path, document: Make) -> None:
    copy = tmp_path / "catalog.db"
    shutil.copy(asset, copy)
    url = URL.create("sqlite", database=str(copy))
    upgrade_catalog(url)
    catalog = Catalog.open(url)
    with catalog.sql.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"

    assert (catalog.identity.model, catalog.identity.dim, catalog.engine().params) == ("gpt2", 768, {"m": 8})
    assert [(d.id, d.domain, d.tokens, d.tags) for d in catalog.documents()] == [
        ("a", "law", 3, ("x", "y")),
        ("c", "tax", 5, ("x",)),
    ]
    np.testing.assert_array_equal(catalog.tokens(catalog.rows(id="c")[0]), np.arange(5))
    assert catalog.settings(["law"]) == {"k": 8}

    writer = CatalogWriter(catalog)
    assert [(p.start, p.stop) for p in writer.unsettled_documents()] == [(3, 7), (12, 18)]
    writer.delete_documents([placed.row for placed in writer.unsettled_documents()])
    (placed,) = writer.insert_pending_documents([document("a", "law", tokens=2)])
    assert placed.start == 18
    writer.make_documents_live([placed.row])
    assert [d.tokens for d in catalog.documents(id="a")] == [2]
    catalog.close()
