"""Databases that cannot be used: every failure is one line, and no line holds the password."""

import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, text

from knnstore.catalog import Catalog, CatalogWriter, parse_url, upgrade_catalog
from knnstore.catalog.connection import run_transaction, sqlite_url
from knnstore.catalog.sqlite import COMPILED_STATEMENTS
from knnstore.errors import CatalogError, ConfigError, KnnstoreError, StoreUnavailableError

Creator = Callable[[URL], Catalog]

SECRET = "hunter2secret"


def message(act: Callable[[], object], kind: type[KnnstoreError]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert "\n" not in text
    assert SECRET not in text
    return text


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        f"mysql://u:{SECRET}@h/d",
        f"postgres://u:{SECRET}@h/d",
        f"postgresql+asyncpg://u:{SECRET}@h/d",
        f"postgresql://u:{SECRET}@h:port/d",
        f"postgresql://u@h:{SECRET}/d",
        f"postgresql://u:p@{SECRET}@h/d",
        f"postgresql://u@h/d?password={SECRET}",
    ],
)
def test_urls_that_cannot_be_used(url: str) -> None:
    message(lambda: parse_url(url), ConfigError)
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert SECRET not in str(caught.value.__cause__)


def test_the_driver_is_chosen_by_us() -> None:
    assert parse_url("postgresql://h/d").drivername == "postgresql+psycopg"
    assert parse_url("sqlite+pysqlite:///x.db") == parse_url("sqlite:///x.db")


def test_statements_are_compiled_once_for_all_sqlite_stores(tmp_path: Path, create: Creator) -> None:
    urls = [sqlite_url(tmp_path / name) for name in ("first.db", "second.db")]
    for url in urls:
        create(url)

    def use_catalog(url: URL) -> None:
        with closing(Catalog.open(url)) as catalog:
            CatalogWriter(catalog).save_settings([], {"lam": 0.5})
            assert catalog.domains() == []
            assert catalog.settings() == {"lam": 0.5}

    use_catalog(urls[0])
    compiled = set(COMPILED_STATEMENTS)
    assert compiled
    use_catalog(urls[1])
    assert set(COMPILED_STATEMENTS) <= compiled


def test_a_password_with_a_percent_sign(postgres: Any, create: Creator) -> None:
    url = postgres.new_database().set(username="knnstore_password", password="s3cr%t")
    text = url.render_as_string(hide_password=False)
    assert "s3cr%25t" in text
    assert create(parse_url(text)).revision() == 0


def test_a_wrong_password(postgres: Any) -> None:
    url = postgres.new_database().set(username="knnstore_password", password=SECRET)
    said = message(lambda: Catalog.open(url), StoreUnavailableError)
    assert "password authentication failed" in said


def test_an_unreachable_server() -> None:
    with socket.socket() as unused:  # bound but not listening: nobody answers
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        url = parse_url(f"postgresql://u:{SECRET}@127.0.0.1:{port}/d")
        said = message(lambda: Catalog.open(url), StoreUnavailableError)
    assert f"u:***@127.0.0.1:{port}/d" in said
    assert "refused" in said


def test_a_database_that_is_not_there(postgres: Any) -> None:
    said = message(lambda: Catalog.open(postgres.url("nowhere")), StoreUnavailableError)
    assert '"nowhere" does not exist' in said


def test_a_database_that_keeps_bytes(postgres: Any, create: Creator) -> None:
    """Of encoding SQL_ASCII, as an initdb without a locale gives: the driver reads no text from it."""
    url = postgres.new_database(options="TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'")
    for use in (create, Catalog.open, upgrade_catalog):
        said = message(lambda use=use: use(url), ConfigError)
        assert f"{url.database!r} has the encoding SQL_ASCII" in said
        assert "UTF8" in said


def test_a_folder_that_is_not_there(tmp_path: Path, create: Creator) -> None:
    url = parse_url(f"sqlite:///{tmp_path}/missing/catalog.db")
    assert f"{tmp_path}/missing/catalog.db" in message(lambda: create(url), StoreUnavailableError)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    file.write_bytes(b"something else " * 100)
    said = message(lambda: Catalog.open(parse_url(f"sqlite:///{file}")), CatalogError)
    assert str(file) in said
    assert "not a database" in said


@pytest.mark.slow
def test_without_psycopg() -> None:
    program = """
import sys
sys.modules["psycopg"] = None  # as if it were not installed
from knnstore.catalog import Catalog, parse_url
from knnstore.errors import ConfigError
try:
    Catalog.open(parse_url("postgresql://u@h/d"))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'knnstore[postgres]'" in done.stdout


def test_documents_stay_out_of_messages(
    catalog: Catalog, writer: CatalogWriter, document: Callable[..., Any]
) -> None:
    """Even in the chained error of the driver's wrapper, which quotes statements."""
    rows = [
        placed.row for placed in writer.insert_pending_documents([document("a"), document("a", version=2)])
    ]
    with catalog.sql.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE knnstore_documents RENAME TO moved")
    with pytest.raises(KnnstoreError) as caught:
        writer.insert_pending_documents([document(SECRET, metadata={"text": SECRET})])
    assert "knnstore_documents" in str(caught.value)
    assert "\n" not in str(caught.value)
    chain = f"{caught.value.__cause__}"
    assert SECRET not in chain
    assert rows


def test_a_restarted_server_is_found_again(
    postgres: Any, create: Creator, document: Callable[..., Any]
) -> None:
    catalog = create(postgres.new_database())
    writer = CatalogWriter(catalog)
    (placed,) = writer.insert_pending_documents([document("a")])
    postgres.restart()
    writer.make_documents_live([placed.row])
    assert [d.id for d in catalog.documents()] == ["a"]


def failure(url: URL, create: Creator, statement: str) -> KnnstoreError:
    """What a statement fails with in a catalog."""
    catalog = create(url)
    with pytest.raises(KnnstoreError) as caught, run_transaction(catalog.sql) as current:
        current.execute(text(statement)).all()
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_statement_that_is_too_complex_is_the_users(catalog_url: URL, create: Creator) -> None:
    """Trying again later does not help; a smaller condition does."""
    statement = f"SELECT {'+'.join(['1'] * 100_000)}"
    found = failure(catalog_url, create, statement)
    assert type(found) is ConfigError
    assert "make it smaller" in str(found)


def test_a_table_that_is_gone_is_damage_and_no_lost_connection(catalog_url: URL, create: Creator) -> None:
    assert type(failure(catalog_url, create, "SELECT * FROM knnstore_nothing")) is CatalogError


def test_text_that_is_none_is_damage_and_not_quoted(tmp_path: Path, create: Creator) -> None:
    url = parse_url(f"sqlite:///{tmp_path / 'catalog.db'}")
    found = failure(url, create, f"SELECT CAST(X'{SECRET.encode().hex()}ff' AS TEXT) AS name")
    assert type(found) is CatalogError
    assert "'name' holds bytes that are not UTF-8" in str(found)
    assert SECRET not in str(found)
    assert SECRET not in repr(found.__cause__)


def test_a_locked_database_can_be_tried_again(tmp_path: Path, create: Creator) -> None:
    url = parse_url(f"sqlite:///{tmp_path / 'catalog.db'}")
    catalog = create(url)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"), run_transaction(catalog.sql) as current:
            current.execute(text("PRAGMA busy_timeout = 0"))
            current.execute(text("UPDATE knnstore_store SET revision = 1"))
