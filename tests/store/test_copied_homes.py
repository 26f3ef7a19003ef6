"""A copy of a home, or another home with its store id, that leads to the original's keys cannot change them.

The keys of the original are inside its home. The copy reaches them by a link, by its catalog, by a mount or
by hard links, and each command that writes is tried on it.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import registry
from knnstore.errors import KnnstoreError, NotOwnerError
from knnstore.store import KNNStore

ENGINES = {"cells": "faiss", "faiss": "faiss", "hnswlib": "hnswlib"}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(ENGINES[request.param])
    return request.param


def put(store: KNNStore, id: str, writer_of: Callable) -> None:
    writer = writer_of(store)
    writer.rng = np.random.default_rng(list(id.encode()))
    writer.add("law", id)


@pytest.fixture
def victim(tmp_path: Path, identity, writer_of, engine) -> Path:
    home = tmp_path / "victim"
    with KNNStore.create(home, identity, store=engine) as store:
        put(store, "1", writer_of)
        put(store, "2", writer_of)
    return home


def sql(home: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(home / "catalog.db")) as database, database:
        database.execute(statement, values)


def forget_database(keys: Path) -> None:
    """Leave the claim that an older knnstore wrote for keys inside a home: the store's id alone."""
    from knnstore.datastore import read_owner, write_owner

    write_owner(keys, str(read_owner(keys)).split(" ")[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_without_keys(victim: Path) -> Path:
    copy = shutil.copytree(victim, victim.with_name("copy"))
    shutil.rmtree(copy / "keys")
    return copy


def linked(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    (copy / "keys").symlink_to(Path("..") / victim.name / "keys")
    return copy


def linked_absolutely(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    (copy / "keys").symlink_to(victim / "keys")
    return copy


def linked_twice(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    victim.with_name("between").symlink_to(victim / "keys")
    (copy / "keys").symlink_to(victim.with_name("between"))
    return copy


def linked_parent(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    (copy / "inner").symlink_to(victim)
    sql(copy, "UPDATE knnstore_store SET location = 'inner/keys'")
    return copy


def located(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    sql(copy, "UPDATE knnstore_store SET location = ?", str(victim / "keys"))
    return copy


def located_relatively(victim: Path) -> Path:
    copy = copy_without_keys(victim)
    (copy / "keys").mkdir()
    sql(copy, "UPDATE knnstore_store SET location = ?", f"keys/../../{victim.name}/keys")
    return copy


def another_with_its_id(victim: Path) -> Path:
    """A home made apart, then given the id and the documents of the original."""
    with KNNStore.open(victim) as store:
        identity, engine, store_id = store.identity, store.engine.adapter, store._catalog.store_id
    other = victim.with_name("other")
    KNNStore.create(other, identity, store=engine).close()
    shutil.rmtree(other / "keys")
    shutil.copy(victim / "catalog.db", other / "catalog.db")
    sql(other, "UPDATE knnstore_store SET store_id = ?", store_id)
    (other / "keys").symlink_to(victim / "keys")
    return other


WAYS = [
    linked,
    linked_absolutely,
    linked_twice,
    linked_parent,
    located,
    located_relatively,
    another_with_its_id,
]


def changes(writer_of: Callable) -> list[Callable[[KNNStore], object]]:
    return [
        lambda store: store.remove_domain("law"),
        lambda store: put(store, "3", writer_of),
        lambda store: store.erase(),
        lambda store: store.optimize(),
        lambda store: store.repair(),
        lambda store: store.repair(take_over=True),
    ]


def assert_unharmed(victim: Path, before: dict[str, bytes], writer_of: Callable) -> None:
    assert contents(victim / "keys") == before, "the original's keys were changed"
    with KNNStore.open(victim, "a") as store:
        assert store.verify() == []
        put(store, "4", writer_of)
        assert [one.id for one in store.documents()] == ["1", "2", "4"]


def attack(copy: Path, writer_of: Callable) -> None:
    """Try to change the keys in each way; the copy is refused, or changes keys of its own."""
    with pytest.raises(NotOwnerError):
        KNNStore.open(copy, "a")
    for change in changes(writer_of):
        with KNNStore.open(copy, "a", copied=True) as store, pytest.raises(NotOwnerError):
            change(store)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "way", "old_claim"),
    [
        *(("faiss", way, False) for way in WAYS),
        *(("faiss", way, True) for way in (linked, located)),
        *((engine, way, False) for engine in ENGINES if engine != "faiss" for way in (linked, located)),
    ],
    indirect=["engine"],
)
def test_a_copy_that_leads_to_the_keys_changes_none(victim, way, old_claim, writer_of) -> None:
    if old_claim:
        forget_database(victim / "keys")
    copy, before = way(victim), contents(victim / "keys")
    attack(copy, writer_of)
    with KNNStore.open(copy, "a", copied=True) as store:
        assert "the keys belong to another store or copy" in str(store.move("faiss", "own").left)
        store.remove_domain("law")
    assert_unharmed(victim, before, writer_of)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
def test_recovery_of_a_copy_removes_nothing_of_the_original(victim, killed_at, writer_of) -> None:
    """The copy is made while the original is half way through a removal."""

    def remove() -> None:
        with KNNStore.open(victim, "a") as store:
            store.remove_document("1")

    assert killed_at("purge.before", remove)
    copy, before = linked(victim), contents(victim / "keys")
    with pytest.raises(NotOwnerError):
        KNNStore.open(copy, "a")
    KNNStore.open(copy, "a", copied=True).close()
    assert contents(victim / "keys") == before


@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
@pytest.mark.parametrize("moved", ["renamed", "parent", "across"])
def test_a_moved_home_still_writes(victim, moved, writer_of, tmp_path) -> None:
    if moved == "parent":
        inner = tmp_path / "inner"
        inner.mkdir()
        home = victim.rename(inner / "victim")
        home = inner.rename(tmp_path / "outer") / "victim"
    elif moved == "renamed":
        home = victim.rename(tmp_path / "renamed")
    else:  # as a move to another file system does: everything is new, the original goes
        home = shutil.copytree(victim, tmp_path / "copied")
        shutil.rmtree(victim)
    with KNNStore.open(home, "a") as store:
        put(store, "3", writer_of)
        assert store.verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("old_claim", [False, True], ids=["", "old-claim"])
def test_a_whole_copy_owns_its_keys(victim, old_claim, writer_of) -> None:
    """Also of a store that an older knnstore made, which then has a claim that proves more."""
    if old_claim:
        forget_database(victim / "keys")
    copy, before = shutil.copytree(victim, victim.with_name("copy")), contents(victim / "keys")
    with KNNStore.open(copy, "a") as store:
        store.remove_domain("law")
        store.erase()
    assert_unharmed(victim, before, writer_of)
    assert str(victim / "catalog.db") in str(registry.load_adapter("faiss").owner(victim / "keys"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
def test_a_catalog_that_was_restored_into_its_home_goes_on(victim, writer_of) -> None:
    """The restored file has another inode."""
    backup = shutil.copy(victim / "catalog.db", victim.with_name("backup"))
    os.replace(backup, victim / "catalog.db")
    with KNNStore.open(victim, "a") as store:
        put(store, "3", writer_of)
        assert store.verify() == []


@pytest.mark.slow
def test_hard_links_to_the_keys_are_not_written(victim, writer_of) -> None:
    copy = copy_without_keys(victim)
    shutil.copytree(victim / "keys", copy / "keys", copy_function=os.link)
    before = contents(victim / "keys")
    with pytest.raises(NotOwnerError, match=r"second name \(a hard link\).*cp -r"):
        KNNStore.open(copy, "a")
    assert_unharmed(victim, before, writer_of)
    real = shutil.copytree(copy / "keys", copy / "real")
    shutil.rmtree(copy / "keys")
    real.rename(copy / "keys")
    with KNNStore.open(copy, "a") as store:
        store.remove_domain("law")
    with KNNStore.open(victim) as store:
        assert store.verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
def test_a_hard_link_to_the_catalog_is_not_written(victim, writer_of) -> None:
    copy = shutil.copytree(victim, victim.with_name("copy"), copy_function=os.link)
    before = contents(victim)
    with pytest.raises(KnnstoreError, match=r"catalog\.db has a second name \(a hard link\)"):
        KNNStore.open(copy, "a")
    with KNNStore.open(copy) as store:
        assert len(store.documents()) == 2
    assert contents(victim) == before


_IN_A_MOUNT = """
import subprocess, sys
from contextlib import suppress
from knnstore.errors import NotOwnerError
from knnstore.store import KNNStore
source, target, home = sys.argv[1:]
subprocess.run(["mount", "--bind", source, target], check=True)
for copied in (False, True):
    for change in ("remove_domain", "erase", "optimize", "repair", "take_over"):
        with suppress(NotOwnerError), KNNStore.open(home, "a", copied=copied) as store:
            {"remove_domain": lambda: store.remove_domain("law"),
             "take_over": lambda: store.repair(take_over=True)}.get(change, getattr(store, change, None))()
"""


@pytest.fixture
def alone() -> list[str]:
    """The beginning of a command line whose mounts nobody else sees."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mounts can be made here")
    return command


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
@pytest.mark.parametrize("inner", [False, True], ids=["keys", "folder-of-keys"])
def test_a_mount_of_the_keys_is_not_written(victim, inner, writer_of, alone) -> None:
    """A bind mount is a folder of the copy by its path and its device, and shows the original's files."""
    copy, before = shutil.copytree(victim, victim.with_name("a copy")), contents(victim / "keys")
    part = next(path.name for path in sorted((victim / "keys").iterdir()) if path.is_dir()) if inner else ""
    places = str(victim / "keys" / part), str(copy / "keys" / part)
    subprocess.run([*alone, sys.executable, "-c", _IN_A_MOUNT, *places, str(copy)], check=True)
    assert_unharmed(victim, before, writer_of)


_ON_TWO_DISKS = """
mount -t tmpfs tmpfs "$1/first" && mount -t tmpfs tmpfs "$1/second" || exit 3
for disk in first second; do mkdir "$1/$disk/home"; cp "$1/victim/catalog.db" "$1/$disk/home/"; done
cp -r "$1/victim/keys" "$1/victim/knnstore.json" "$1/first/home/"
cp "$1/victim/knnstore.json" "$1/second/home/"
ln -s "$1/first/home/keys" "$1/second/home/keys"
"$2" -c "$3" "$1/first/home" "$1/second/home"
"""

_SAME_NUMBERS = """
import sys
from pathlib import Path
from knnstore.errors import NotOwnerError
from knnstore.store import KNNStore
first, second = map(Path, sys.argv[1:])
numbers = [(home.stat().st_ino, (home / "catalog.db").stat().st_ino) for home in (first, second)]
assert numbers[0] == numbers[1], numbers
KNNStore.open(first, "a").close()
try:
    KNNStore.open(second, "a")
except NotOwnerError:
    KNNStore.open(first, "a").close()
    sys.exit(0)
sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
def test_a_copy_on_another_disk_with_the_same_numbers_is_told_apart(victim, alone, tmp_path) -> None:
    for disk in ("first", "second"):
        (tmp_path / disk).mkdir()
    command = [*alone, "sh", "-c", _ON_TWO_DISKS, "sh", str(tmp_path), sys.executable, _SAME_NUMBERS]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("engine", ["faiss"], indirect=True)
def test_a_forged_move_of_a_copy_erases_nothing(victim, writer_of) -> None:
    import json

    copy, before = shutil.copytree(victim, victim.with_name("copy")), contents(victim / "keys")
    (copy / "old").symlink_to(victim / "keys")
    with KNNStore.open(copy) as store:
        store_id = store._catalog.store_id
    mine, theirs = ({"adapter": "faiss", "location": at, "params": {}} for at in ("keys", "old"))
    for source, target in ((theirs, mine), (mine, theirs)):
        plan = {"store_id": store_id, "source": source, "target": target, "made": True}
        (copy / "move.json").write_text(json.dumps(plan))
        with suppress(KnnstoreError), KNNStore.open(copy, "a") as store:
            store.abandon_move()
    assert_unharmed(victim, before, writer_of)
