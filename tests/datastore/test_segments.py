"""The durable segments against a dictionary, over restarts, merges, crashes and other readers."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded import log as segments_module
from knnstore.datastore.embedded import manifest as manifest_module
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.ranges import IdRanges
from knnstore.errors import (
    DatastoreClosedError,
    DatastoreExistsError,
    DatastoreMismatchError,
    DatastoreNotFoundError,
    LockedError,
    ReadOnlyError,
)

DIM = 3


def opened(root: Path, mode: str = "a") -> KeySegments:
    return KeySegments(root, DIM, Metric.L2, mode)  # type: ignore[arg-type]


def add(store: KeySegments, ids: list[int], value: float, group: int = 0) -> None:
    """Add records whose keys are (id, value, group)."""
    keys = np.array([[i, value, group] for i in ids], np.float32)
    store.append(np.array(ids, np.int64), keys, np.full(len(ids), group, np.int32))


def content(
    store: KeySegments, ids: IdRanges | None = None, batch_size: int = 7
) -> list[tuple[int, float, int]]:
    """All records as (id, value, group), checking order and shapes on the way."""
    found: list[tuple[int, float, int]] = []
    for some, keys, groups in store.iterate(ids=ids, batch_size=batch_size):
        assert 0 < len(some) <= batch_size
        assert keys.dtype == np.float32
        assert (keys[:, 0] == some).all()
        assert (keys[:, 2] == groups).all()
        found += zip(some.tolist(), keys[:, 1].tolist(), groups.tolist(), strict=True)
    assert [entry[0] for entry in found] == sorted({entry[0] for entry in found})
    return found


class AgainstDictionary(RuleBasedStateMachine):
    """Any sequence of changes, restarts and merges leaves what a dictionary would hold."""

    base: Path

    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(dir=self.base)) / "store"
        self.store = opened(self.root)
        self.reader = opened(self.root, "r")
        self.model: dict[int, tuple[float, int]] = {}
        self.durable = dict(self.model)

    @rule(
        ids=st.lists(st.integers(0, 60), unique=True, max_size=25),
        value=st.sampled_from([0.0, 1.5, 60000.0, 70000.0]),
        group=st.integers(0, 2),
    )
    def append(self, ids: list[int], value: float, group: int) -> None:
        add(self.store, ids, value, group)
        self.model.update(dict.fromkeys(ids, (value, group)))

    @rule(start=st.integers(0, 60), length=st.integers(0, 30))
    def delete(self, start: int, length: int) -> None:
        gone = [i for i in self.model if start <= i < start + length]
        self.store.delete(IdRanges([(start, start + length)]))
        for i in gone:
            del self.model[i]

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.durable = dict(self.model)

    @rule(ratio=st.integers(1, 5))
    def compact(self, ratio: int) -> None:
        self.store.compact(ratio=ratio)
        self.durable = dict(self.model)
        for found in self.store.segments_by_group().values():
            assert len(found) <= 7

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = opened(self.root)
        self.durable = dict(self.model)

    @rule()
    def crash(self) -> None:
        """Forget what is in memory, as a crash does."""
        self.store._lock.release()
        self.store = opened(self.root)
        self.model = dict(self.durable)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = [(i, *self.model[i]) for i in sorted(self.model)]
        assert content(self.store) == expected
        assert self.store.count() == len(expected)
        some = IdRanges([(5, 20), (33, 34)])
        assert content(self.store, some, 4) == [e for e in expected if 5 <= e[0] < 20 or e[0] == 33]
        assert content(self.reader) == [(i, *self.durable[i]) for i in sorted(self.durable)]
        on_disk = {f"{p.parent.name}/{p.name}" for p in self.root.glob("*/*")}
        assert on_disk == self.store._files.on_disk

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            assert self.reader.verify() == []


@pytest.mark.parametrize("buffer_size", [100, pytest.param(32 << 20, marks=pytest.mark.slow)])
def test_against_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_size: int) -> None:
    monkeypatch.setattr(segments_module, "BUFFER_SIZE", buffer_size)
    monkeypatch.setattr(segments_module, "_MANY_SEGMENTS", 4)
    monkeypatch.setattr(manifest_module, "PART_SIZE", 2)
    machine = type("Machine", (AgainstDictionary,), {"base": tmp_path})
    machine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
    machine.TestCase().runTest()


def test_what_is_flushed_is_synced_to_its_end_and_so_is_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, names, sync = dict[int, int](), dict[int, set[tuple[str, int]]](), os.fsync

    def remember(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = {(one.name, one.inode()) for one in os.scandir(descriptor)}
        else:
            sizes[found.st_ino] = found.st_size
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    with closing(opened(tmp_path)) as store:
        for number in range(2):
            add(store, [number, number + 9], 1.0)
            store.flush()
        unsynced = {"writer.lock", "writer.json", "changing.lock"}  # of use to those that run now alone
        for path in [tmp_path, *tmp_path.rglob("*")]:
            found = path.stat()
            if path.is_dir():
                there = {(one.name, one.stat().st_ino) for one in path.iterdir() if one.name not in unsynced}
                assert there <= names.get(found.st_ino, set()), path
            elif path.name not in unsynced:
                assert sizes[found.st_ino] == found.st_size, path


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["coded", pytest.param("plain", marks=pytest.mark.exhaustive)])
def test_killed_anywhere(tmp_path: Path, record_property, keys: str) -> None:
    """What was flushed survives a kill at every failpoint, all or nothing of the rest, and no file leaks."""
    script = Path(__file__).with_name("kill_everywhere.py")
    result = subprocess.run(
        [sys.executable, script, tmp_path, keys], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    killed = json.loads(result.stdout)
    assert len(killed) >= 150
    record_property("killed", killed)


def test_modes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with pytest.raises(DatastoreNotFoundError):
        opened(root, "r")
    root.write_text("a file in the place of the folder")
    with pytest.raises(DatastoreNotFoundError, match=r"no datastore at .*: check the path"):
        opened(root, "r")
    root.unlink()
    store = opened(root, "x")
    with pytest.raises(LockedError, match=r"process \d+ on .*mode 'r'"):
        opened(root, "a")
    reader = opened(root, "r")
    with pytest.raises(ReadOnlyError):
        add(reader, [1], 0)
    store.close()
    store.close()
    with pytest.raises(DatastoreClosedError):
        store.count()
    with pytest.raises(DatastoreClosedError):
        add(store, [1], 0)
    with pytest.raises(DatastoreExistsError):
        opened(root, "x")
    with pytest.raises(DatastoreMismatchError, match="dim 3 and metric l2, not dim 3 and metric ip"):
        KeySegments(root, DIM, Metric.IP, "a")
    opened(root).close()  # the refused ones left the lock free


def test_reader_keeps_what_it_reads(tmp_path: Path) -> None:
    """A batch iterator goes on over files that a writer has replaced and removed meanwhile."""
    with closing(opened(tmp_path / "store")) as store:
        add(store, list(range(100)), 1)
        store.flush()
        reader = opened(tmp_path / "store", "r")
        batches = reader.iterate(ids=None, batch_size=10)
        next(batches)
        add(store, list(range(100)), 2, group=1)
        store.compact(ratio=10)
        assert [entry[1] for entry in content(reader)] == [2] * 100
        assert sum(len(ids) for ids, _, _ in batches) == 90


@pytest.mark.slow
def test_few_segments_and_no_dead_rows(tmp_path: Path) -> None:
    """Many small flushes leave few files, and compacting gives back the space of what was deleted."""
    with closing(opened(tmp_path / "store")) as store:
        for i in range(200):
            add(store, [i], 0)
            store.flush()
        assert len(store.snapshot()) <= 33
        store.delete(IdRanges([(0, 150)]))
        store.compact(ratio=10)
        assert sum(segment.rows for segment in store.snapshot()) == 50
        assert len(store.snapshot()) <= 4
        store.delete(IdRanges([(0, 200)]))
        store.flush()
        assert not list((tmp_path / "store" / "segments").iterdir())


def test_compacting_leaves_a_large_segment_alone_unless_it_is_rewritten_anyway(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store")) as store:
        for ids in (range(20), range(20, 40), range(40, 41)):
            add(store, list(ids), 0)
            store.flush()
        store.compact(ratio=10)
        assert [segment.rows for segment in store.snapshot()] == [41]
        add(store, [50], 0)
        store.compact(ratio=10)
        assert sorted(segment.rows for segment in store.snapshot()) == [1, 41]


def test_many_single_rows_stay_few_buffers(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store")) as store:
        for i in range(1000):
            add(store, [i], 0)
        assert len(store.snapshot()) <= 10
