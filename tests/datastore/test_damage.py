"""Damaged files and full disks are said clearly, what is sound is searched; no wrong neighbor, no crash."""

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from knnstore_faiss import FaissDatastore

from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.manifest import Manifest
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import CorruptDatastoreError, DatastoreError

DIM = 32
ROWS = 6000
PARAMS = {"dim": DIM, "index": "IVF16,Flat", "nprobe": 16}  # so that the index changes no answer
KEYS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float16).astype(np.float32)
QUERIES = KEYS[:8] + np.float32(0.01)

DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "removed": None,
    "emptied": lambda content: b"",
    "halved": lambda content: content[: len(content) // 2],
    "a byte short": lambda content: content[:-1],
    "a byte long": lambda content: content + b"\0",
    "a page long": lambda content: content + bytes(4096),
    **{
        f"bit {bit} flipped at {share:.0%}": lambda content, bit=bit, share=share: flipped(
            content, bit, share
        )
        for bit, share in ((0, 0.0), (6, 0.01), (3, 0.33), (7, 0.5), (1, 0.75), (2, 0.999))
    },
}


def flipped(content: bytes, bit: int, share: float) -> bytes:
    """Flip one bit at some share of the length."""
    at = int(share * len(content))
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with an index, a smaller segment without one, and dead rows."""
    with FaissDatastore.open(tmp_path / "store", **PARAMS) as made:
        made.add(np.arange(ROWS), KEYS, np.zeros(ROWS, np.int32))
        made.optimize()
        made.add(np.arange(100), KEYS[:100], np.zeros(100, np.int32))
    return tmp_path / "store"


def in_child(code: str, *arguments: object) -> str:
    """Run code that can use this module in a process of its own, which must not die; returns its output."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.run(
        [sys.executable, "-c", f"from test_damage import *\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": here},
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def search_in_child(root: Path) -> tuple[np.ndarray | None, str]:
    """The distances that a process of its own finds, if it does, and what it says."""
    result = root.parent / "found.npy"
    result.unlink(missing_ok=True)
    said = in_child("search(Path(sys.argv[1]), sys.argv[2])", root, result)
    return np.load(result) if result.exists() else None, said


def search(root: Path, result: str) -> None:
    logging.basicConfig(stream=sys.stdout)
    try:
        with FaissDatastore.open(root, mode="r", **PARAMS) as store:
            np.save(result, store.search(QUERIES, 10).distances)
    except CorruptDatastoreError as error:
        print(error)


def search_each_damaged(root: Path, path: Path, results: Path) -> None:
    """Search with every damage to a file, each in a process of its own, forked before any search has run."""
    intact = path.read_bytes()
    for number, damage in enumerate(DAMAGES.values()):
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(intact))
        child = os.fork()
        if child == 0:
            said = os.open(results / f"{number}.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(said, 1)
            search(root, str(results / f"{number}.npy"))
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, list(DAMAGES)[number]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "manifest.json",
        "*.keys",
        "*.index",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("*.ids", "*.digests")),
    ],
)
def test_damage(store: Path, kind: str) -> None:
    """Every damage to every kind of file is named, and costs the records of that file at most."""
    path = sorted(store.rglob(kind))[0]
    truth, said = search_in_child(store)
    assert not said
    with FaissDatastore.open(store.parent / "rest", **PARAMS) as made:
        made.add(np.arange(100), KEYS[:100], np.zeros(100, np.int32))
        rest = made.search(QUERIES, 10).distances
    results = store.parent / "results"
    results.mkdir()
    in_child("search_each_damaged(*map(Path, sys.argv[1:]))", store, path, results)
    for number, damage in enumerate(DAMAGES):
        said, result = (results / f"{number}.txt").read_text(), results / f"{number}.npy"
        found = np.load(result) if result.exists() else None
        assert path.name in said or kind == "*.digests", f"{damage}: {said}"
        if kind == "manifest.json":
            assert found is None
        else:  # damage to what is derived costs time only
            expected = truth if kind in ("*.digests", "*.index") else rest
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=damage)


def test_first_rows_are_checked_alone(tmp_path: Path) -> None:
    """A search that reads a few rows of a large segment checks their blocks, and finds damage there."""
    keys = np.random.default_rng(0).normal(size=(20000, 256)).astype(np.float32)
    root = tmp_path / "store"
    with FaissDatastore.open(root, dim=256, index="IVF16,SQ8") as made:
        made.add(np.arange(20000), keys, np.zeros(20000, np.int32))
        made.optimize()
    path = next(root.rglob("*.keys"))
    content = bytearray(path.read_bytes())
    content[512 * 4000] ^= 1
    path.write_bytes(content)
    with FaissDatastore.open(root, dim=256, mode="r", index="IVF16,SQ8") as reader:
        assert reader.search(keys[15000:15001], 1).ids.tolist() == [[15000]]
        with pytest.raises(CorruptDatastoreError, match=path.name):
            reader.search(keys[4000:4001], 1)
        assert path.name in reader.verify()[0]


def test_a_row_in_two_blocks_is_checked_in_both(tmp_path: Path) -> None:
    row, dim = 85, 384  # from byte 65,280 to 66,048
    made = KeySegments(tmp_path, dim, Metric.L2, "a")
    made.append(np.arange(200), np.ones((200, dim), np.float32), np.zeros(200, np.int32))
    made.close()
    (path,) = tmp_path.rglob("*.keys")
    content = bytearray(path.read_bytes())
    content[1 << 16] ^= 1
    path.write_bytes(content)
    reader = KeySegments(tmp_path, dim, Metric.L2, "r")
    (segment,) = reader.snapshot()
    assert (segment.columns.keys_at(np.array([row - 1])) == 1).all()
    with pytest.raises(CorruptDatastoreError, match=path.name):
        segment.columns.keys_at(np.array([row]))
    reader.close()


def test_other_files_stay(tmp_path: Path) -> None:
    """Opening for writing removes what a crash left, and nothing that is not ours."""
    root = tmp_path / "store"
    KeySegments(root, DIM, Metric.L2, "a").close()
    for name in ("00000009.keys", "00000009.index.tmp", "notes.txt"):
        (root / "segments" / name).write_text("")
    KeySegments(root, DIM, Metric.L2, "a").close()
    assert [path.name for path in (root / "segments").iterdir()] == ["notes.txt"]


def test_lost_manifest_is_no_empty_store(store: Path) -> None:
    (store / "manifest.json").unlink()
    before = sorted(store.rglob("*.keys"))
    for mode in ("r", "a", "x"):
        with pytest.raises(CorruptDatastoreError, match=r"manifest\.json is missing"):
            FaissDatastore.open(store, mode=mode, **PARAMS)
    assert sorted(store.rglob("*.keys")) == before


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 100, 20_000, 150_000, 390_000])
def test_disk_full(tmp_path: Path, room: int) -> None:
    """With no room: one clear error, what was flushed before is there, and trying again with room works."""
    in_child("write_without_room(Path(sys.argv[1]), int(sys.argv[2]))", tmp_path / "store", room)
    with FaissDatastore.open(tmp_path / "store", **PARAMS) as store:
        assert store.count() == ROWS + 50
        assert store.verify() == []
        on_disk = {
            path.relative_to(store._segments.root).as_posix() for path in store._segments.root.glob("*/*")
        }
        assert on_disk == store._segments._files.on_disk


def write_without_room(root: Path, room: int) -> None:
    store = FaissDatastore.open(root, **PARAMS)
    store.add(np.arange(50), KEYS[:50], np.zeros(50, np.int32))
    store.flush()
    # A limit on the size of files stands in for a full disk: the write is cut short, then refused.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    store.add(np.arange(ROWS) + 50, KEYS, np.zeros(ROWS, np.int32))
    with pytest.raises(DatastoreError, match=str(root)):
        store.optimize()
    assert store.count() == ROWS + 50  # nothing was lost in memory either
    if room < 100_000:
        with FaissDatastore.open(root, mode="r", **PARAMS) as reader:
            assert reader.count() == 50
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.optimize()
    assert store.search(KEYS[:5], 1).ids.tolist()[1:] == [[1], [2], [3], [4]]
    store.close()


def test_a_manifest_that_vanishes_while_it_is_read_is_said_to_be_missing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted(store.rglob("*.keys"))[0].unlink()
    read = Manifest.read

    def read_and_remove(root: Path, *known: Any) -> Manifest:
        manifest = read(root, *known)
        (root / "manifest.json").unlink()
        return manifest

    monkeypatch.setattr(Manifest, "read", read_and_remove)
    with pytest.raises(CorruptDatastoreError, match=r"manifest\.json is missing"):
        FaissDatastore.open(store, mode="r", **PARAMS)


def test_damaged_bytes_are_never_written_anew(store: Path) -> None:
    """Merging, vacuuming and the building of an index leave a segment alone that turns out to be damaged."""
    path = sorted(store.rglob("*.keys"))[0]
    path.write_bytes(flipped(path.read_bytes(), 1, 0.5))
    damaged = path.read_bytes()
    with FaissDatastore.open(store, **PARAMS) as writer:
        writer.delete(IdRanges([(3000, 4000)]))
        writer.optimize()
        writer.vacuum()
        assert [part.name for part in writer.list_damaged_parts()] == [path.stem]
        assert path.read_bytes() == damaged
        writer.add(np.arange(ROWS), KEYS, np.zeros(ROWS, np.int32))
        writer.optimize()
        assert writer.verify() == []
        assert writer.search(KEYS[:5], 1).ids.tolist() == [[0], [1], [2], [3], [4]]
    assert not path.exists()
