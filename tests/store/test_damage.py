"""A damaged part of the keys costs that part: all else is read and changed, and what is lost is named."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import tokens_from_ids
from knnstore.errors import CorruptDatastoreError, KnnstoreError
from knnstore.store import KNNStore, Selection

LOST = [("law", "1"), ("law", "3")]
KEPT = [("law", "2"), ("news", "a")]
ENGINES = {
    "faiss": {"index": "IVF2,Flat", "nprobe": 2},
    "hnswlib": {"exact_up_to": 0, "ef": 600},
}
FOLDER = object()
DAMAGES: dict[str, Callable[[bytes, bytes], bytes | object | None]] = {
    "missing": lambda content, other: None,
    "emptied": lambda content, other: b"",
    "cut": lambda content, other: content[:-1],
    "flipped": lambda content, other: content[:9] + bytes([content[9] ^ 4]) + content[10:],
    "another's": lambda content, other: other,
    "a folder": lambda content, other: FOLDER,
}


@pytest.fixture
def filled(home, identity, writer_of, engine):
    """A store whose parts overlap: one holds law 1 and 3, another law 2, a third news a; each is indexed."""
    with KNNStore.create(home, identity, store=engine, params=ENGINES[engine]) as store:
        writer = writer_of(store)
        for domain, id, n in (("law", "1", 150), ("news", "a", 300), ("law", "2", 300), ("law", "3", 150)):
            writer.add(domain, id, n=n)
        segments = store.datastore._segments
        segments._rewrite_and_publish([segment for segment in segments.snapshot() if segment.rows == 150])
        for segment in segments.snapshot():
            store.datastore._write_derived_files(segment, 300)
        assert store.verify() == []
    return writer


def damage(home: Path, kind: str, how: str) -> Path:
    """Damage a file of the segment that holds law 1 and 3; news a has a file of the same length."""
    content = json.loads((home / "keys" / "manifest.json").read_bytes())["content"]
    damaged, other = content["segments"][-1], content["segments"][0]
    names = [
        {"keys": entry["keys"], "ids": entry["ids"], "digests": {"name": entry["digests"]}}
        | {"index": entry["index"]["file"]}
        for entry in (damaged, other)
    ]
    path, others = (home / "keys" / entry[kind]["name"] for entry in names)
    changed = DAMAGES[how](path.read_bytes(), others.read_bytes())
    path.unlink()
    if changed is FOLDER:
        path.mkdir()
    elif isinstance(changed, bytes):
        path.write_bytes(changed)
    return path


def check_search(store: KNNStore, writer, members: list[tuple[str, str]], **chosen: tuple[str, ...]) -> None:
    """Every neighbor is the true one of these documents."""
    keys = np.concatenate([writer.keys[member] for member in members])
    tokens = np.concatenate([writer.tokens[member] for member in members])
    query = keys[:2] + np.float32(0.01)
    distances = ((keys.astype(np.float64) - query[:, None]) ** 2).sum(axis=2)
    nearest = np.argsort(distances, axis=1)[:, :20]
    found = store.search(query, 20, Selection(**chosen))
    assert tokens_from_ids(found.ids).tolist() == tokens[nearest].tolist()
    assert found.distances == pytest.approx(np.take_along_axis(distances, nearest, axis=1), rel=1e-3)


def named_in(problems: list[str]) -> list[tuple[str, str]]:
    """The documents that lines of `verify` name."""
    return sorted((p.split("'")[3], p.split("'")[1]) for p in problems if p.startswith("document "))


@pytest.mark.parametrize(
    ("engine", "kind", "how"),
    [
        ("faiss", "keys", "flipped"),
        ("faiss", "ids", "missing"),
        ("hnswlib", "keys", "flipped"),
        *(pytest.param("faiss", "keys", how, marks=pytest.mark.slow) for how in DAMAGES if how != "flipped"),
        *(pytest.param("faiss", "ids", how, marks=pytest.mark.slow) for how in ("flipped", "a folder")),
        pytest.param("hnswlib", "ids", "another's", marks=pytest.mark.slow),
    ],
)
def test_lost_records_cost_their_documents(filled, home, engine, kind, how, caplog) -> None:
    path = damage(home, kind, how)
    # Graphs are built by chance; with more candidates than records a search finds all.
    params = {"ef": 1024} if engine == "hnswlib" else None
    with KNNStore.open(home, params=params) as reader:
        check_search(reader, filled, [("news", "a")], domains=("news",))
        if engine == "hnswlib" and kind == "keys":
            check_search(reader, filled, KEPT + LOST)  # a graph has keys of its own
            reader.verify()
        for _ in range(2):
            check_search(reader, filled, KEPT)
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert path.name in warning
        assert "300 records" in warning
        with pytest.raises(CorruptDatastoreError):
            reader.search(filled.keys["law", "1"], 1, Selection(documents=("1", "3")))
        first, *others = reader.verify()
        assert path.name in first
        assert named_in(others) == LOST
        assert len(others) == 2
    with KNNStore.open(home, "a") as store:
        with pytest.raises(CorruptDatastoreError, match=r"'1' of domain 'law', '3' of domain 'law'"):
            store.move("faiss", "elsewhere")
        store.abandon_move()
        assert named_in(store.repair()) == LOST
        store.remove_document("1")
        store.optimize()
    with KNNStore.open(home, "a") as store:
        check_search(store, filled, KEPT)
        assert named_in(store.verify()) == LOST[1:]
        store.remove_document("2")
        filled.store = store
        filled.add("law", "2", n=300)
        store.remove_document("3")
        filled.add("law", "1", n=150)
        filled.add("law", "3", n=150)
        assert store.verify() == []
        assert not store.datastore._segments._damaged_segments, "what is given up is still looked for"  # type: ignore[attr-defined]
        check_search(store, filled, KEPT + LOST)
        store.optimize()
        assert store.move("faiss", "elsewhere").records == 900
    with KNNStore.open(home) as reader:
        assert reader.verify() == []
        assert not path.exists()


@pytest.mark.parametrize("engine", ["faiss"])
def test_removing_the_domain_mends_too(filled, home) -> None:
    damage(home, "ids", "flipped")
    with KNNStore.open(home, "a") as store:
        store.remove_domain("law")
        assert store.verify() == []
        check_search(store, filled, [("news", "a")])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"])
@pytest.mark.parametrize("kind", ["keys", "ids"])
def test_what_comes_back_from_a_backup_is_used_again(filled, home, kind) -> None:
    """Nothing is given up while a document needs it, also where nobody knows which records went."""
    saved = {path: path.read_bytes() for path in (home / "keys" / "segments").iterdir()}
    path = damage(home, kind, "missing")
    with KNNStore.open(home, "a") as store:
        store.optimize()
        store.repair()
        store.remove_document("3")
        (line,) = store.erase().unreached
        assert str(path) in line
        filled.store = store
        filled.add("law", "4")
    path.write_bytes(saved[path])
    if kind == "ids":
        with KNNStore.open(home, "a") as store:
            assert store.repair() == []  # those of the document that was removed go now
    with KNNStore.open(home) as reader:
        assert reader.verify() == []
        check_search(reader, filled, [*KEPT, ("law", "1"), ("law", "4")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind", "how"),
    [
        *(("faiss", "index", how) for how in DAMAGES),
        *(("faiss", "digests", how) for how in ("missing", "flipped", "a folder")),
        ("hnswlib", "index", "cut"),
        ("hnswlib", "index", "another's"),
    ],
)
def test_what_is_derived_is_made_anew_without_being_asked(filled, home, kind, how) -> None:
    path = damage(home, kind, how)
    with KNNStore.open(home) as reader:
        check_search(reader, filled, KEPT + LOST)
        (problem,) = reader.verify()
        assert path.name in problem
        assert "derived" in problem
        assert "backup" not in problem
    with KNNStore.open(home, "a") as store:
        assert store.repair() == []
    with KNNStore.open(home) as reader:
        check_search(reader, filled, KEPT + LOST)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"])
@pytest.mark.parametrize("name", ["keys/manifest.json", "knnstore.json", "move.json", "catalog.db"])
def test_a_folder_in_place_of_what_a_store_hangs_on_is_named(filled, home, name) -> None:
    (home / name).unlink(missing_ok=True)
    (home / name).mkdir()
    for mode in ("r", "a"):
        with pytest.raises(KnnstoreError, match=rf"{name}.* (is damaged|is not a file)"):
            KNNStore.open(home, mode)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"])
@pytest.mark.parametrize("name", ["keys/manifest.json", "keys/owner", "knnstore.json"])
def test_a_size_that_no_file_of_a_store_has_is_not_read(filled, home, name) -> None:
    os.truncate(home / name, 1 << 40)
    for mode in ("r", "a"):
        with pytest.raises(KnnstoreError, match=rf"{name}.*(damaged|too large)"):
            KNNStore.open(home, mode)


@pytest.mark.parametrize("engine", ["faiss"])
@pytest.mark.parametrize("written", [0, -1, 1.5, "x", None])
def test_a_format_that_is_none_is_no_newer_one(filled, home, written) -> None:
    file = home / "knnstore.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": written}))
    with pytest.raises(KnnstoreError, match=r"knnstore\.json is damaged: it has no valid format number"):
        KNNStore.open(home)


@pytest.mark.parametrize("engine", ["faiss"])
def test_a_pipe_among_the_keys_keeps_nobody_waiting(filled, home) -> None:
    (home / "keys" / "owner").unlink()
    os.mkfifo(home / "keys" / "owner")
    for mode in ("r", "a"):
        with pytest.raises(KnnstoreError, match=r"owner"):
            KNNStore.open(home, mode)


@pytest.mark.parametrize("engine", ["faiss"])
def test_what_somebody_put_into_a_folder_in_place_of_keys_stays(filled, home) -> None:
    path = damage(home, "keys", "a folder")
    (path / "theirs").write_text("kept")
    with KNNStore.open(home, "a") as store:
        store.remove_domain("law")
        assert store.verify() == []
    assert (path / "theirs").read_text() == "kept"


def test_what_the_database_says_of_a_damaged_catalog_is_one_line_each(store, writer, home) -> None:
    writer.add("law", "1")
    store.close()
    content = bytearray((home / "catalog.db").read_bytes())
    content[35] = 93  # of the list of free pages, where there are none
    (home / "catalog.db").write_bytes(content)
    with KNNStore.open(home) as reader:
        problems = reader.verify()
    assert problems
    assert all(line.startswith("the catalog is damaged") and "\n" not in line for line in problems)
