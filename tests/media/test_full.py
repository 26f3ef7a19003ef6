"""A disk that is full, or too small for what is asked."""

import pytest

ENGINES = {
    "faiss": {"index": "IVF4,Flat"},
    "hnswlib": {"exact_up_to": 100},
    "qdrant": {},
}
LARGE = {"faiss": 24 << 20, "hnswlib": 24 << 20, "qdrant": 400 << 20}
N = 500


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_can_be_read_and_removed_from(engine, disk, steps):
    full = disk(LARGE[engine])
    home = full.path / "home"
    steps.well("create", home, engine, ENGINES[engine])
    steps.well("add", home, "x", ["a", "b"], N)
    steps.well("add", home, "y", ["c", "d", "e"], N)
    full.fill()
    assert steps.well("check", home, N).ids == ["a", "b", "c", "d", "e"]
    steps.well("command", "verify", "--home", home)
    print(steps.refused("add", home, "x", ["f"], N))
    full.fill()
    print(steps.refused("command", "optimize", "--home", home))
    full.fill()
    print(steps.refused("command", "move", "--store", "faiss", "--location", "k2", "--home", home))
    assert not (home / "k2").exists()
    full.fill()
    for _ in range(2):
        print(full.free, steps.well("command", "remove", "--document", "a", "--home", home).err, full.free)
        full.fill()
        print(steps.well("add", home, "x", [], N).err)
        break
    print(full.free, steps.well("command", "remove", "--domain", "y", "--home", home).err, full.free)
    full.fill()
    assert steps.well("check", home, N).ids == ["b"]
    full.relieve()
    steps.well("add", home, "x", ["g"], N)
    steps.well("command", "optimize", "--home", home)
    assert steps.well("check", home, N).ids == ["b", "g"]
    steps.well("command", "repair", "--home", home)
