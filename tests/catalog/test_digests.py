"""Damage of what the catalog stores: noticed by `verify`, used by nobody, and mended by removing.

Each column of each table is altered in turn, as a flipped bit alters it: the database itself notices nothing.
"""

import shutil
import sqlite3
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from knnstore.catalog import Identity, NewDocument
from knnstore.errors import CatalogError, KnnstoreError
from knnstore.store import KNNStore, SavedSettings, Selection

FINGERPRINT = "0" * 64
IDENTITY = Identity("model", FINGERPRINT, "0" * 64, "none", 1, "l2", 1000, 16, 8)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without keys: nothing but the catalog says what its documents are."""
    home = tmp_path_factory.mktemp("sound") / "home"
    with KNNStore.create(home, IDENTITY, store="none", params={}) as store:
        for id in ("first", "second"):
            tokens = np.arange(len(id), 40, dtype=np.uint32)
            document = NewDocument(id, "law", f"{len(id):064x}", tokens, {"a": id}, frozenset({"tag", id}))
            with store.ingest([document]):
                pass
        store.save_settings(SavedSettings({"k": 8}))
    assert problems(home) == []
    return home


@pytest.fixture
def home(sound: Path, tmp_path: Path) -> Path:
    """A copy of that store."""
    return Path(shutil.copytree(sound, tmp_path / "home"))


def alter(home: Path, table: str, column: str, *, where: str = "1") -> bool:
    """Change one bit of a value; False if there is none or the database refuses the change."""
    with closing(sqlite3.connect(home / "catalog.db")) as database, database:
        found = database.execute(f'SELECT rowid, "{column}" FROM {table} WHERE {where}').fetchone()
        if found is None or found[1] in (None, b"", ""):
            return False
        row, value = found
        if isinstance(value, str):
            value = value[:-1] + chr(ord(value[-1]) ^ 1)
        elif isinstance(value, bytes):
            value = value[:-1] + bytes([value[-1] ^ 1])
        else:
            value = type(value)(int(value) ^ 1) if isinstance(value, int) else value * 2
        try:
            database.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (value, row))
        except sqlite3.IntegrityError:
            return False
    return True


def problems(home: Path) -> list[str]:
    """What `verify` says, or the one line in which the store is refused."""
    try:
        with KNNStore.open(home) as store:
            return store.verify()
    except KnnstoreError as error:
        return [str(error)]


ANSWERS = [
    *(("knnstore_documents", name) for name in ("domain_id", "external_id", "start", "stop")),
    *(("knnstore_documents", name) for name in ("content_hash", "metadata", "digest", "state")),
    *(("knnstore_document_tokens", name) for name in ("document_id", "tokens", "digest")),
    *(("knnstore_document_tags", name) for name in ("document_id", "tag")),
    ("knnstore_domains", "name"),
    *(("knnstore_settings", name) for name in ("scope", "domains", "payload", "digest")),
    *(("knnstore_store", name) for name in ("model_fingerprint", "tokenizer_fingerprint", "key", "dim")),
    *(("knnstore_store", name) for name in ("metric", "vocab_size", "max_length", "stride", "has_prefix")),
    *(("knnstore_store", name) for name in ("params", "digest")),
]


@pytest.mark.parametrize(("table", "column"), ANSWERS)
def test_an_altered_value_is_noticed(home: Path, table: str, column: str) -> None:
    if not alter(home, table, column):
        pytest.skip("the database refuses this change")
    found = problems(home)
    assert found
    assert all("\n" not in line for line in found)


BAD = {
    "no-utf-8": b"\xff\xfe", "no-json": "no json", "deep": "[" * 5000, "null": None, "float": 1e300,
    "negative": -1, "empty": "",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, id=name, marks=[] if name in ("no-utf-8", "negative") else pytest.mark.exhaustive)
        for name, value in BAD.items()
    ],
)
def test_what_cannot_be_a_value_is_one_line_everywhere(home: Path, value: object) -> None:
    content = (home / "catalog.db").read_bytes()
    for table, column in ANSWERS:
        with closing(sqlite3.connect(home / "catalog.db")) as database:
            database.execute("PRAGMA foreign_keys = OFF")
            written = "CAST(? AS TEXT)" if isinstance(value, bytes) and column != "tokens" else "?"
            try:
                database.execute(f'UPDATE {table} SET "{column}" = {written}', (value,))
                database.commit()
            except sqlite3.IntegrityError:
                continue
        if column != "has_prefix":  # every value is true or false
            assert problems(home), (table, column)
        for mode in ("r", "a"):
            with suppress(KnnstoreError), KNNStore.open(home, mode) as store:  # type: ignore[arg-type]
                for act in (
                    store.info,
                    store.documents,
                    store.domains,
                    store.settings,
                    partial(store.ngrams, Selection()),
                    partial(store.select, Selection(tags=("tag",), where="a exists")),
                ):
                    with suppress(KnnstoreError):
                        act()
        for end in ("", "-wal", "-shm"):
            (home / f"catalog.db{end}").unlink(missing_ok=True)
        (home / "catalog.db").write_bytes(content)


def test_a_damaged_document_is_named_not_used_and_can_be_removed(home: Path) -> None:
    assert alter(home, "knnstore_document_tokens", "tokens", where="document_id = 1")
    assert problems(home) == [
        "document 'first' of domain 'law' is damaged in the catalog: remove it and add it again"
    ]
    with KNNStore.open(home, "a") as store:
        first = store.view().document_rows(Selection(documents=("first",)))[0]
        with pytest.raises(CatalogError, match="tokens of a document are damaged"):
            store.tokens_by_number(first)
        store.remove_document("first")
        assert store.verify() == []
    assert problems(home) == []


def test_exchanged_tokens_are_noticed(home: Path) -> None:
    with closing(sqlite3.connect(home / "catalog.db")) as database, database:
        for number, row in ((9, 1), (1, 2), (2, 9)):
            database.execute(
                f"UPDATE knnstore_document_tokens SET document_id = {number + 100} "
                f"WHERE document_id = {row if row != 9 else 109}"
            )
        database.execute("UPDATE knnstore_document_tokens SET document_id = document_id - 100")
    assert len(problems(home)) == 2


def test_what_is_changed_on_purpose_is_sound_and_what_was_damaged_stays_named(home: Path) -> None:
    assert alter(home, "knnstore_documents", "content_hash", where="id = 1")
    with KNNStore.open(home, "a") as store:
        store.replace_metadata("law", {"first": ({"b": 1}, ["new"]), "second": ({1: [None, 0.1]}, [])})
        store.rename("law", {"second": "third"})
        store.retag("third", add=["x"])
        (problem,) = store.verify()
    assert "'first'" in problem


def test_damaged_settings_are_said_and_dropped(home: Path) -> None:
    assert alter(home, "knnstore_settings", "payload")
    (problem,) = problems(home)
    assert "calibrate --reset" in problem
    with KNNStore.open(home, "a") as store:
        with pytest.raises(CatalogError, match="the settings saved in the catalog are damaged"):
            store.settings()
        store.remove_document("first")
        assert store.settings() is None
        assert store.verify() == []


def test_damaged_settings_are_dropped_when_others_are_saved(home: Path) -> None:
    assert alter(home, "knnstore_settings", "payload")
    with KNNStore.open(home, "a") as store:
        store.save_settings(SavedSettings({"k": 9}), ["law"])
        assert store.verify() == []


def test_a_damaged_fingerprint_that_an_upgrade_found_is_said(tmp_path: Path) -> None:
    """The digest is of the damaged one, so the fingerprint is looked at itself."""
    for number, fingerprint in enumerate(("0" * 64 + ":%%%", "0" * 64 + ":AAAA", "0" * 64 + ":AA:")):
        identity = Identity("model", fingerprint, "0" * 64, "none", 1, "l2", 1000, 16, 8)
        KNNStore.create(tmp_path / str(number), identity, store="none").close()
        (problem,) = problems(tmp_path / str(number))
        assert "the model's fingerprint is invalid" in problem
