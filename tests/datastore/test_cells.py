"""The cells adapter: the conformance kit, and an oracle for what queries visit."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from knnstore_cells import CellsDatastore, partition, visiting
from knnstore_cells.scanning import CodeScanner

from knnstore.datastore import Filter, IdRanges, Metric, Neighbors, Visits, split_visits
from knnstore.testing import DatastoreTests
from knnstore.testing.searching import VisitTests
from tests.datastore.clusters import clustered
from tests.datastore.optimizing import OptimizingCells

DIM = 16


@pytest.mark.slow
class TestOneCell(DatastoreTests):  # which is what small groups have
    datastore_class = CellsDatastore


class TestOnDevice(VisitTests):
    datastore_class = CellsDatastore
    params: ClassVar[dict[str, Any]] = {"cells": 4, "device": "cpu"}


class TestCells(DatastoreTests):
    datastore_class = OptimizingCells
    params: ClassVar[dict[str, Any]] = {"cells": 4}

    @pytest.fixture(autouse=True)
    def no_set_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(visiting, "_SMALL", 0)


def put(store: CellsDatastore, rows: np.ndarray, keys: np.ndarray, group: int = 0) -> None:
    """Add records whose id is three times their row."""
    store.add(rows * 3, keys[rows], np.full(len(rows), group, np.int32))


def ranks_of(visits: list[Visits]) -> dict[tuple[int, int], int]:
    """How many cells are nearer, by query and the first record of a cell that has some."""
    return {
        (int(query), int(visit.ids.min())): int(rank)
        for visit in split_visits(visits)
        for query, rank in zip(visit.queries, visit.ranks, strict=True)
    }


def centers_on_disk(store: CellsDatastore) -> list[np.ndarray]:
    """Of each segment that has an index."""
    return [
        cells.centers
        for segment in store._segments.snapshot()
        if (cells := store._read_segment_cells(segment))
    ]


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize(("memory", "device"), [(0, "none"), (256, "none"), (0, "cpu")])
def test_a_query_visits_whole_cells_and_the_nearest(
    tmp_path: Path, metric: Metric, memory: int, device: str
) -> None:
    """What is visited is what an independent partition by the same centers says, in all segments."""
    keys, queries = clustered(3000), clustered(40, seed=1)
    params: dict[str, Any] = {"cells": 32, "memory": memory, "device": device}
    store = CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, **params)
    put(store, np.arange(2500), keys)
    store.optimize()
    put(store, np.arange(2500, 2600), keys)
    store.flush()
    put(store, np.arange(2600, 3000), keys)  # in memory only
    store.delete(IdRanges([(300, 900)]))
    live = np.setdiff1d(np.arange(3000), np.arange(100, 300))
    (centers,) = [found.astype(np.float64) for found in centers_on_disk(store)]

    def measured(one: np.ndarray, others: np.ndarray, by: Metric) -> np.ndarray:
        products = one.astype(np.float64) @ others.astype(np.float64).T
        squares = (one.astype(np.float64) ** 2).sum(1)[:, None] + (others.astype(np.float64) ** 2).sum(1)
        return squares - 2 * products if by is Metric.L2 else -products

    owners = measured(keys, centers, Metric.L2).argmin(1)
    for probes in (1, 5):
        visits = split_visits(store.visit(queries, probes))
        nearest = np.argsort(measured(queries, centers, metric), axis=1)[:, :probes]
        for query in range(len(queries)):
            mine = [visit for visit in visits if query in visit.queries]
            found = np.concatenate([visit.ids for visit in mine])
            expected = live[np.isin(owners[live], nearest[query])]
            assert sorted(found.tolist()) == (expected * 3).tolist()
            distances = np.concatenate([v.distances[v.queries.tolist().index(query)] for v in mine])
            truth = measured(queries[query : query + 1], keys[found // 3], metric)[0]
            np.testing.assert_allclose(distances, truth, rtol=1e-4, atol=1e-3)
    store.close()


def test_cells_stay_where_they_are_until_the_group_has_grown(tmp_path: Path) -> None:
    """Adding and merging leave the centers alone; a group of twice the records has other ones, all alike."""
    keys = clustered(60_000)
    with CellsDatastore.open(tmp_path / "store", dim=DIM) as store:
        put(store, np.arange(6_000), keys)
        store.flush()
        assert [len(visit.ids) for visit in split_visits(store.visit(keys[:1], 1))] == [6_000]
        put(store, np.arange(6_000, 20_000), keys)
        assert len(split_visits(store.visit(keys[:1], 1))[0].ids) < 6_000, "one cell is not enough any more"
        store.optimize()
        (visit,) = split_visits(store.visit(keys[:1], 1))
        assert len(visit.ids) < 6_000, "what was optimized is searched as before"
        (former,) = centers_on_disk(store)
        assert former.shape == (64, DIM)
        put(store, np.arange(20_000, 22_000), keys)
        store.optimize()
        store._segments.compact(ratio=1_000)  # into one segment, which has no index yet
        assert len(store._segments.snapshot()) == 1
        assert centers_on_disk(store) == []
    with CellsDatastore.open(tmp_path / "store", dim=DIM) as store:
        store.optimize()
        put(store, np.arange(22_000, 23_000), keys)
        store.optimize()
        kept = centers_on_disk(store)
        put(store, np.arange(23_000, 60_000), keys)
        store.optimize()
        grown = centers_on_disk(store)
    assert {len(centers) for centers in kept} == {64}
    assert {len(centers) for centers in grown} == {256}
    assert all(np.array_equal(centers, grown[0]) for centers in grown)


def test_what_is_rewritten_stays_in_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Erasing compares no key with a center, merging those alone that are new or have a new key."""
    keys, compared = clustered(6000), list[int]()
    with CellsDatastore.open(tmp_path / "store", dim=DIM, cells=16) as store:
        put(store, np.arange(4000), keys)
        put(store, np.arange(4000, 4500), keys, group=1)
        store.optimize()

        def cells() -> dict[int, int]:
            found = [
                (one, store._read_segment_cells(one)) for one in store._segments.snapshot() if one.group == 0
            ]
            return {
                int(id): int(cell)
                for segment, of_it in found
                for id, cell in zip(segment.columns.ids, of_it.owners, strict=True)
            }

        before, kept = cells(), centers_on_disk(store)
        look = partition.NearestCenter.__call__
        monkeypatch.setattr(
            partition.NearestCenter,
            "__call__",
            lambda self, rows: (compared.append(len(rows)), look(self, rows))[1],
        )
        store.delete(IdRanges([(300, 900), (13_000, 13_100)]))
        store.vacuum()
        assert compared == []
        left = {id: cell for id, cell in before.items() if not 300 <= id < 900}
        assert cells() == left
        moved = keys.copy()
        moved[:100] = keys[-100:]
        put(store, np.r_[:100, 4500:6000], moved)
        store.optimize()
        assert len([one for one in store._segments.snapshot() if one.group == 0]) == 1
        assert sum(compared) == 1600
        assert all(np.array_equal(*pair) for pair in zip(kept, centers_on_disk(store), strict=True))
        after = cells()
        truth = torch.cdist(torch.from_numpy(moved), torch.from_numpy(kept[0])).argmin(1).tolist()
        assert after == {row * 3: truth[row] for row in range(6000) if row * 3 in after}
        assert len(after) == 4000 - 200 + 1500


def test_a_search_compares_only_new_records_with_the_centers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records stay in their cells while segments grow, go to disk and are merged; replaced records move."""
    keys, compared = clustered(6000), list[int]()
    nearest = partition.NearestCenter.__call__
    with CellsDatastore.open(tmp_path / "store", dim=DIM, cells=16) as store:
        put(store, np.arange(4000), keys)
        store.search(keys[:1], 1)
        monkeypatch.setattr(
            partition.NearestCenter,
            "__call__",
            lambda self, rows: (compared.append(len(rows)), nearest(self, rows))[1],
        )
        for start in range(4000, 6000, 500):
            put(store, np.arange(start, start + 500), keys)
            if start == 5000:
                store.flush()
            store.search(keys[:1], 1)
        assert sum(compared) == 2000
        compared.clear()
        store.flush()
        store._segments._merge_segments(0, ratio=100, indexed=True)
        store.search(keys[:1], 1)
        assert compared == []
        moved = keys.copy()
        moved[:100] = keys[-100:]
        put(store, np.arange(100), moved)
        found = store.search(moved[:100], 2)
        assert all(row * 3 in ids for row, ids in enumerate(found.ids.tolist()))


def test_no_center_is_a_key_that_was_erased(tmp_path: Path) -> None:
    """A cell of one record has it as its center, in the index of every segment."""
    keys = clustered(4400)
    keys[4000::4] *= np.linspace(2, 40, 100)[:, None]  # some lie alone
    with CellsDatastore.open(tmp_path / "store", dim=DIM, cells=64) as store:
        put(store, np.arange(4000), keys)
        store.flush()
        put(store, np.arange(4000, 4400), keys)
        store.optimize()

        def cells() -> dict[int, int]:
            found = [(one, store._read_segment_cells(one)) for one in store._segments.snapshot()]
            return {
                int(id): int(cell)
                for segment, of_it in found
                for id, cell in zip(segment.columns.ids, of_it.owners, strict=True)
            }

        before, (centers, _) = cells(), centers_on_disk(store)
        counts = np.bincount(list(before.values()), minlength=64)
        alone = next(id for id, cell in before.items() if counts[cell] == 1)
        distance = np.abs(centers - keys[alone // 3]).max(1).min()
        assert distance < 0.01 * np.abs(keys[alone // 3]).max()
        store.delete(IdRanges([(alone, alone + 1)]))
        store.vacuum()
        assert cells() == {id: cell for id, cell in before.items() if id != alone}
        after = centers_on_disk(store)
        assert len(after) == 2
        assert np.array_equal(*after)
        assert (np.abs(after[0] - keys[alone // 3]).max(1) > 10 * distance).all()


def test_a_damaged_index_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; what is found is the same up to where cells end, and optimize makes it anew."""
    keys, queries = clustered(4000), clustered(20, seed=1)
    with CellsDatastore.open(tmp_path / "store", dim=DIM, cells=16) as store:
        put(store, np.arange(4000), keys)
        store.optimize()
        (file,) = [segment.index.file.name for segment in store._segments.snapshot() if segment.index]
    with (tmp_path / "store" / file).open("r+b") as damaged:
        damaged.seek(700)
        damaged.write(b"\xff\xff")
    with CellsDatastore.open(tmp_path / "store", dim=DIM, cells=16) as store:
        assert "SHA-256" in store.verify()[0]
        everything = split_visits(store.visit(queries, 16))
        assert sum(visit.distances.size for visit in everything) == 20 * 4000
        store.search(queries, 5)
        assert caplog.text.count("in memory until `knnstore optimize`") == 1
        store.optimize()
        assert store.verify() == []
        assert len(centers_on_disk(store)) == 1


def test_small_and_large_groups_share_the_probes(tmp_path: Path) -> None:
    """A group of few records is one cell among those of the others, visited where it is near."""
    keys, far = clustered(20_000), clustered(100, seed=3) + 50
    with CellsDatastore.open(tmp_path / "store", dim=DIM) as store:
        put(store, np.arange(20_000), keys)
        store.add(np.arange(100) + 90_000, far, np.ones(100, np.int32))
        store.optimize()
        (visit,) = split_visits(store.visit(far[:3] + 0.1, 1))
        assert sorted(visit.ids.tolist()) == list(range(90_000, 90_100))
        assert all((visit.ids < 90_000).all() for visit in split_visits(store.visit(keys[:50], 2)))


def test_what_is_kept_between_visits_is_bounded(tmp_path: Path) -> None:
    """Keys that have no room any more are read again."""
    keys = clustered(40_000)
    with CellsDatastore.open(tmp_path / "store", dim=DIM, memory=1) as store:
        put(store, np.arange(40_000), keys)
        store.optimize()
        for _ in range(2):
            found = split_visits(store.visit(keys[:1000], 128))
        assert sum(visit.distances.size for visit in found) == 1000 * 40_000
        held = [cell.keys.nbytes for cell in store._cell_cache._cells.values()]
        assert 0 < sum(held) == store._cell_cache._held <= 1 << 20


@pytest.mark.slow
def test_tables_are_used_where_decoded_keys_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where few queries share a cell; what is kept of both kinds has room together."""
    pytest.importorskip("faiss")
    keys, scans = clustered(40_000), list[int]()
    codes: dict[str, Any] = {"codes": "pq4", "coded_from": 8192}
    scan = CodeScanner.scan_by_cell
    monkeypatch.setattr(
        CodeScanner, "scan_by_cell", lambda self, *given: (scans.append(1), scan(self, *given))[1]
    )
    with CellsDatastore.open(tmp_path / "store", dim=DIM, **codes, memory=1) as store:
        put(store, np.arange(40_000), keys)
        store.optimize()

        def held() -> int:
            return store._cell_cache._held + sum(sharer.held for sharer in store._cell_cache._sharers)

        for queries, probes, by_tables in ((1000, 64, False), (200, 8, True), (1000, 64, False)):
            scans.clear()
            store.visit(keys[:queries], probes)
            assert bool(scans) == by_tables
            assert 0 < held() <= 1 << 20
        store._cell_cache.size = 100_000
        for start in range(0, 2000, 100):
            store.visit(keys[start : start + 100], 1)
            assert 0 < held() < 40_000 * 24 // 2
    with CellsDatastore.open(tmp_path / "store", dim=DIM, **codes, memory=8) as store:
        scans.clear()
        store.visit(keys[:200], 8)
        assert not scans, "all have room"


def test_among_very_many_centers_a_near_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking in parts finds the nearest of clustered keys nearly always, and never one that is far."""
    keys, centers = torch.from_numpy(clustered(4000)), torch.from_numpy(clustered(600, seed=3))
    truth = torch.cdist(keys, centers)
    np.testing.assert_array_equal(partition.NearestCenter(centers)(keys), truth.argmin(1))
    monkeypatch.setattr(partition, "_ALL_COMPARED", 100)
    found = partition.NearestCenter(centers)(keys)
    assert (found == truth.argmin(1)).float().mean() > 0.9
    assert (truth.gather(1, found[:, None])[:, 0] / truth.amin(1)).max() < 2


def test_centers_in_two_levels_are_as_near_as_in_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = clustered(6000)
    with CellsDatastore.open(tmp_path / "store", dim=DIM) as store:
        put(store, np.arange(6000), keys)
        store.flush()
        segments = list(store._segments.snapshot())
        away = []
        for one_level in (256, 16):
            monkeypatch.setattr(partition, "_ONE_LEVEL", one_level)
            centers = torch.from_numpy(partition.fit_centers(segments, 128))
            assert centers.shape == (128, DIM)
            nearest = torch.cdist(torch.from_numpy(keys), centers).min(1)
            away.append(float(nearest.values.square().mean()))
            assert len(nearest.indices.unique()) > 120
    assert away[1] < 1.1 * away[0]


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["none", "int8", "pq4"])
@pytest.mark.parametrize("metric", list(Metric))
def test_a_device_measures_as_the_processor_does(tmp_path: Path, metric: Metric, codes: str) -> None:
    """Codes and keys beside each other, two groups, a filter, and what was deleted; then a new segment."""
    keys, queries = clustered(3000), clustered(200, seed=1)
    params: dict[str, Any] = {"cells": 8, "codes": codes, "coded_from": 1000}
    with CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, **params) as store:
        put(store, np.arange(1500), keys)
        put(store, np.arange(1500, 2000), keys, group=1)
        store.optimize()
    stores = [
        CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, mode=mode, device=device, **params)
        for device, mode in (("none", "a"), ("cpu", "r"))
    ]
    for change in (
        lambda store: None,
        lambda store: put(store, np.arange(2000, 3000), keys),
        lambda store: store.delete(IdRanges([(300, 900)])),
    ):
        change(stores[0])
        stores[0].flush()
        for where in (
            None,
            Filter(IdRanges([(0, 9000)]), frozenset([1])),
            Filter(ids=IdRanges([(300, 7000)])),
        ):
            found = [Neighbors.from_visits(store.visit(queries, 3, where=where), 200) for store in stores]
            near = [each.select_nearest(each.ids.shape[1]) for each in found]
            np.testing.assert_allclose(near[1].distances, near[0].distances, rtol=1e-4, atol=1e-3)
            assert [sorted(ids) for ids in near[0].ids] == [sorted(ids) for ids in near[1].ids]
    for store in stores:
        store.close()


@pytest.mark.parametrize("codes", ["none", "int8", "pq4"])
@pytest.mark.parametrize("metric", list(Metric))
def test_results_on_a_device_are_those_in_main_memory(tmp_path: Path, metric: Metric, codes: str) -> None:
    """Codes and keys beside each other, three groups, filters, and what was deleted; then a new segment."""
    keys, queries = clustered(3000), clustered(9, seed=1)
    params: dict[str, Any] = {"cells": 8, "codes": codes, "coded_from": 1000}
    with CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, device="cpu", **params) as store:
        put(store, np.arange(1500), keys)
        put(store, np.arange(1500, 2000), keys, group=1)
        put(store, np.arange(2000, 2002), keys, group=2)
        store.optimize()
        for change in (
            lambda: None,
            lambda: put(store, np.arange(2002, 3000), keys),
            lambda: store.delete(IdRanges([(300, 900)])),
        ):
            change()
            store.flush()
            for where in (
                Filter(IdRanges([(0, 9000)])),
                Filter(IdRanges([(4500, 6000)]), frozenset([1])),
                Filter(IdRanges([(300, 7000)])),
                Filter(IdRanges([(6000, 6001)])),
            ):
                for probes in (3, 100):
                    found = store.visit_on_device(torch.from_numpy(queries), probes, where)
                    visits = store.visit(queries, probes, where=where)
                    assert (found.distances < torch.inf).any(1).all(), "a query is compared with nothing"
                    assert found.largest_token >= int(found.tokens.max())
                    compare_by_id(found.tokens.long(), found.distances, visits)


def compare_by_id(ids: torch.Tensor, distances: torch.Tensor, visits: list[Visits]) -> None:
    """Compare the records and distances of each query with those of visits."""
    expected = Neighbors.from_visits(visits, len(ids))
    for row, is_found in enumerate(distances < torch.inf):
        order, is_expected = ids[row, is_found].argsort(), expected.ids[row] >= 0
        expected_order = expected.ids[row, is_expected].argsort()
        np.testing.assert_array_equal(
            ids[row, is_found][order], expected.ids[row, is_expected][expected_order]
        )
        np.testing.assert_allclose(
            distances[row, is_found][order],
            expected.distances[row, is_expected][expected_order],
            rtol=1e-4,
            atol=1e-3,
        )


def test_a_device_leaves_to_main_memory_what_it_cannot_do(tmp_path: Path) -> None:
    """Without keys on it, for too many queries, and where no record matches."""
    keys, everything = clustered(500), Filter(IdRanges([(0, 9000)]))
    for device, count, where, is_done in (
        ("cpu", 64, everything, True),
        ("none", 64, everything, False),
        ("cpu", 65, everything, False),
        ("cpu", 0, everything, False),
        ("cpu", 1, Filter(IdRanges([(1 << 30, 1 << 31)])), False),
    ):
        with CellsDatastore.open(tmp_path / f"{device}", dim=DIM, device=device) as store:
            put(store, np.arange(500), keys)
            store.flush()
            found = store.visit_on_device(torch.from_numpy(clustered(count)), 2, where)
            assert (found is not None) == is_done


@pytest.mark.parametrize(
    ("params", "sizes"),
    [({"codes": "none"}, (6000, 5000)), ({"cells": 8, "codes": "pq4", "coded_from": 1200}, (1000, 2000))],
    ids=["one cell becomes many", "codes beside keys"],
)
def test_a_device_follows_a_group_that_has_grown(
    tmp_path: Path, params: dict[str, Any], sizes: tuple[int, int]
) -> None:
    """The segment that it holds stays, and is in other cells then, or in the space of a codec."""
    (first, more), keys = sizes, clustered(sum(sizes))
    with CellsDatastore.open(tmp_path / "store", dim=DIM, **params, device="none") as store:
        put(store, np.arange(first), keys)
        store.flush()
        with CellsDatastore.open(tmp_path / "store", dim=DIM, mode="r", **params, device="cpu") as reader:
            for one in (store, reader):
                one.visit(keys[:2], 1)
            put(store, np.arange(first, first + more), keys)
            store.flush()
            asked = clustered(50, seed=1)
            visited = [Neighbors.from_visits(one.visit(asked, 3), 50) for one in (store, reader)]
    found = [each.select_nearest(each.ids.shape[1]) for each in visited]
    assert [set(ids) for ids in found[1].ids] == [set(ids) for ids in found[0].ids]
    np.testing.assert_allclose(found[1].distances, found[0].distances, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    keys = clustered(2000)
    found = []
    for name, is_rounding in (("plain", False), ("autocast", True)):
        with CellsDatastore.open(tmp_path / name, dim=DIM, cells=8) as store:
            put(store, np.arange(2000), keys)
            with torch.autocast("cpu", dtype=dtype, enabled=is_rounding):
                store.optimize()
                nearest = store.search(keys[:20], 5)
                visited = [(visit.ids, visit.distances) for visit in split_visits(store.visit(keys[:20], 2))]
            found.append((nearest.ids, nearest.distances, visited))
    np.testing.assert_equal(found[1], found[0])


@pytest.mark.parametrize("metric", list(Metric))
def test_a_query_alone_meets_what_it_meets_among_others(tmp_path: Path, metric: Metric) -> None:
    """In several groups, one of which has codes and so a space of its own, and with a filter of ids."""
    keys, queries = clustered(2000), clustered(6, seed=1)
    params: dict[str, Any] = {"cells": 8, "codes": "pq4", "coded_from": 1000}
    with CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, **params) as store:
        put(store, np.arange(1500), keys)
        put(store, np.arange(1500, 2000), keys, group=1)
        store.optimize()
        for where in (None, Filter(ids=IdRanges([(300, 5000)]))):
            together = [{} for _ in queries]
            for visit in split_visits(store.visit(queries, 5, where=where)):
                for row, query in enumerate(visit.queries.tolist()):
                    together[query] |= dict(
                        zip(visit.ids.tolist(), visit.distances[row].tolist(), strict=True)
                    )
            for query, expected in zip(queries, together, strict=True):
                (alone,) = split_visits(store.visit(query[None], 5, where=where))
                found = dict(zip(alone.ids.tolist(), alone.distances[0].tolist(), strict=True))
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)
            nearest = Neighbors.from_visits([Visits.from_visit(alone)], 1).sort_nearest(1)
            assert nearest.distances[0, 0] == alone.distances.min()
            assert sorted(nearest.ids[0]) == sorted(alone.ids)
            assert found[int(nearest.ids[0, 0])] == nearest.distances[0, 0]


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize(
    ("count", "codes"),
    [(1, "pq4"), (6, "pq4"), (20, "pq4"), (100, "pq4"), (1, "pq3"), (6, "pq1")],
    ids=["one", "few", "more-than-FAISS-takes-together", "many", "padded-codebooks", "long-codebooks"],
)
def test_queries_may_probe_more_cells_than_one_group_has(
    tmp_path: Path, metric: Metric, count: int, codes: str
) -> None:
    """Two groups with codes, of 8 cells each: a query meets all records, at the distances of their keys."""
    keys, queries = clustered(2400), clustered(count, seed=1)
    params: dict[str, Any] = {"cells": 8, "codes": codes, "coded_from": 1000}
    with CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, **params) as store:
        put(store, np.arange(1200), keys)
        put(store, np.arange(1200, 2400), keys, group=1)
        store.optimize()
        decoded = {
            int(id): key for ids, rows, _ in store.iterate() for id, key in zip(ids, rows, strict=True)
        }
        for probes in (12, 16):
            found: list[dict[int, float]] = [{} for _ in queries]
            for visit in split_visits(store.visit(queries, probes)):
                for row, query in enumerate(visit.queries.tolist()):
                    found[query] |= dict(zip(visit.ids.tolist(), visit.distances[row].tolist(), strict=True))
            assert probes < 16 or all(distances.keys() == decoded.keys() for distances in found)
            for query, distances in zip(queries, found, strict=True):
                rows = np.stack([decoded[id] for id in distances]).astype(np.float64)
                expected = np.square(rows - query).sum(1) if metric is Metric.L2 else -(rows @ query)
                np.testing.assert_allclose(list(distances.values()), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 256])
@pytest.mark.parametrize("metric", list(Metric))
def test_queries_meet_by_tables_what_decoded_keys_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: Metric, memory: int
) -> None:
    """Codes of two groups, by the protocol's own decoding: far from zero, filtered, deleted, added to."""
    pytest.importorskip("faiss")
    keys, queries = clustered(3000) + 30, clustered(6, seed=1) + 30
    params: dict[str, Any] = {"cells": 8, "codes": "pq4", "coded_from": 500, "memory": memory}
    with CellsDatastore.open(tmp_path / "store", dim=DIM, metric=metric, **params) as store:
        put(store, np.arange(1500), keys)
        put(store, np.arange(1500, 2500), keys, group=1)
        store.optimize()
        scans = list[int]()
        monkeypatch.setattr(
            CodeScanner,
            "_compute_products",
            lambda *given, true=CodeScanner._compute_products: scans.append(1) or true(*given),
        )
        for change in (
            lambda: None,
            lambda: store.delete(IdRanges([(300, 900)])),
            lambda: (put(store, np.arange(2500, 3000), keys), store.optimize()),
        ):
            change()
            decoded = {
                int(id): key.astype(np.float64)
                for ids, rows, _ in store.iterate()
                for id, key in zip(ids, rows, strict=True)
            }
            for where in (
                None,
                Filter(IdRanges([(0, 9000)]), frozenset([1])),
                Filter(IdRanges([(600, 5000)])),
            ):
                many = np.repeat(queries, 20, axis=0)
                monkeypatch.setattr(visiting, "_is_scanning_faster", lambda *_: False)
                decoding = store.visit(many, 3, where=where)
                expected = Neighbors.from_visits(decoding, 120)
                assert not scans
                monkeypatch.setattr(visiting, "_is_scanning_faster", lambda *_: True)
                scanning = store.visit(many, 3, where=where)
                by_cell = Neighbors.from_visits(scanning, 120)
                assert ranks_of(scanning) == ranks_of(decoding) != {}
                assert scans
                scans.clear()
                both = [one.select_nearest(one.ids.shape[1]) for one in (expected, by_cell)]
                assert [sorted(row) for row in both[0].ids] == [sorted(row) for row in both[1].ids]
                np.testing.assert_allclose(both[1].distances, both[0].distances, rtol=1e-4, atol=4e-3)
                expected = expected.select_rows(np.arange(0, 120, 20))
                for count in (1, 6):
                    found = Neighbors.from_visits(store.visit(queries[:count], 3, where=where), count)
                    for query, row, distances, others in zip(
                        queries, found.ids, found.distances, expected.ids, strict=False
                    ):
                        assert sorted(row[row >= 0]) == sorted(others[others >= 0])
                        met = np.array([decoded[id] for id in row[row >= 0].tolist()])
                        products = met @ query.astype(np.float64)
                        truth = ((met - query) ** 2).sum(1) if metric is Metric.L2 else -products
                        np.testing.assert_allclose(distances[row >= 0], truth, rtol=1e-4, atol=2e-3)
                        assert np.isinf(distances[row < 0]).all()
                assert scans
                scans.clear()
