"""Whose keys these are: what a copied home, another store and a forged note of a move cannot do to them."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from knnstore.cli import app
from knnstore.datastore import registry
from knnstore.errors import CorruptDatastoreError, KnnstoreError
from knnstore.store import KNNStore


@pytest.fixture(params=["faiss", pytest.param("server", marks=pytest.mark.slow)])
def outside(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where to make a store whose keys are outside its home."""
    if request.param == "server":
        return {"store": "qdrant", "location": request.getfixturevalue("qdrant_server").url}
    pytest.importorskip(request.param)
    return {"store": request.param, "location": str(tmp_path / "keys")}


@pytest.fixture
def original(home: Path, identity, outside, writer_of) -> Path:
    """The home of a store with one document."""
    with KNNStore.create(home, identity, **outside) as store:
        put(store, "1", writer_of)
    return home


def copy_of(home: Path) -> Path:
    return shutil.copytree(home, home.with_name("copy"))


def listed(home: Path) -> list[str]:
    """The documents of a store in which nothing is wrong."""
    with KNNStore.open(home) as store:
        assert store.verify() == []
        return [document.id for document in store.documents()]


def add(home: Path, id: str, writer_of: Callable) -> None:
    with KNNStore.open(home, "a") as store:
        put(store, id, writer_of)


def put(store: KNNStore, id: str, writer_of: Callable) -> None:
    """Add a document that is like no other."""
    writer = writer_of(store)
    writer.rng = np.random.default_rng(list(id.encode()))
    writer.add("law", id)


def refused(act: Callable[[], object], *parts: str) -> None:
    """It is refused in one line that says all this."""
    with pytest.raises(KnnstoreError) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copied_home_reads_and_leaves_the_keys_alone(original, outside, writer_of) -> None:
    copy = copy_of(original)
    assert listed(copy) == ["1"]
    keys = Path(outside["location"])
    before = files(keys)
    said = "repair --take-over", "knnstore move", str(original / "catalog.db"), str(copy / "catalog.db")
    refused(lambda: KNNStore.open(copy, "a"), *said)
    with KNNStore.open(copy, "a", copied=True) as store:
        for change in (
            lambda: store.remove_document("1"),
            store.repair,
            lambda: put(store, "2", writer_of),
            store.optimize,
        ):
            refused(change, *said)
    assert files(keys) == before
    add(original, "2", writer_of)
    assert listed(original) == ["1", "2"]
    with KNNStore.open(copy) as store:
        assert [document.id for document in store.documents()] == ["1"]


@pytest.mark.slow
def test_a_copy_may_take_the_keys_over(original, writer_of, killed_at) -> None:
    assert killed_at("catalog.publish.before", lambda: add(original, "half added", writer_of))
    copy = copy_of(original)
    add(original, "of the original alone", writer_of)
    with KNNStore.open(copy, "a", copied=True) as store:
        assert store.repair(take_over=True) == []
        put(store, "2", writer_of)
    add(copy, "3", writer_of)
    assert listed(copy) == ["1", "2", "3"]
    refused(lambda: KNNStore.open(original, "a"), "repair --take-over", str(copy / "catalog.db"))
    with KNNStore.open(original, "a", copied=True) as store:
        problems = store.repair(take_over=True)
    assert len(problems) == 1
    assert "'of the original alone' of domain 'law' has lost or wrong records" in problems[0]


@pytest.mark.slow
def test_a_copy_may_have_keys_of_its_own(original, outside, writer_of) -> None:
    copy = copy_of(original)
    add(original, "2", writer_of)  # at the positions that the copy gives next
    with KNNStore.open(copy, "a", copied=True) as store:
        moved = store.move("faiss", "own")
        assert "the keys belong to another store or copy" in str(moved.left)
        put(store, "3", writer_of)
    assert listed(copy) == ["1", "3"]
    assert not (copy / "move.json").exists()
    add(copy, "4", writer_of)
    shutil.rmtree(copy)
    add(original, "5", writer_of)
    assert listed(original) == ["1", "2", "5"]


def test_a_renamed_home_writes_on(original, writer_of) -> None:
    renamed = original.rename(original.with_name("renamed"))
    add(renamed, "2", writer_of)
    assert listed(renamed) == ["1", "2"]


def test_keys_in_a_home_are_copied_with_it(store, home, writer_of, monkeypatch) -> None:
    """However the homes are named."""
    put(store, "1", writer_of)
    store.close()
    monkeypatch.chdir(home.parent)
    for named in (Path(home.name), home):
        add(named, f"{len(named.parts)}", writer_of)
        copy = copy_of(home)
        add(Path(copy.name), "copy", writer_of)
        add(copy, "whole", writer_of)
        assert {*listed(copy)} == {*listed(home), "copy", "whole"}
        shutil.rmtree(copy)


@pytest.mark.slow
def test_keys_of_another_store_are_neither_read_nor_written(original, outside, identity, writer_of) -> None:
    registry.load_adapter(outside["store"]).erase(outside["location"])
    other = original.with_name("other")
    with KNNStore.create(other, identity, **outside) as store:
        put(store, "2", writer_of)
    for act in (
        lambda: KNNStore.open(original),
        lambda: KNNStore.open(original, "a"),
        lambda: KNNStore.open(original, "a", copied=True),
    ):
        refused(act, "belong to another store")
    assert listed(other) == ["2"]


def forget_owner(keys: Path) -> None:
    (keys / "owner").unlink()


@pytest.mark.parametrize("outside", ["faiss"], indirect=True)
def test_keys_outside_that_nobody_claimed_need_a_take_over(original, outside, writer_of) -> None:
    """Nothing tells the original from its copy."""
    keys, copy = Path(outside["location"]), copy_of(original)
    forget_owner(keys)
    for home in (copy, original):
        assert listed(home) == ["1"]
        refused(
            lambda home=home: KNNStore.open(home, "a"),
            "they are not marked as the keys of",
            "repair --take-over",
        )
    assert not (keys / "owner").exists(), "reading claimed the keys"
    take_over(original)
    add(original, "2", writer_of)
    refused(lambda: KNNStore.open(copy, "a"), str(original))


def take_over(home: Path) -> None:
    with KNNStore.open(home, "a", copied=True) as store:
        assert store.repair(take_over=True) == []


@pytest.mark.parametrize("outside", ["faiss"], indirect=True)
def test_keys_that_another_store_has_just_claimed_stay_its_own(original, outside, monkeypatch) -> None:
    keys, adapter = Path(outside["location"]), registry.load_adapter("faiss")
    opening = adapter.open

    def overtaken(location: str, **options: object) -> object:
        if options["mode"] == "a":  # after the look whose they are, before the lock
            adapter.claim(location, "another")
        return opening(location, **options)

    monkeypatch.setattr(adapter, "open", overtaken)
    refused(lambda: KNNStore.open(original, "a"), "belong to another store")
    assert adapter.owner(keys) == "another"


@pytest.mark.parametrize("outside", ["faiss"], indirect=True)
def test_a_damaged_owner_is_named_and_keeps_from_writing_alone(original, outside, writer_of) -> None:
    owner = Path(outside["location"]) / "owner"
    content = bytearray(owner.read_bytes())
    content[70] ^= 1
    owner.write_bytes(content)
    with KNNStore.open(original) as store:
        (problem,) = store.verify()
    assert problem.startswith(f"{owner}, which names the store that owns the keys, is damaged")
    with pytest.raises(CorruptDatastoreError, match="remove it if"):
        KNNStore.open(original, "a")
    owner.unlink()
    take_over(original)
    add(original, "2", writer_of)
    assert listed(original) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outside", "forged", "claimed"),
    [("faiss", False, True), ("faiss", True, True), ("faiss", True, False), ("server", True, True)],
    indirect=["outside"],
)
def test_a_move_that_names_another_s_keys_erases_nothing(
    original, outside, identity, writer_of, tmp_path, forged, claimed
) -> None:
    """Not even those of an older knnstore, which nobody has claimed."""
    if not claimed:
        forget_owner(Path(outside["location"]))
    victim = tmp_path / "victim"
    shutil.move(original, victim)
    mine = original
    with KNNStore.create(mine, identity) as store:
        put(store, "mine", writer_of)
        engine = {"adapter": "faiss", "location": "keys", "params": {}}
        theirs = {"adapter": outside["store"], "location": outside["location"], "params": {}}
        store_id = store._catalog.store_id if forged else "0" * 32
    for source, target in ((engine, theirs), (theirs, engine)):  # half-way, and switched
        plan = {"store_id": store_id, "source": source, "target": target, "made": True}
        for act in (
            lambda store: None,
            lambda store: store.abandon_move(),
            lambda store: store.move("faiss", "elsewhere"),
            lambda store: store.move(outside["store"], outside["location"]),
        ):
            (mine / "move.json").write_text(json.dumps(plan))
            with KNNStore.open(mine, "a") as store:
                with suppress(KnnstoreError):
                    act(store)
                if store.engine.location != "keys":
                    (mine / "move.json").unlink(missing_ok=True)
                    store.move("faiss", "keys")
            assert listed(victim) == ["1"], "another store's keys were taken"
            if not forged:
                refused(lambda: KNNStore.open(mine).info(), "move.json belongs to another store")
            (mine / "move.json").unlink(missing_ok=True)
    assert listed(mine) == ["mine"]
    if not claimed:
        take_over(victim)
    add(victim, "2", writer_of)


def test_keys_of_another_store_that_is_empty_are_not_moved_into(home, identity, writer_of, tmp_path) -> None:
    victim, keys = tmp_path / "victim", str(tmp_path / "keys")
    KNNStore.create(victim, identity, location=keys).close()
    with KNNStore.create(home, identity) as store:
        put(store, "mine", writer_of)
        source, target = ({"adapter": "faiss", "location": at, "params": {}} for at in ("keys", keys))
        plan = {"store_id": store._catalog.store_id, "source": source, "target": target, "made": True}
        (home / "move.json").write_text(json.dumps(plan))
        refused(lambda: store.move("faiss", keys), "already at", keys)
        assert store.engine.location == "keys"
    add(victim, "1", writer_of)
    assert (listed(home), listed(victim)) == (["mine"], ["1"])


@pytest.mark.slow
@pytest.mark.parametrize("outside", ["server"], indirect=True)
def test_homes_of_one_catalog_write_in_turn_and_its_copy_does_not(
    home, identity, outside, postgres, writer_of
) -> None:
    url = postgres.new_database()
    with KNNStore.create(home, identity, catalog=url.render_as_string(), **outside) as store:
        put(store, "1", writer_of)
    second = copy_of(home)
    add(second, "2", writer_of)
    add(home, "3", writer_of)
    assert listed(second) == ["1", "2", "3"]
    postgres.execute("postgres", f"CREATE DATABASE restored TEMPLATE {url.database}")
    description = json.loads((second / "knnstore.json").read_text())
    description["catalog"] = url.set(database="restored").render_as_string()
    (second / "knnstore.json").write_text(json.dumps(description))
    refused(lambda: KNNStore.open(second, "a"), "take-over", url.database, "restored")
    add(home, "4", writer_of)
    with KNNStore.open(home, "a") as store:
        store.remove_document("4")
    postgres.drop(url)
    with KNNStore.open(second, "a", copied=True) as store:
        assert store.repair(take_over=True) == []
    assert listed(second) == ["1", "2", "3"]


@pytest.mark.parametrize("outside", ["faiss"], indirect=True)
def test_half_erased_keys_are_still_known(original, outside, identity, killed_at) -> None:
    adapter, keys = registry.load_adapter("faiss"), Path(outside["location"])
    owner = adapter.owner(keys)
    for number in range(1, 100):
        if not killed_at(f"segments.file.unlink:{number}", lambda: adapter.erase(keys)):
            break
        assert adapter.owner(keys) == owner or not any(keys.iterdir())
    assert number > 5
    assert not keys.exists()


@pytest.mark.parametrize("outside", ["faiss"], indirect=True)
def test_the_command_line_says_what_to_do_and_does_it(original) -> None:
    copy = str(copy_of(original))

    def call(*line: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, [*line, "--home", copy])
        return done.exit_code, done.stdout, done.stderr

    status, out, error = call("remove", "--document", "1")
    assert (status, out, error.count("\n")) == (1, "", 1)
    assert "knnstore repair --take-over" in error
    assert listed(original) == ["1"]
    assert call("repair", "--take-over") == (0, "sound: 20 records\n", "")
    assert call("remove", "--document", "1")[0] == 0
