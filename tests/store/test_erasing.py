"""Erasing: no byte of what was removed is left in any file, with every engine and on both databases."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from knnstore_qdrant import QdrantDatastore
from sqlalchemy import create_engine, text

from knnstore import Progress, failpoints
from knnstore.catalog import Identity, NewDocument, connection
from knnstore.catalog import vacuum as vacuuming
from knnstore.datastore import record_ids
from knnstore.errors import StoreUnavailableError
from knnstore.store import KNNStore

DIM = 8
TOKENS = 200  # of a document
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1 << 20, 16, 8)
FIRST_POSITION = 0x5A_3C7E_19D2  # so that the eight bytes of an id are like nothing else
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "cells": ("cells", {"cells": 4}),
    "exact": ("faiss", {"index": "exact"}),
    "inverted files": ("faiss", {"index": "IVF4,SQ8"}),
    "graphs": ("hnswlib", {"exact_up_to": 100}),
}

Needles = dict[str, list[bytes]]


def document(name: str, domain: str) -> NewDocument:
    """A document like no other: its tokens and keys follow from its name."""
    rng = np.random.default_rng(list(name.encode()))
    tokens = rng.integers(1 << 12, 1 << 20, TOKENS).astype(np.uint32)
    return NewDocument(
        f"id-{name}", domain, f"{rng.bytes(32).hex()}", tokens,
        {"title": f"title-{name}"}, frozenset({f"tag-{name}"}),
    )  # fmt: skip


def keys_of(new: NewDocument) -> np.ndarray:
    rng = np.random.default_rng(list(new.id.encode()))
    return rng.standard_normal((len(new.tokens), DIM)).astype(np.float16).astype(np.float32)


def add(store: KNNStore, *names: str, domain: str = "law") -> None:
    new = [document(name, domain) for name in names]
    with store.ingest(new) as group:
        for at, one in enumerate(new):
            n = len(one.tokens)
            group.add(np.full(n, at), np.arange(n), one.tokens.astype(np.int64), keys_of(one))


def make(home: Path, engine: str, params: dict[str, Any], **more: Any) -> KNNStore:
    store = KNNStore.create(home, IDENTITY, store=engine, params=params, **more)
    with store._catalog.sql.begin() as connection:
        connection.execute(text(f"UPDATE knnstore_store SET next_position = {FIRST_POSITION}"))
    return store


def needles(store: KNNStore, *names: str) -> Needles:
    """What nobody may find of some documents: ids of eight bytes or packed, tokens, keys in both precisions,
    texts."""
    snapshot = store.view().snapshot
    starts = dict(zip(snapshot.rows.tolist(), snapshot.starts.tolist(), strict=True))
    result: Needles = {kind: [] for kind in ("ids", "packed", "tokens", "single keys", "half keys", "text")}
    for name in names:
        (found,) = [one for one in store.documents() if one.id == f"id-{name}"]
        new, keys = document(name, found.domain), keys_of(document(name, found.domain))
        ids = record_ids(starts[store._catalog.rows(id=new.id)[0]] + np.arange(TOKENS), new.tokens)
        for row in range(0, TOKENS, 23):
            result["ids"].append(ids[row].tobytes())
            result["packed"].append(new.tokens[row : row + 6].astype(np.uint16).tobytes())
            result["tokens"].append(new.tokens[row : row + 3].tobytes())
            result["single keys"].append(keys[row, :4].tobytes())
            result["half keys"].append(keys[row, :5].astype(np.float16).tobytes())
        texts = (new.id, new.content_hash, f"title-{name}", f"tag-{name}")
        result["text"] += [text.encode() for text in texts]
    return result


def seen(needles: Needles, *folders: Path) -> dict[str, set[str]]:
    """In which files each kind of needle is."""
    result: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            content = path.read_bytes().replace(bytes(1 << 12), b"") if path.is_file() else b""
            for kind, some in needles.items():
                if any(needle in content for needle in some):
                    result.setdefault(kind, set()).add(str(path.relative_to(folder)))
    return result


def is_whole(store: KNNStore, *names: str) -> None:
    """The store holds just these documents, and finds each of their keys."""
    assert store.verify() == []
    assert sorted(one.id for one in store.documents()) == sorted(f"id-{name}" for name in names)
    for name in names:
        found = store.search(keys_of(document(name, "law"))[:5], 1)
        assert np.allclose(found.distances, 0, atol=1e-5)


@pytest.mark.parametrize(
    "engine",
    [one if one == next(iter(ENGINES)) else pytest.param(one, marks=pytest.mark.slow) for one in ENGINES],
)
def test_no_byte_of_what_was_removed_is_left(tmp_path: Path, engine: str) -> None:
    pytest.importorskip({"cells": "torch"}.get(ENGINES[engine][0], ENGINES[engine][0]))
    home = tmp_path / "home"
    with make(home, *ENGINES[engine]) as store:
        add(store, "a", "b", "c", "d")
        add(store, "e", "f", domain="news")
        store.optimize()
        gone, kept = needles(store, "b", "d", "e", "f"), needles(store, "a")
        store.remove_document("id-b")
        add(store, "g")
        store.remove_document("id-d")
        store.remove_domain("news")
        assert {"packed", "half keys"} <= seen(gone, home).keys()  # removing alone leaves them
        erased = store.erase()
        assert seen(gone, home) == {}
        assert seen(kept, home).keys() >= {"packed", "tokens", "half keys", "text"}
        assert erased.unreached == ()
        assert erased.records == 3 * TOKENS
        is_whole(store, "a", "c", "g")
        store.erase()  # there is nothing to do
    assert seen(gone, home) == {}
    with KNNStore.open(home) as reader:
        is_whole(reader, "a", "c", "g")


def test_codes_of_removed_keys_are_not_in_the_index(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    home = tmp_path / "home"
    with make(home, *ENGINES["inverted files"]) as store:
        add(store, "a", "b", "c", "d")
        store.optimize()
        (file,) = (home / "keys" / "indexes").iterdir()
        index = faiss.read_index(str(file))
        gone = set(range(TOKENS, 2 * TOKENS))  # rows of b
        codes = []
        for number in range(index.nlist):
            size = index.invlists.list_size(number)
            rows = faiss.rev_swig_ptr(index.invlists.get_ids(number), size).tolist()
            found = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * DIM).reshape(size, DIM)
            codes += [code.tobytes() for row, code in zip(rows, found, strict=True) if row in gone]
        assert len(codes) == TOKENS
        assert seen({"codes": codes}, home)
        store.remove_document("id-b")
        store.erase()
        assert seen({"codes": codes}, home) == {}
        assert list((home / "keys" / "indexes").iterdir())


PLACES = {"segments.manifest.renamed", "segments.file.unlink", "catalog.vacuum.after"}
"""Failpoints of each kind: names, files and the database."""


@pytest.mark.parametrize("are_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_erasing_is_finished_by_the_next(
    tmp_path: Path, killed_at: Callable[..., bool], are_all: bool
) -> None:
    home = tmp_path / "home"
    with make(home, *ENGINES["exact"]) as store:
        add(store, "a", "b")
        add(store, "c", domain="news")
        gone = needles(store, "b")
        store.remove_document("id-b")

    def erase(home: Path) -> None:
        with KNNStore.open(home, "a") as opened:
            opened.erase()

    passed = failpoints.record()
    try:
        erase(shutil.copytree(home, tmp_path / "copy"))
    finally:
        failpoints._recorded = None
    assert set(passed) >= PLACES
    for place in sorted(set(passed) if are_all else PLACES):
        again = shutil.copytree(home, tmp_path / place)
        assert killed_at(place, partial(erase, again))
        with KNNStore.open(again, "a") as store:
            is_whole(store, "a", "c")
            store.erase()
            is_whole(store, "a", "c")
        assert seen(gone, again) == {}


def test_a_move_that_is_unfinished_holds_nothing_back(tmp_path: Path) -> None:
    home, said = tmp_path / "home", Said()
    with make(home, "faiss", {}) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        with pytest.raises(ZeroDivisionError):
            store.move("faiss", "elsewhere", progress=Fails())
        store.remove_document("id-b")
        assert "elsewhere" in str(seen(gone, home))
        assert store.erase(progress=said).unreached == ()
        is_whole(store, "a")
    assert "deleting what a move has left behind: faiss at elsewhere" in said.lines
    assert seen(gone, home) == {}


def test_records_of_no_document_are_erased_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with make(home, "faiss", {}) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        left = [np.concatenate(column) for column in zip(*store.datastore.iterate(), strict=True)]
        store.remove_document("id-b")
        store.datastore.add(*left)  # as an engine does that came back without the last removals
        store.datastore.flush()
        store.erase()
        is_whole(store, "a")
    assert seen(gone, home) == {}


def test_a_removal_that_was_left_half_done_is_finished_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with make(home, "faiss", {}) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        writing = store._changes
        assert writing
        writing.writer.mark_as_deleting(store._catalog.rows(id="id-b"))  # the rest found no room
        store.erase()
        is_whole(store, "a")
        assert seen(gone, home) == {}


def test_keys_that_a_move_has_just_switched_to_are_not_taken_for_its_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path / "home", "faiss", {}) as store:
        add(store, "a")
        writing = store._changes
        assert writing
        move = writing.writer.switch_engine

        def answer_lost(*arguments: Any) -> None:
            move(*arguments)
            raise StoreUnavailableError("the connection broke")

        monkeypatch.setattr(writing.writer, "switch_engine", answer_lost)
        with pytest.raises(StoreUnavailableError):
            store.move("faiss", "elsewhere")
        store.erase()
        assert store.engine.location == "elsewhere"
        is_whole(store, "a")


class Said(Progress):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


class Fails(Progress):
    """Ends a move when all is copied, before it is compared."""

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        if "compar" in title or "check" in title:
            raise ZeroDivisionError


def test_a_reader_without_end_is_named_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SECONDS_TO_WAIT", 0.3)
    home = tmp_path / "home"
    with make(home, "faiss", {}) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        with closing(sqlite3.connect(home / "catalog.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM knnstore_documents").fetchall()
            store.remove_document("id-b")
            with pytest.raises(
                StoreUnavailableError, match=r"keeps reading .*catalog\.db, so .*then erase again"
            ):
                store.erase()
        store.erase()
        is_whole(store, "a")
        assert seen(gone, home) == {}


def test_zeros_are_written_over_what_is_deleted(tmp_path: Path) -> None:
    with make(tmp_path / "home", "faiss", {}) as store, store._catalog.sql.connect() as connection:
        assert connection.scalar(text("PRAGMA secure_delete")) == 1


def test_an_adapter_that_cannot_erase_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "datastore" / "stranger")
    with make(tmp_path / "home", "stranger", {}) as store:
        add(store, "a", "b")
        store.remove_document("id-b")
        (line,) = store.erase().unreached
        assert line == "the keys: the adapter stranger can neither rewrite nor erase them"
        is_whole(store, "a")


class TestOnPostgresql:
    """The server's own files are looked through: tables, free space, statistics and log."""

    @pytest.fixture
    def server(self, own_postgres: Any) -> Any:
        own_postgres.execute("postgres", "ALTER SYSTEM SET wal_recycle = off")
        own_postgres.execute("postgres", "SELECT pg_reload_conf()")
        return own_postgres

    @pytest.fixture
    def gone(self, server: Any, tmp_path: Path) -> Needles:
        """A store in `home` from which a document was removed."""
        url = server.new_database().render_as_string(hide_password=False)
        with make(tmp_path / "home", "faiss", {}, catalog=url) as store:
            add(store, "a", "b", *(f"more-{number}" for number in range(30)))
            with store._catalog.sql.begin() as connection:
                connection.execute(text("ANALYZE"))  # as the server does now and then
            gone = needles(store, "b")
            store.remove_document("id-b")
        return gone

    @pytest.mark.slow
    def test_no_byte_is_left(self, server: Any, gone: Needles, tmp_path: Path) -> None:
        server.execute("postgres", "CHECKPOINT")
        before = seen(gone, server.folder / "data")
        assert {"tokens", "text"} <= before.keys()
        assert any("pg_wal" in place for place in before["tokens"])
        assert any("base" in place for place in before["tokens"])
        with KNNStore.open(tmp_path / "home", "a") as store:
            assert store.erase().unreached == ()
            server.execute("postgres", "CHECKPOINT")  # what the server unlinks is unlinked
            assert seen(gone, server.folder, tmp_path) == {}
            is_whole(store, "a", *(f"more-{number}" for number in range(30)))

    @pytest.mark.slow
    def test_a_log_that_is_recycled_is_named(self, server: Any, gone: Needles, tmp_path: Path) -> None:
        server.execute("postgres", "ALTER SYSTEM RESET wal_recycle")
        server.execute("postgres", "SELECT pg_reload_conf()")
        with KNNStore.open(tmp_path / "home", "a") as store:
            (line,) = store.erase().unreached
        assert "wal_recycle = on" in line
        assert {Path(place).parts[1] for place in seen(gone, server.folder).get("tokens", ())} <= {"pg_wal"}

    def test_an_open_transaction_is_named(
        self, server: Any, gone: Needles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vacuuming, "SECONDS_TO_WAIT", 0)
        with KNNStore.open(tmp_path / "home", "a") as store:
            store.remove_document("id-more-3")
            add(store, "more-3")
            engine = create_engine(store.home.catalog_url, isolation_level="REPEATABLE READ")
            with engine.connect() as reader:
                reader.execute(text("SELECT 1 FROM pg_class"))
                store.remove_document("id-a")
                unreached = store.erase().unreached
            engine.dispose()
            assert any(
                "dead rows of knnstore_document_tokens, which an open transaction" in line
                for line in unreached
            )
            assert store.erase().unreached == ()


@pytest.mark.slow
def test_old_keys_that_could_not_be_erased_are_named(
    tmp_path: Path, qdrant_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailableError("nobody answers")

    home = tmp_path / "home"
    place, params = {"location": qdrant_server.url}, {"grpc_port": qdrant_server.grpc_port}
    with make(home, "qdrant", params, **place) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        store.remove_document("id-b")
        with monkeypatch.context() as broken:
            broken.setattr(QdrantDatastore, "erase", fail)
            unreached = store.erase().unreached
        assert (
            f"qdrant at {qdrant_server.url}: nobody answers; the next command that writes tries again"
            in unreached
        )
    with KNNStore.open(home, "a") as store:
        is_whole(store, "a")
    assert seen(gone, tmp_path) == {}


@pytest.mark.slow
def test_on_a_server_of_qdrant_the_collection_is_another(tmp_path: Path, qdrant_server: Any) -> None:
    place = {"location": qdrant_server.url}
    params = {"grpc_port": qdrant_server.grpc_port}
    with make(tmp_path / "home", "qdrant", params, **place) as store:
        add(store, "a", "b")
        gone = needles(store, "b")
        store.remove_document("id-b")
        (line,) = store.erase().unreached
        assert line == f"snapshots and backups that the server at {qdrant_server.url} keeps"
        assert store.engine.params["collection"] == "knnstore-2"
        assert seen(gone, tmp_path) == {}
        is_whole(store, "a")
        store.erase()
        assert store.engine.params["collection"] == "knnstore-3"  # the second was in use
