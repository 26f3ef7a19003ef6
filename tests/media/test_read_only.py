"""A medium that can only be read."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import knnstore
from knnstore.catalog.connection import run_read_transaction
from knnstore.errors import StoreUnavailableError

N = 300
READING = ["info"], ["domains"], ["documents"], ["verify"]
WRITING = (
    ["tag", "a", "--add", "t"],
    ["remove", "--document", "a"],
    ["move", "--store", "faiss", "--location", "other"],
    ["move", "--abandon"],
    ["optimize"],
    ["repair"],
)


@pytest.fixture
def home(disk, steps) -> Path:
    """A store on a disk of its own, closed by its writer."""
    path = disk(16 << 20).path / "home"
    steps.well("create", path, "faiss")
    steps.well("add", path, "x", ["a", "b"], N)
    return path


@pytest.mark.parametrize("engine", ["faiss", pytest.param("hnswlib", marks=pytest.mark.slow)])
def test_it_can_be_read(engine, disk, steps) -> None:
    medium = disk(400 << 20)
    home = medium.path / "home"
    steps.well("create", home, engine)
    steps.well("add", home, "x", ["a", "b"], N)
    steps.well("command", "optimize", "--home", home)
    medium.remount("ro")
    assert steps.well("check", home, N).ids == ["a", "b"]
    for arguments in READING:
        steps.well("command", *arguments, "--home", home)
    said = steps.refused("add", home, "x", ["c"], N)
    assert f"{home}/writer.lock is on a read-only file system" in said


@pytest.mark.slow
def test_commands_that_write_say_what_it_is(home, steps) -> None:
    subprocess.run(["mount", "-o", "remount,ro", "none", home.parent], check=True)
    for arguments in WRITING:
        assert "read-only file system" in steps.refused("command", *arguments, "--home", home)
    assert "read-only file system" in steps.refused("create", home.parent / "new", "faiss")


@pytest.mark.slow
def test_a_folder_of_which_only_reading_is_allowed(home, plain_steps) -> None:
    plain = plain_steps
    for path in (home, *home.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert plain.well("check", home, N).ids == ["a", "b"]
    assert "may not be written by this user" in plain.refused(
        "command", "remove", "--document", "a", "--home", home
    )


def test_a_writer_leaves_one_file(home) -> None:
    assert not list(home.glob("catalog.db-*"))
    with knnstore.open(home) as reader, knnstore.open(home, "a") as writer:  # the reader stays to the end
        writer.retag("a", add=["t"])
        writer.close()
        assert (home / "catalog.db-wal").stat().st_size == 0
        assert reader.document("a").tags == ("t",)


@pytest.mark.slow
@pytest.mark.parametrize("index", [True, False])
def test_the_log_of_a_writer_that_was_killed(index, home, disk, steps) -> None:
    """It holds what was acknowledged, so it must not be passed over."""
    medium = disk(16 << 20)
    with knnstore.open(home, "a") as writer:
        writer.retag("a", add=["t"])
        copied = shutil.copytree(home, medium.path / "home", copy_function=shutil.copyfile)
    assert (copied / "catalog.db-wal").stat().st_size
    if not index:
        (copied / "catalog.db-shm").unlink()
    medium.remount("ro")
    if index:
        steps.well("check", copied, N)
        assert '"t"' in steps.well("command", "documents", "--json", "--home", copied).out
    else:
        said = steps.refused("command", "documents", "--home", copied)
        assert f"{copied}/catalog.db-wal has changes" in said


@pytest.fixture
def elsewhere(home, tmp_path) -> Iterator[Path]:
    """The same store where it can only be read, whoever writes it at its own place."""
    here = tmp_path / "here"
    here.mkdir()
    subprocess.run(["mount", "--bind", home, here], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", here], check=True)
    yield here
    subprocess.run(["umount", "--lazy", here], check=True)


@pytest.mark.slow
def test_somebody_writes_what_can_only_be_read_here(home, elsewhere, steps) -> None:
    with knnstore.open(elsewhere) as reader:
        assert len(reader.documents()) == 2
        steps.well("add", home, "x", ["c"], N)  # and closes
        assert len(reader.documents()) == 3
        with knnstore.open(home, "a") as writer:
            writer.retag("c", add=["t"])
            assert reader.document("c").tags == ("t",)
            writer.retag("c", add=["u"])
            assert reader.document("c").tags == ("t", "u")
        assert reader.document("c").tags == ("t", "u")


@pytest.mark.slow
def test_what_is_read_is_of_one_moment(home, elsewhere, steps) -> None:
    with knnstore.open(elsewhere) as reader:
        before = reader.revision()
        with (
            pytest.raises(StoreUnavailableError, match="was changed while it was read: try again"),
            run_read_transaction(reader._catalog.sql),
        ):
            steps.well("command", "remove", "--document", "a", "--home", home)
        assert reader.revision() > before
