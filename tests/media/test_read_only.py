"""A medium that can only be read."""

import pytest

ENGINES = {
    "faiss": {"index": "IVF4,Flat"},
    "hnswlib": {"exact_up_to": 100},
    "qdrant": {},
}
LARGE = 400 << 20
N = 500


@pytest.mark.parametrize("engine", ENGINES)
def test_it_can_be_read_and_says_what_it_is_when_written(engine, disk, steps):
    medium = disk(LARGE)
    home = medium.path / "home"
    steps.well("create", home, engine, ENGINES[engine])
    steps.well("add", home, "x", ["a", "b"], N)
    steps.well("command", "optimize", "--home", home)
    medium.remount("ro")
    assert steps.well("check", home, N).ids == ["a", "b"]
    for arguments in (["info"], ["domains"], ["documents"], ["verify"]):
        steps.well("command", *arguments, "--home", home)
    for arguments in (
        ["tag", "a", "--add", "t"],
        ["remove", "--document", "a"],
        ["move", "--store", "faiss", "--location", "k2"],
        ["move", "--abandon"],
        ["optimize"],
        ["repair"],
    ):
        print(steps.refused("command", *arguments, "--home", home))
