"""Many groups and segments: what a change costs does not grow with them, and no descriptor is held."""

import gc
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from knnstore_faiss import FaissDatastore
from knnstore_hnswlib import HnswlibDatastore

from knnstore.datastore import EmbeddedDatastore, Filter, IdRanges, Metric, Neighbors
from knnstore.datastore.embedded import manifest as manifest_module
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.manifest import Manifest, ManifestPart
from knnstore.datastore.embedded.mapped import MappedFile
from knnstore.datastore.embedded.merging import merge_records
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.neighbors import merge_many, merge_neighbors
from knnstore.durable import StoredFile
from knnstore.errors import CorruptDatastoreError, DatastoreError

DIM = 4
ROWS = 20
ENGINES: list[tuple[type[EmbeddedDatastore], dict[str, Any]]] = [
    (FaissDatastore, {"index": "IVF2,SQ8"}),
    (HnswlibDatastore, {"exact_up_to": 0}),
]


def records(groups: list[int], first: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """So many records for each group, one group after the other."""
    ids = np.arange(first, first + rows * len(groups))
    keys = np.random.default_rng(first).normal(size=(len(ids), DIM)).astype(np.float16)
    return ids, keys.astype(np.float32), np.repeat(np.array(groups, np.int32), rows)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Counts the functions that are called, Python's and C's: a time that no other process alters."""
    calls = 0

    def note(_frame: object, happened: str, _argument: object) -> None:
        nonlocal calls
        calls += happened in ("call", "c_call")

    former = sys.getprofile()
    gc.disable()  # what it would finalize meanwhile is of other tests
    sys.setprofile(note)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(former)
        gc.enable()


@pytest.mark.parametrize(("engine", "params"), ENGINES)
def test_no_file_keeps_a_descriptor(tmp_path: Path, engine: type[EmbeddedDatastore], params: Any) -> None:
    """Neither keys nor indexes: not of a writer, not of a reader, not while searching or reading."""
    groups, query = list(range(30)), np.zeros((1, DIM), np.float32)
    before = descriptors()
    with engine.open(tmp_path / "store", dim=DIM, **params) as store:
        store.add(*records(groups, 0, 300))
        store.optimize()
        assert len(list((tmp_path / "store" / "indexes").iterdir())) == len(groups)
        assert store.search(query, 5).ids.min() >= 0
        with engine.open(tmp_path / "store", dim=DIM, mode="r", **params) as reader:
            reader.search(query, 5)
            batches = reader.iterate(batch_size=7)
            next(batches)
            assert descriptors() <= before + 1  # the lock's
            assert reader.verify() == []
    assert descriptors() == before


def test_where_no_more_maps_are_allowed_it_is_said(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    try:
        with pytest.raises(DatastoreError, match=r"cannot map .*large: Cannot allocate memory; optimize"):
            MappedFile(tmp_path, StoredFile("large", 1 << 40, ""))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.slow
def test_a_change_costs_the_same_however_many_groups_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding a group, searching it and removing some of it; and what is written for it."""
    monkeypatch.setattr(manifest_module, "PART_SIZE", 16)
    query = np.zeros((1, DIM), np.float32)
    with FaissDatastore.open(tmp_path / "store", dim=DIM) as store:

        def costs(group: int) -> list[int]:
            first = group * ROWS
            steps = [
                lambda: (store.add(*records([group], first)), store.flush()),
                lambda: store.search(query, 3, where=Filter(IdRanges([(0, 2**40)]), frozenset({group}))),
                lambda: (store.delete(IdRanges([(first, first + 5)])), store.flush()),
            ]
            found = []
            for step in steps:
                with counted() as calls:
                    step()
                    found.append(calls())
            return [*found, (tmp_path / "store" / "manifest.json").stat().st_size]

        few = np.max([costs(group) for group in range(50)], axis=0)
        store.add(*records(list(range(1000, 1500)), 1000 * ROWS))
        store.flush()
        many = np.max([costs(group) for group in range(3000, 3050)], axis=0)
    assert (many <= 1.5 * few).all(), (few, many)


@pytest.mark.slow
@pytest.mark.parametrize("noticed", ["when it is mapped", "when it is used", "by verify"])
def test_damage_costs_the_same_however_many_groups_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    """Once it is noticed, its segment is left out; no other group is looked at for it, by no search."""
    monkeypatch.setattr(manifest_module, "PART_SIZE", 16)
    query = np.zeros((1, DIM), np.float32)
    costs = []
    for groups in (20, 400):
        root = tmp_path / str(groups)
        with FaissDatastore.open(root, dim=DIM) as store:
            for first in (0, 10**6, 2 * 10**6):  # three segments each
                store.add(*records(list(range(groups)), first))
                store.flush()
        lost = {entry.group: entry for entry in Manifest.read(root).segments if entry.first_id < 10**6}
        for group in (7, 9):
            path, size = root / lost[group].keys.name, lost[group].keys.size
            path.write_bytes(b"" if noticed == "when it is mapped" else bytes(size))
        with FaissDatastore.open(root, dim=DIM) as store:

            def found_in(group: int, k: int = 9 * ROWS, store: FaissDatastore = store) -> int:
                where = Filter(IdRanges([(0, 2**40)]), frozenset({group}))
                return int((store.search(query, k, where=where).ids >= 0).sum())

            before = store._segments.segments_by_group()
            if noticed == "by verify":
                assert len(store.verify()) == 2
            for group in (7, 9):  # one after the other
                assert found_in(group) == 2 * ROWS
            assert [part.name for part in store.list_damaged_parts()] == [lost[7].name, lost[9].name]
            after = store._segments.segments_by_group()
            assert all(after[group] is before[group] for group in before if group not in (7, 9))
            assert store.count() == 3 * groups * ROWS
            with counted() as calls:
                found_in(7, 3)
                costs.append(calls())
            with counted() as calls:
                store.add(*records([9], 3 * 10**6))
                store.flush()
                assert found_in(9) == 3 * ROWS
                costs.append(calls())
            assert store._segments.segments_by_group()[7] is after[7]
            if groups == 20:
                store.optimize()  # merges what is sound
                assert {len(found) for found in store._segments.segments_by_group().values()} == {1}
                assert found_in(7) == 2 * ROWS
    assert (np.array(costs[2:]) <= 1.5 * np.array(costs[:2])).all(), costs


@pytest.mark.slow
def test_reading_costs_as_much_as_there_is(tmp_path: Path) -> None:
    """All batches but the last are full, and twice the segments cost twice as much."""
    costs = []
    for groups in (200, 400):
        with closing(KeySegments(tmp_path / str(groups), DIM, Metric.L2, "a")) as store:
            store.append(*records(list(range(groups)), 0))
            store.flush()
            with counted() as calls:
                sizes = [len(ids) for ids, _, _ in store.iterate(ids=None, batch_size=1000)]
                costs.append(calls())
            assert sizes == [1000] * (groups * ROWS // 1000)
    assert costs[1] <= 2.3 * costs[0]


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_interleaved_segments_are_read_in_order(batch_size: int) -> None:
    """As a sort of everything gives it, where the segments' ids overlap in every way."""
    rng = np.random.default_rng(batch_size)
    ids = np.sort(rng.choice(100_000, 6000, replace=False))
    owners = np.where(ids < 50_000, rng.integers(0, 40, 6000), ids // 1000)  # at random, then one by one
    dead = rng.random(6000) < 0.2
    segments = []
    for group in np.unique(owners).tolist():
        mine = owners == group
        segment = Segment.from_arrays(group, ids[mine], np.repeat(ids[mine, None], DIM, 1).astype(np.float32))
        rows = IdRanges.from_ids(np.flatnonzero(dead[mine]))
        segments.append(replace(segment, dead=rows))
    wanted = IdRanges([(start, start + 700) for start in range(0, 100_000, 1000)])
    batches = list(merge_records(segments, ids=wanted, batch_size=batch_size))
    left = ~dead & wanted.contains(ids)
    assert np.concatenate([batch[0] for batch in batches]).tolist() == ids[left].tolist()
    assert np.concatenate([batch[1][:, 0] for batch in batches]).tolist() == ids[left].tolist()
    assert np.concatenate([batch[2] for batch in batches]).tolist() == owners[left].tolist()
    assert {len(batch[0]) for batch in batches[:-1]} <= {batch_size}


def test_many_parts_of_a_search_are_merged_a_few_at_a_time() -> None:
    rng = np.random.default_rng(0)
    parts = []
    for number in range(300):
        width = int(rng.integers(1, 6))
        distances = np.sort(rng.integers(0, 50, (3, width)), axis=1).astype(np.float32)
        parts.append(Neighbors(number * 10 + np.tile(np.arange(width), (3, 1)), distances))
    found, expected = merge_many(iter(parts), 3, 5), merge_neighbors(parts, 3, 5)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.distances.tolist() == expected.distances.tolist()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of so many segments that the manifest has parts."""
    root = tmp_path_factory.mktemp("filled") / "store"
    with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:
        store.append(*records(list(range(3 * manifest_module.PART_SIZE)), 0))
    return root


class TestParts:
    """Most of many segments are listed in files that the manifest names."""

    @pytest.fixture
    def root(self, filled: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(filled, tmp_path / "store"))

    def test_a_change_rewrites_only_what_lists_it(self, root: Path) -> None:
        reader = KeySegments(root, DIM, Metric.L2, "r")
        assert reader.count() == 3 * manifest_module.PART_SIZE * ROWS
        before = set(root.rglob("*.part"))
        with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:
            store.delete(IdRanges([(5, 6)]))
        after = set(root.rglob("*.part"))
        assert len(before) == 2
        assert len(before - after) == 1
        assert reader.count() == 3 * manifest_module.PART_SIZE * ROWS - 1
        assert reader.verify() == []
        assert {path.relative_to(root).as_posix() for path in root.glob("*/*")} == Manifest.read(
            root
        ).file_names()

    @pytest.mark.parametrize("damage", ["flipped", "short", "removed"])
    @pytest.mark.parametrize("mode", ["r", "a"])
    def test_damage_is_named_and_nothing_is_removed(self, root: Path, damage: str, mode: Any) -> None:
        part = min(root.rglob("*.part"))
        content = bytearray(part.read_bytes())
        content[100] ^= 1
        if damage == "removed":
            part.unlink()
        else:
            part.write_bytes(content if damage == "flipped" else content[:-1])
        keys = set(root.rglob("*.keys"))
        with pytest.raises(CorruptDatastoreError, match=f"{part.name} is missing or damaged"):
            KeySegments(root, DIM, Metric.L2, mode)
        assert set(root.rglob("*.keys")) == keys

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "7",
            "[7]",
            "[" * 5000,
            '[{"index":null}]',
            "other name",
            "other rows",
            "others' rows",
            "other group",
            "a path",
            "a name that is none",
        ],
    )
    def test_what_makes_no_sense_is_said(self, root: Path, text: str) -> None:
        """Whoever makes a part and a manifest that go together makes no path and no number of his own."""
        manifest = root / "manifest.json"
        content = json.loads(manifest.read_bytes())["content"]
        part = content["parts"][0]
        path = root / part["name"]
        listed = json.loads(path.read_bytes())
        if text == "a path":
            part["name"] = "segments/../../secret.part"
        elif text == "a name that is none":
            part["name"] = 7
        else:
            other: dict[str, dict[str, Any]] = {
                "other name": {"name": 7},
                "other rows": {"rows": "1"},
                "others' rows": {"rows": ROWS + 1},
                "other group": {"group": 1 << 31},
            }
            listed[0] |= other.get(text, {})
            made = json.dumps(listed).encode() if text.startswith("other") else text.encode()
            path.write_bytes(made)
            part |= {"size": len(made), "sha256": sha256(sha256(made).digest() if made else b"").hexdigest()}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        manifest.write_text(
            json.dumps({"sha256": sha256(canonical.encode()).hexdigest(), "content": content})
        )
        for mode in ("r", "a"):
            with pytest.raises(CorruptDatastoreError, match="contradicts itself: restore it"):
                KeySegments(root, DIM, Metric.L2, mode)

    def test_a_part_that_is_replaced_while_it_is_read(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader that opens, one that is asked and one that verifies read what replaced it."""
        reader = KeySegments(root, DIM, Metric.L2, "r")
        read, rows = ManifestPart.read, reader.count()

        def replace_and_read(root: Path, file: StoredFile, dim: int) -> ManifestPart:
            monkeypatch.setattr(ManifestPart, "read", read)
            with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:  # one row of each segment
                store.delete(IdRanges([(first, first + 1) for first in range(removed, rows, ROWS)]))
            return read(root, file, dim)

        for removed in (1, 2, 3):
            monkeypatch.setattr(ManifestPart, "read", replace_and_read)
            if removed == 1:
                assert KeySegments(root, DIM, Metric.L2, "r").count() == rows * 19 // 20
            elif removed == 2:
                assert reader.count() == rows * 18 // 20
            else:
                assert reader.verify() == []

    def test_no_part_names_the_first_id_of_what_was_removed_once_it_is_vacuumed(self, root: Path) -> None:
        named = b'"first_id":20,'
        assert any(named in path.read_bytes() for path in root.rglob("*.part"))
        with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:
            store.delete(IdRanges([(20, 21)]))
            store.vacuum()
        assert not any(named in path.read_bytes() for path in root.rglob("*") if path.is_file())

    def test_a_store_that_shrinks_has_none(self, root: Path) -> None:
        with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:
            store.delete(IdRanges([(100, 2**40)]))
        assert not list(root.rglob("*.part"))
        with closing(KeySegments(root, DIM, Metric.L2, "a")) as store:
            assert store.count() == 100
        assert '"parts":[]' in (root / "manifest.json").read_text()
