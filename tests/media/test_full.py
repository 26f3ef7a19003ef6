"""A disk that is full, or too small for what is asked."""

from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import record_ids, registry

N = 1000
SWEEP = (pytest.mark.slow, pytest.mark.exhaustive)
"""For sizes and engines between those that CI tries."""
ROOMY = {"faiss": 24 << 20, "cells": 24 << 20, "hnswlib": 24 << 20}
IDS = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "engine",
    [one if one == "faiss" else pytest.param(one, marks=SWEEP) for one in ROOMY],
)
def test_a_full_disk_can_be_read_and_removed_from(engine, disk, steps) -> None:
    full = disk(ROOMY[engine])
    home = full.path / "home"
    steps.well("create", home, engine)
    steps.well("add", home, "x", ["a", "b"], N)
    steps.well("add", home, "y", ["c", "d"], N)
    full.fill()
    assert steps.well("check", home, N).ids == IDS
    for refused in (
        ["optimize"],
        ["move", "--store", "faiss", "--location", "other"],
    ):
        said = steps.refused("command", *refused, "--home", home)
        assert " bytes at " in said
        assert " are free, so it was not started: free some space" in said
        full.fill()  # what was given back is taken again, so nothing is left for others
    assert (home / "reserve").stat().st_size
    assert not (home / "other").exists()
    assert not (home / "move.json").exists()
    assert "adding 1,000 tokens needs" in steps.refused("add", home, "x", ["e"], N)
    full.fill()
    steps.well("command", "remove", "--document", "a", "--home", home)
    full.fill()
    steps.well("command", "remove", "--domain", "y", "--yes", "--home", home)
    assert full.free
    assert steps.well("check", home, N).ids == ["b"]
    full.relieve()
    steps.well("add", home, "x", ["a"], N)
    steps.well("command", "optimize", "--home", home)
    steps.well("command", "repair", "--home", home)
    assert sorted(steps.well("check", home, N).ids) == ["a", "b"]


@pytest.mark.slow
def test_removing_needs_no_more_than_the_reserve(disk, steps) -> None:
    """A document's tokens pass through the database's log when they go, so they go in parts."""
    full = disk(80 << 20)
    home = full.path / "home"
    steps.well("create", home, "faiss")
    steps.well("add", home, "x", ["a", "b", "c", "d", "e", "f", "g", "h"], 40_000)
    full.fill()
    assert steps.well("command", "remove", "--domain", "x", "--yes", "--home", home).err == ""
    assert steps.well("check", home, N).ids == []
    assert full.free > 1 << 20


@pytest.mark.slow
def test_many_documents_at_once_need_no_more_either(disk, steps) -> None:
    """Each has a page of the database to itself, and all of these are more than the reserve."""
    full = disk(40 << 20)
    home = full.path / "home"
    steps.well("create", home, "faiss")
    steps.well("add", home, "y", ["a"], N)
    steps.well("add_many", home, "x", 1500, title=3000)
    full.fill()
    assert steps.well("command", "remove", "--domain", "x", "--yes", "--home", home).err == ""
    assert steps.well("check", home, N).ids == ["a"]


@pytest.mark.slow
def test_erasing_that_will_not_fit_is_not_begun(disk, steps) -> None:
    """The database is written twice, among SQLite's temporary files and to its log."""
    size, room = 60 << 20, 10 << 20
    small, temporary = disk(size), disk(size)
    home = small.path / "home"
    steps.well("create", home, "faiss")
    steps.well("add", home, "x", ["a", "b"], N)
    steps.well("add_many", home, "y", 2, title=room // 2)
    steps.well("command", "optimize", "--home", home)
    steps.well("command", "remove", "--document", "a", "--home", home)
    before = files(home)
    for full, folder in ((small, temporary), (small, small), (temporary, temporary)):
        full.fill()
        full.resize(size + room)
        said = steps.refused("erase", home, temporary=folder.path)
        assert "erasing needs " in said
        assert f" bytes at {full.path}" in said
        assert " are free, so it was not started: free some space" in said
        assert files(home) == before
        full.relieve()
        full.resize(size)
    steps.well("erase", home, temporary=temporary.path)
    assert files(home) != before
    steps.well("command", "verify", "--home", home)


@pytest.mark.slow
def test_no_segment_is_rewritten_where_not_all_have_room(disk, steps) -> None:
    size, room = 60 << 20, 7 << 20
    small = disk(size)
    home = small.path / "home"
    steps.well("create", home, "faiss")
    for domain, ids in ("x", ["a", "b"]), ("y", ["c", "d"]):
        steps.well("add", home, domain, ids, 20_000)
    steps.well("command", "optimize", "--home", home)  # makes one segment of a domain
    steps.well("command", "remove", "--document", "a", "--home", home)
    before = files(home)
    small.fill()
    small.resize(size + room)
    refused = steps("command", "remove", "--document", "c", "--erase", "--home", home)
    assert refused.err.startswith("removed c of y: 20,000 tokens; `knnstore erase` also erases the bytes\n")
    assert "erasing needs " in refused.err
    assert files(home) == before
    steps.well("command", "remove", "--document", "d", "--home", home)
    steps.well("command", "erase", "--home", home)
    assert steps.well("check", home, 20_000).ids == ["b"]


def files(home: Path) -> dict[Path, bytes]:
    """The segments of a store."""
    return {path: path.read_bytes() for path in home.rglob("*.keys")}


@pytest.mark.slow
def test_the_reserve_serves_a_store_that_is_open_while_the_disk_fills(disk, steps) -> None:
    home = disk(24 << 20).path / "home"
    steps.well("create", home, "faiss")
    steps.well("add", home, "x", IDS, N)
    steps.well("fill_and_remove", home, *IDS[:3])
    assert steps.well("check", home, N).ids == IDS[3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "room", [0, 1 << 20, 6 << 20, *(pytest.param(room, marks=SWEEP) for room in (64 << 10, 2 << 20))]
)
def test_an_upgrade_of_the_catalog_is_done_or_changes_nothing(room, disk, steps) -> None:
    size = 60 << 20
    small = disk(size)
    home = small.path / "home"
    steps.well("create", home, "faiss")
    steps.well("add", home, "x", IDS, N)
    steps.well("add_many", home, "y", 1500, title=1500)
    steps.well("age", home)
    (home / "reserve").unlink()
    small.fill()
    small.resize(size + room)
    upgraded = steps("command", "db", "upgrade", "--home", home)
    if room == 6 << 20:
        assert upgraded.status == 0
    else:
        assert "the disk is full" in upgraded.err
        assert "knnstore db upgrade" in steps.refused("command", "documents", "--home", home)
    small.relieve()
    steps.well("command", "db", "upgrade", "--home", home)
    steps.well("command", "verify", "--home", home)
    steps.well("command", "remove", "--domain", "y", "--yes", "--home", home)
    assert steps.well("check", home, N).ids == IDS


COPIES = {
    "move": ["move", "--store", "cells", "--location", "other"],
    "build": ["move", "--store", "hnswlib", "--location", "other", "--param", "exact_up_to=100"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "room",
    [0, 400 << 10, *(pytest.param(room << 10, marks=SWEEP) for room in (40, 200, 800, 2048))],
)
@pytest.mark.parametrize("copy", COPIES)
def test_keys_are_copied_whole_or_stay_where_they_are(copy, room, disk, steps) -> None:
    """Something else fills the disk after the look at it."""
    size = 60 << 20
    small = disk(size)
    home = small.path / "home"
    steps.well("create", home, "cells" if copy == "build" else "faiss")
    steps.well("add", home, "x", IDS, N)
    steps.well("command", "remove", "--document", "b", "--home", home)
    (home / "reserve").unlink()
    small.fill()
    small.resize(size + room)
    copied = steps("command", *COPIES[copy], "--home", home, unchecked=True)
    small.fill()
    if copied.status:
        assert "free space" in copied.err or "free some space" in copied.err
        assert steps.well("check", home, N, full=True).ids == ["a", "c", "d"]
        small.relieve()
        steps.well("command", *COPIES[copy], "--home", home)
    steps.well("command", "verify", "--home", home)
    assert steps.well("check", home, N).ids == ["a", "c", "d"]
    assert not (home / "move.json").exists()
    assert not (home / "keys").exists()


@pytest.mark.slow
def test_the_catalog_needs_room_where_the_keys_are_on_another_disk(disk, steps, tmp_path) -> None:
    full = disk(8 << 20)
    home = full.path / "home"
    steps.well("create", home, "faiss", location=str(tmp_path / "keys"))
    full.fill()
    said = steps.refused("add", home, "x", ["a"], N)
    assert "adding 1,000 tokens needs" in said
    assert f" bytes at {home}, but only " in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "size", "unchecked"),
    [
        ("faiss", 5300 << 10, False),
        ("faiss", 1100 << 10, True),
        ("cells", 1100 << 10, True),
        pytest.param("faiss", 80 << 10, False, marks=SWEEP),
        pytest.param("faiss", 2000 << 10, True, marks=SWEEP),
        pytest.param("hnswlib", 1600 << 10, True, marks=SWEEP),
        pytest.param("cells", 2000 << 10, True, marks=SWEEP),
    ],
)
def test_a_disk_of_any_size(engine, size, unchecked, disk, steps) -> None:
    """No step ends by a signal or a traceback, nothing acknowledged is lost, and with space all goes on."""
    small = disk(size)
    home = small.path / "home"
    made = steps("create", home, engine).status == 0
    acknowledged = set()
    for domain, ids in (("x", IDS), ("x", IDS[:2]), ("y", ["e", "f", "g"])) if made else ():
        acknowledged |= set(steps("add", home, domain, ids, N, unchecked=unchecked).ids)
    if made:
        steps("command", "optimize", "--home", home)
        assert acknowledged <= set(steps.well("check", home, N, full=True).ids)
        steps("command", "move", "--store", "hnswlib", "--location", "other", "--home", home)
        assert acknowledged <= set(steps.well("check", home, N, full=True).ids)
        small.fill()
        for id in sorted(acknowledged)[:2]:
            if steps("command", "remove", "--document", id, "--home", home).status == 0:
                acknowledged.discard(id)
            small.fill()
        assert acknowledged <= set(steps.well("check", home, N, full=True).ids)
        small.relieve()
    small.resize(400 << 20)
    if not made:
        steps.well("create", home, engine)
    steps.well("add", home, "x", IDS, N)
    steps.well("command", "optimize", "--home", home)
    steps.well("command", "move", "--store", "faiss", "--location", "last", "--home", home)
    steps.well("command", "repair", "--home", home)
    assert acknowledged | set(IDS) <= set(steps.well("check", home, N).ids)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["faiss", pytest.param("hnswlib", marks=SWEEP)])
def test_an_index_that_finds_no_room_names_the_disk(engine, disk, steps) -> None:
    """FAISS says that writing failed, and not why; hnswlib says nothing."""
    full = disk(24 << 20)
    home = full.path / "home"
    steps.well("create", home, engine)
    steps.well("add", home, "x", ["a"], 20_000)
    full.fill()
    said = steps.refused("optimize_unchecked", home)
    assert f"cannot write {home}" in said
    assert "what was flushed is safe: free space" in said
    assert steps.well("check", home, 20_000).ids == ["a"]
    full.relieve()
    steps.well("command", "optimize", "--home", home)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ROOMY)
def test_what_a_record_takes_is_not_underestimated(engine, tmp_path) -> None:
    """Nor is it overestimated by far: what would fit must not be refused."""
    adapter, params = registry.load_adapter(engine), {"exact_up_to": 100} if engine == "hnswlib" else {}
    first, n, dim, taken = 100, 4_000 if engine == "hnswlib" else 40_000, 64, []
    keys = np.random.default_rng(0).standard_normal((n, dim)).astype(np.float32)
    ids = record_ids(np.arange(n), np.zeros(n, np.int64))
    with adapter.open(tmp_path / "keys", dim=dim, **params) as store:
        for rows in (slice(first), slice(first, n)):
            store.add(ids[rows], keys[rows], np.zeros(len(ids[rows]), np.int32))
            store.optimize()
            files = [path.stat() for path in (tmp_path / "keys").rglob("*") if path.is_file()]
            taken.append(sum(min(file.st_blocks * 512, file.st_size) for file in files))
    assert 0.4 < (taken[1] - taken[0]) / (n - first) / adapter.record_size(dim, **params) <= 1
