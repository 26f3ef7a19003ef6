"""The FAISS adapter: the conformance kit, and the traps of FAISS."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import faiss
import numpy as np
import pytest
from knnstore_faiss import FaissDatastore, faiss_datastore
from knnstore_faiss.faiss_datastore import EXACT_UP_TO, SCALAR_UP_TO, Policy, create_empty_index

from knnstore.datastore import Filter, IdRanges, Metric
from knnstore.errors import ConfigError
from knnstore.testing import DatastoreTests
from tests.datastore.clusters import clustered
from tests.datastore.optimizing import OptimizingFaiss

DIM = 16


class TestAuto(DatastoreTests):  # which is exact search as long as sets are small
    datastore_class = FaissDatastore


@pytest.mark.slow
class TestInvertedFile(DatastoreTests):
    datastore_class = OptimizingFaiss
    params: ClassVar[dict[str, Any]] = {"index": "IVF4,SQ8"}

    @pytest.fixture(autouse=True)
    def no_set_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(faiss_datastore, "_FEW_ROWS", 0)


def filled(path: Path, keys: np.ndarray, *, metric: Metric = Metric.L2, **params: Any) -> FaissDatastore:
    """A store whose record i has id 3 * i, in group i % 2."""
    store = FaissDatastore.open(path / "store", dim=keys.shape[1], metric=metric, **params)
    rows = np.arange(len(keys))
    store.add(rows * 3, keys, (rows % 2).astype(np.int32))
    return store


def true_distances(queries: np.ndarray, keys: np.ndarray, metric: Metric = Metric.L2) -> np.ndarray:
    """All distances, in float64."""
    q, x = queries.astype(np.float64), keys.astype(np.float64)
    return ((q[:, None] - x) ** 2).sum(-1) if metric is Metric.L2 else -(q @ x.T)


def recall(found: np.ndarray, distances: np.ndarray, k: int) -> float:
    """The share of the distances found that are among the k least, ties counted."""
    bound = np.sort(distances, axis=1)[:, k - 1 : k]
    return float((found <= bound + 1e-5 * np.abs(bound)).mean())


def test_a_filter_that_matches_one_small_segment_finds_its_neighbors(tmp_path: Path) -> None:
    """How many lists of a segment are visited depends on what matches in it, not on its size."""
    keys, queries = clustered(129000), clustered(50, seed=1)
    with FaissDatastore.open(tmp_path / "store", dim=DIM, index="IVF256,SQ8") as store:
        for rows in (np.arange(120000), np.arange(120000, 129000)):
            store.add(rows, keys[rows], np.zeros(len(rows), np.int32))
            store.optimize()
        sizes = [
            segment.rows for segments in store._segments.segments_by_group().values() for segment in segments
        ]
        assert sorted(sizes) == [9000, 120000]
        found = store.search(queries, 500, where=Filter(IdRanges([(120000, 129000)])))
        assert (found.ids >= 120000).all()
        assert recall(found.distances, true_distances(queries, keys[120000:]), 500) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("factory", ["IVF32,SQ8", "IVF32,PQ8x4fs", "IVF32,PQ8np", "IVF32,PQ8", "IVF32,Flat"])
def test_inverted_files(tmp_path: Path, factory: str, metric: Metric) -> None:
    """Near all neighbors at exact distances, under filters, with dead rows, also after reopening."""
    keys, queries = clustered(12000), clustered(50, seed=1)
    store = filled(tmp_path, keys, metric=metric, index=factory)
    store.optimize()
    distances = true_distances(queries, keys, metric)
    store.delete(IdRanges([(0, 3000)]))
    distances[:, :1000] = np.inf
    store.add(np.array([7]), queries[:1], np.array([0]))  # above what is indexed
    for reopened in (False, True):
        if reopened:
            store.close()
            store = FaissDatastore.open(tmp_path / "store", dim=DIM, metric=metric, mode="r", index=factory)
        for k in (10, 200):
            found = store.search(queries, k)
            rows = found.ids // 3
            assert (np.diff(found.distances, axis=1) >= 0).all()
            assert recall(found.distances, distances, k) >= 0.9
            known = found.ids != 7
            expected = np.take_along_axis(distances, rows, axis=1)
            np.testing.assert_allclose(found.distances[known], expected[known], rtol=1e-4, atol=1e-3)
        if metric is Metric.L2:
            assert store.search(queries[:1], 1).ids[0, 0] == 7
        for where, mask in (
            (Filter(IdRanges([(0, 36000)]), frozenset([1])), np.arange(12000) % 2 == 1),
            (Filter(IdRanges([(9000, 30000)])), (np.arange(12000) >= 3000) & (np.arange(12000) < 10000)),
            (Filter(IdRanges([(9000, 9300)])), (np.arange(12000) >= 3000) & (np.arange(12000) < 3100)),
        ):
            found = store.search(queries, 50, where=where)
            assert mask[found.ids // 3].all()
            assert recall(found.distances, np.where(mask, distances, np.inf), 50) >= 0.9
    store.close()


def test_always_as_many_as_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One list visited holds few matching rows; the rest is found all the same."""
    monkeypatch.setattr(faiss_datastore, "_FEW_ROWS", 0)
    keys = clustered(6000)
    with filled(tmp_path, keys, index="IVF64,SQ8", nprobe=1) as store:
        store.optimize()
        where = Filter(IdRanges([(i, i + 1) for i in range(0, 18000, 30)]))
        found = store.search(clustered(20, seed=1), 100, where=where)
        assert (found.ids >= 0).all()
        assert np.isfinite(found.distances).all()
        found = store.search(clustered(20, seed=1), 1000, where=where)
        assert ((found.ids >= 0).sum(axis=1) == 600).all()
        assert np.isposinf(found.distances[:, 600:]).all()


def test_nprobe_takes_effect(tmp_path: Path) -> None:
    keys, queries = clustered(20000), clustered(50, seed=1)
    distances = true_distances(queries, keys)
    found = {}
    filled(tmp_path, keys, index="IVF128,SQ8").optimize()
    for probes in (1, 128):
        reader = FaissDatastore.open(tmp_path / "store", dim=DIM, mode="r", index="IVF128,SQ8", nprobe=probes)
        found[probes] = recall(reader.search(queries, 10).distances, distances, 10)
    assert found[1] < 0.9 < 0.98 < found[128]


def test_parameters_of_earlier_versions_are_ignored_with_one_warning(tmp_path: Path, caplog) -> None:
    faiss_datastore._warn_of_ignored.cache_clear()
    keys = clustered(50)
    filled(tmp_path, keys).close()
    removed = {"neighbors": "index"}
    for given in ({"exact_distances": True, "neighbors": "auto"}, removed, removed):
        with FaissDatastore.open(tmp_path / "store", dim=DIM, mode="r", **given) as store:
            assert store.search(keys[:1], 1).ids.tolist() == [[0]]
    (line,) = caplog.messages
    assert "ignores the parameter neighbors" in line


@pytest.mark.parametrize("shift", [0, 200])
@pytest.mark.parametrize("queries", [1, 100])
def test_cancellation(tmp_path: Path, shift: int, queries: int) -> None:
    """Distances between near-duplicates far from the origin are right to 1e-5, in any batch."""
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(2000, 64)) + shift).astype(np.float16).astype(np.float32)
    asked = keys[:queries] + rng.normal(size=(queries, 64)).astype(np.float32) * 1e-2
    with filled(tmp_path, keys, index="exact") as store:
        found = store.search(asked, 20)
    exact = np.take_along_axis(true_distances(asked, keys), found.ids // 3, axis=1)
    np.testing.assert_allclose(found.distances, exact, rtol=2e-5)
    assert (found.ids[:, 0] == 3 * np.arange(queries)).all()


def test_blas_from_the_first_query() -> None:
    assert faiss.cvar.distance_compute_blas_threshold == 1


def test_beyond_half_precision(tmp_path: Path) -> None:
    """Keys beyond 65504 are kept as float32, in exact search and behind an index."""
    keys = clustered(3000) * 1e5
    with filled(tmp_path, keys, index="IVF8,SQ8") as store:
        before = store.search(keys[:5], 3)
        store.optimize()
        after = store.search(keys[:5], 3)
    assert before.ids[:, 0].tolist() == after.ids[:, 0].tolist() == [0, 3, 6, 9, 12]
    assert (before.distances[:, 0] == 0).all()
    assert (after.distances[:, 0] == 0).all()


def test_parameters(tmp_path: Path) -> None:
    for params, message in (
        ({"index": "Flat"}, "inverted file"),
        ({"index": "IDMap2,IVF4,SQ8"}, "inverted file"),
        ({"index": "IVF4,SQ8,RFlat"}, "inverted file"),
        ({"index": "nonsense"}, "nonsense"),
        ({"index": "IVF4,PQ7"}, "does not work for dim 16"),
        ({"nprobe": -1}, "nprobe must be an integer >= 0, got -1"),
        ({"nprobe": "8"}, "nprobe must be an integer"),
        ({"probes": 3}, "accepted: index, nprobe, rerank"),
    ):
        with pytest.raises(ConfigError, match=message):
            FaissDatastore.open(tmp_path / "store", dim=DIM, **params)
    assert not (tmp_path / "store").exists()


def test_policy_by_size() -> None:
    policy = Policy()
    for rows, group_rows, dim, factory in (
        (EXACT_UP_TO, EXACT_UP_TO, 256, None),
        (EXACT_UP_TO + 1, EXACT_UP_TO + 1, 256, "IVF512,SQ8"),
        (10_000, 1_000_000, 256, "IVF256,SQ8"),
        (1_000, 1_000_000, 256, None),
        (SCALAR_UP_TO, SCALAR_UP_TO, 256, "IVF2048,SQ8"),
        (SCALAR_UP_TO + 1, SCALAR_UP_TO + 1, 256, "IVF2048,PQ64x4fs"),
        (10**9, 10**9, 1024, "IVF65536_HNSW32,PQ256x4fs"),
    ):
        assert policy.choose_factory(rows, group_rows, dim) == factory
    for dim in (1, 7, 300):
        create_empty_index(policy.choose_factory(10**7, 10**7, dim) or "", dim, Metric.L2)


def test_optimize_again_builds_nothing(tmp_path: Path) -> None:
    with filled(tmp_path, clustered(3000), index="IVF8,SQ8") as store:
        store.optimize()
        files = sorted((tmp_path / "store" / "indexes").iterdir())
        assert len(files) == 2
        store.optimize()
        assert sorted((tmp_path / "store" / "indexes").iterdir()) == files


def test_damaged_index_is_searched_around(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Results stay right without the index, and optimize builds it again."""
    keys, queries = clustered(3000), clustered(20, seed=1)
    filled(tmp_path, keys, index="IVF8,SQ8").close()
    with FaissDatastore.open(tmp_path / "store", dim=DIM, index="IVF8,SQ8") as store:
        store.optimize()
    path = next((tmp_path / "store" / "indexes").iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with FaissDatastore.open(tmp_path / "store", dim=DIM, index="IVF8,SQ8") as store:
        assert len(store.verify()) == 1
        with caplog.at_level(logging.WARNING):
            found = store.search(queries, 10)
        assert path.name in caplog.text
        assert recall(found.distances, true_distances(queries, keys), 10) >= 0.95
        store.optimize()
        assert store.verify() == []


def test_an_index_that_is_known_to_be_intact_is_not_read_again(tmp_path: Path) -> None:
    def flip(path: Path) -> bytes:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return bytes(content)

    with filled(tmp_path, clustered(2000), index="IVF16,SQ8") as store:
        store.optimize()
        (path, _) = sorted((tmp_path / "store").rglob("*.index"))
        damaged = flip(path)  # which nobody sees who does not read the file
        store.optimize()
        assert path.read_bytes() == damaged
        assert path.name in store.verify()[0]
        store.optimize()
        assert store.verify() == []


@pytest.mark.slow
def test_an_index_whose_tables_are_larger_than_its_file_is_read(tmp_path: Path) -> None:
    """FAISS computes a table for every list of a product quantizer, and counts it as if it were read."""
    keys = clustered(12000, dim=32)
    with filled(tmp_path, keys, index="IVF256,PQ16") as store:
        store.optimize()
    assert 0 < max(path.stat().st_size for path in tmp_path.rglob("*.index")) < 256 * 16 * 256 * 4 / 8
    params = {"index": "IVF256,PQ16", "nprobe": 256}
    with FaissDatastore.open(tmp_path / "store", dim=32, mode="r", **params) as reader:
        assert np.array_equal(reader.search(keys[:50], 1).ids[:, 0], np.arange(50) * 3)
