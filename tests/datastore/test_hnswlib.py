"""The hnswlib adapter: the conformance kit, and the traps of hnswlib."""

import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import hnswlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from knnstore_hnswlib import HnswlibDatastore, hnswlib_datastore
from knnstore_hnswlib.hnswlib_datastore import Members, find_first_equal

from knnstore.datastore import Filter, IdRanges, Metric
from knnstore.errors import ConfigError, DatastoreError
from knnstore.testing import DatastoreTests
from knnstore.testing.searching import FilterTests, SearchTests
from tests.datastore.clusters import clustered
from tests.datastore.optimizing import OptimizingHnswlib

DIM = 16
GRAPHS: dict[str, Any] = {"exact_up_to": 0, "M": 16, "ef_construction": 100, "ef": 100}


@pytest.mark.slow
class TestDefaults(SearchTests, FilterTests):  # what it shares with the FAISS adapter is tested there
    datastore_class = HnswlibDatastore


class TestGraphs(DatastoreTests):
    datastore_class = OptimizingHnswlib
    params: ClassVar[dict[str, Any]] = {**GRAPHS, "ef_construction": 40}

    @pytest.fixture(autouse=True)
    def no_set_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hnswlib_datastore, "_ROWS_PER_CANDIDATE", 0)


def opened(path: Path, *, mode: Any = "a", **params: Any) -> HnswlibDatastore:
    return HnswlibDatastore.open(path / "store", dim=DIM, mode=mode, **{**GRAPHS, **params})


def put(store: HnswlibDatastore, rows: np.ndarray, keys: np.ndarray) -> None:
    """Store a record with id 3 * row for each row."""
    store.add(rows * 3, keys, np.zeros(len(rows), np.int32))


def filled(path: Path, keys: np.ndarray, **params: Any) -> HnswlibDatastore:
    """A store with one graph over all keys."""
    store = opened(path, **params)
    put(store, np.arange(len(keys)), keys)
    store.optimize()
    return store


def true_distances(queries: np.ndarray, keys: np.ndarray, metric: Metric = Metric.L2) -> np.ndarray:
    """All distances, in float64."""
    q, x = queries.astype(np.float64), keys.astype(np.float64)
    return ((q[:, None] - x) ** 2).sum(-1) if metric is Metric.L2 else -(q @ x.T)


def recall(found: np.ndarray, distances: np.ndarray, k: int) -> float:
    """The share of the distances found that are among the k least, ties counted."""
    bound = np.sort(distances, axis=1)[:, k - 1 : k]
    return float((found <= bound + 1e-5 * np.abs(bound)).mean())


def graphs_of(path: Path) -> list[Path]:
    return sorted((path / "store" / "indexes").iterdir())


@pytest.mark.parametrize("metric", list(Metric))
def test_graphs(tmp_path: Path, metric: Metric) -> None:
    """Near all neighbors at exact distances, under filters, with dead rows, also after reopening."""
    keys, queries = clustered(6000), clustered(40, seed=1)
    store = filled(tmp_path, keys, metric=metric)
    store.delete(IdRanges([(0, 3000)]))
    store.add(np.array([7]), queries[:1], np.array([0]))  # in no graph
    rows = np.arange(6000)
    distances = np.where(rows < 1000, np.inf, true_distances(queries, keys, metric))
    for reopened in (False, True):
        if reopened:
            store.close()
            store = opened(tmp_path, metric=metric, mode="r")
        for k in (10, 200):
            found = store.search(queries, k)
            assert (np.diff(found.distances, axis=1) >= 0).all()
            assert recall(found.distances, distances, k) >= 0.95
            known = found.ids != 7
            expected = np.take_along_axis(distances, found.ids // 3, axis=1)
            np.testing.assert_allclose(found.distances[known], expected[known], rtol=1e-5, atol=1e-4)
        if metric is Metric.L2:
            assert store.search(queries[:1], 1).ids[0, 0] == 7
        for start, stop in ((1000, 5900), (1000, 3000), (5990, 6000)):
            found = store.search(queries, 10, where=Filter(IdRanges([(3 * start, 3 * stop)])))
            matching = (rows >= start) & (rows < stop)
            assert matching[found.ids // 3].all()
            assert recall(found.distances, np.where(matching, distances, np.inf), 10) >= 0.95
    store.close()


def test_always_as_many_as_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graph gives does not match: the rest is found all the same, never more than there is."""
    monkeypatch.setattr(hnswlib_datastore, "_ROWS_PER_CANDIDATE", 0)
    keys = clustered(3000)
    far = np.argsort(true_distances(keys[:1], keys)[0])[-200:]  # no over-fetching reaches these
    with filled(tmp_path, keys) as store:
        where = Filter(IdRanges.from_ids(far * 3))
        for k in (50, 200):
            found = store.search(keys[:1], k, where=where)
            truth = np.sort(true_distances(keys[:1], keys[far]))[:, :k]
            np.testing.assert_allclose(found.distances, truth, rtol=1e-5)
        found = store.search(keys[:1], 5000, where=where)
        assert (found.ids >= 0).sum() == 200
        assert np.isposinf(found.distances[:, 200:]).all()
        found = store.search(keys[:2], 5000)
        assert ((found.ids >= 0).sum(axis=1) == 3000).all()
        assert store.search(keys[:1], 5, where=Filter(IdRanges([(1, 3)]))).ids.max() == -1


def test_most_are_dead(tmp_path: Path) -> None:
    """Few of a graph's rows are live: they are found, and optimize builds a graph of them alone."""
    keys, queries = clustered(4000), clustered(10, seed=1)
    with filled(tmp_path, keys) as store:
        where = Filter(IdRanges([(6, 3 * 3902)]))
        assert store.search(keys[2:5], 1, where=where).ids[:, 0].tolist() == [6, 9, 12]
        store.delete(IdRanges([(0, 3 * 3900)]))
        assert store.search(keys[2:5], 3, where=where).ids.max(axis=1).tolist() == [3 * 3901] * 3
        for _ in range(2):
            found = store.search(queries, 100)
            assert (np.sort(found.ids) == 3 * np.arange(3900, 4000)).all()
            assert recall(found.distances[:, :20], true_distances(queries, keys[3900:]), 20) == 1
            store.optimize()
        assert graphs_of(tmp_path)[0].stat().st_size < 50_000
        store.delete(IdRanges([(0, 12000)]))
        assert store.search(queries, 3).ids.max() == -1


@pytest.mark.slow
def test_several_graphs(tmp_path: Path) -> None:
    """Growth leaves a large graph alone; a small one that holds all the neighbors gives them all."""
    keys, queries = clustered(5000), clustered(20, seed=1)
    odd = clustered(600, seed=2) + 20
    with filled(tmp_path, keys[:4000]) as store:
        first = graphs_of(tmp_path)
        put(store, np.arange(5000, 5600), odd)
        store.optimize()
        assert len(graphs_of(tmp_path)) == 2
        assert first[0] in graphs_of(tmp_path)
        everything = np.concatenate([keys[:4000], odd])
        for asked in (queries, queries + 20):
            assert recall(store.search(asked, 400).distances, true_distances(asked, everything), 400) >= 0.95
        put(store, np.arange(4000, 5000), keys[4000:])
        store.optimize()
        assert first[0] in graphs_of(tmp_path)
        put(store, np.arange(6000, 9000), clustered(3000, seed=3))
        store.optimize()
        assert len(graphs_of(tmp_path)) == 1
        before = graphs_of(tmp_path)
        store.optimize()
        assert graphs_of(tmp_path) == before
    with opened(tmp_path, M=6) as store:
        store.optimize()
        assert graphs_of(tmp_path) != before


def test_equal_keys(tmp_path: Path) -> None:
    """Hundreds of equal keys, which cut hnswlib's graph to pieces, are found like any others."""
    keys = clustered(2000)
    keys[np.random.default_rng(0).permutation(2000)[:1200]] = np.repeat(keys[:4], 300, axis=0)
    distances = true_distances(keys[:4], keys)
    with filled(tmp_path, keys) as store:
        for k in (100, 310, 1000):
            found = store.search(keys[:4], k)
            assert all(len(set(row.tolist())) == k for row in found.ids)
            assert recall(found.distances, distances, k) >= 0.95
        store.delete(IdRanges([(0, 1500)]))  # the first of all equal ones, for which the node is named
        distances[:, :500] = np.inf
        where = Filter(IdRanges([(0, 4500)]))
        for found, matching in (
            (store.search(keys[:4], 200), distances),
            (store.search(keys[:4], 200, where=where), np.where(np.arange(2000) < 1500, distances, np.inf)),
        ):
            assert found.ids.min() >= 1500
            assert recall(found.distances, matching, 200) >= 0.95


def test_rows_out_of_reach(tmp_path: Path) -> None:
    """hnswlib refuses a whole batch when one query reaches too few rows; here each has its answer."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(10, DIM)) * 1000
    keys = (np.repeat(centers, 100, axis=0) + rng.normal(size=(1000, DIM))).astype(np.float16)
    with filled(tmp_path, keys, M=2, ef_construction=2) as store:
        asked = keys[::100].astype(np.float32)
        store.search(asked, 1)
        (index,) = store._searches._searches.values()
        with pytest.raises(RuntimeError, match="contiguous 2D array"):
            index._indexes[0]._graph.knn_query(asked, 900)  # type: ignore[attr-defined]
        found = store.search(asked, 900)
        truth = np.sort(true_distances(asked, keys))[:, :900]
        np.testing.assert_allclose(found.distances, truth, rtol=1e-4, atol=1e-2)


def test_ef(tmp_path: Path) -> None:
    """`ef` is set whenever a graph is read, for the file does not keep it; k goes before it."""
    keys, queries = clustered(4000), clustered(50, seed=1)
    distances = true_distances(queries, keys)
    filled(tmp_path, keys, M=8, ef_construction=50).close()
    found = {}
    for ef in (1, 400):
        reader = opened(tmp_path, mode="r", ef=ef)
        assert (reader.search(queries, 300).ids >= 0).all()
        found[ef] = recall(reader.search(queries, 1).distances, distances, 1)
    assert found[1] < 0.9 < 0.99 < found[400]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "removed"])
def test_damaged_graph_is_searched_around(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """No damaged file reaches hnswlib, which would die; until optimize all keys are compared."""
    keys, queries = clustered(3000), clustered(20, seed=1)
    filled(tmp_path, keys).close()
    (path,) = graphs_of(tmp_path)
    content = bytearray(path.read_bytes())
    content[20] ^= 64  # the number of rows, as hnswlib will believe
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes({"flipped": content, "cut": content[:-1], "emptied": b""}[damage])
    with opened(tmp_path) as store:
        assert len(store.verify()) == 1
        with caplog.at_level(logging.WARNING):
            found = store.search(queries, 10)
        assert path.name in caplog.text
        assert recall(found.distances, true_distances(queries, keys), 10) == 1
        store.optimize()
        assert store.verify() == []
        caplog.clear()
        assert recall(store.search(queries, 10).distances, true_distances(queries, keys), 10) >= 0.95
        assert not caplog.text


def test_another_engine_s_index(tmp_path: Path) -> None:
    """The same segments may have been indexed by another adapter: its files are not read, but replaced."""
    keys = clustered(1000)
    with opened(tmp_path) as store:
        put(store, np.arange(1000), keys)
        store.flush()
        (segment,) = store._segments.snapshot()
        store._segments.write_index(segment, lambda path: path.write_bytes(b"else"), {"faiss": "IVF4"})
        assert store.search(keys[:1], 1).ids == [[0]]
        store.optimize()
        assert graphs_of(tmp_path)[0].stat().st_size > 1000 * DIM * 4
        assert store.search(keys[:1], 1).ids == [[0]]


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 60_000, 400_000])
def test_disk_full(tmp_path: Path, room: int) -> None:
    """hnswlib says that it wrote a graph when it did not; here it is an error, and trying again works."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code = "from test_hnswlib import *; write_without_room(Path(sys.argv[1]), int(sys.argv[2]))"
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path, str(room)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": here},
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    with opened(tmp_path) as store:
        assert store.verify() == []
        assert len(graphs_of(tmp_path)) == 1


def write_without_room(path: Path, room: int) -> None:
    keys = clustered(3000)
    store = opened(path)
    put(store, np.arange(3000), keys)
    store.flush()
    # A limit on the size of files stands in for a full disk: the write is cut short, then refused.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    if room:
        whole = hnswlib.Index("l2", DIM)
        whole.init_index(3000, M=8)
        whole.add_items(keys)
        whole.save_index(str(path / "whole"))  # the trap: no error
        assert (path / "whole").stat().st_size == room < whole.index_file_size()
    try:
        store.optimize()
    except DatastoreError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        raise AssertionError("no error")
    assert graphs_of(path) == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert store.search(keys[:5], 1).ids[:, 0].tolist() == [0, 3, 6, 9, 12]
    store.optimize()
    assert store.search(keys[:5], 1).ids[:, 0].tolist() == [0, 3, 6, 9, 12]
    store.close()


def test_beyond_half_precision(tmp_path: Path) -> None:
    """Keys beyond 65504 are kept as float32, in exact search and in a graph."""
    keys = clustered(1000) * 1e5
    with opened(tmp_path) as store:
        put(store, np.arange(1000), keys)
        for _ in range(2):
            found = store.search(keys[:5], 3)
            assert found.ids[:, 0].tolist() == [0, 3, 6, 9, 12]
            assert (found.distances[:, 0] == 0).all()
            store.optimize()


def test_parameters(tmp_path: Path) -> None:
    for params, message in (
        ({"M": 1}, "M must be an integer >= 2, got 1"),
        ({"M": 1000}, "at most 512"),
        ({"ef": "8"}, "ef must be an integer"),
        ({"ef_construction": True}, "ef_construction must be an integer"),
        ({"exact_up_to": -1}, "exact_up_to must be an integer >= 0, got -1"),
        ({"nprobe": 3}, "accepted: M, ef, ef_construction, exact_up_to"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path, **params)
    assert not (tmp_path / "store").exists()


@given(data=st.data())
def test_members(data: st.DataObject) -> None:
    """Rows of the nodes found, in order, against a loop over them."""
    values = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    keys = np.array(values, np.float16)[:, None].repeat(3, axis=1)
    first = find_first_equal(keys)
    assert first.tolist() == [values.index(value) for value in values]
    rows = IdRanges.from_ids(np.array(sorted(data.draw(st.sets(st.integers(0, len(values) - 1)))), np.int64))
    nodes = np.array([data.draw(st.permutations(sorted(set(first.tolist())))) for _ in range(2)])
    k = data.draw(st.integers(1, 40))
    members = Members(rows, first)
    found = members.convert_nodes_to_neighbors(
        nodes, np.tile(np.arange(nodes.shape[1], dtype=np.float32), (2, 1)), k
    )
    for query in range(2):
        expected = [
            (row, float(at))
            for at, node in enumerate(nodes[query].tolist())
            for row in range(len(values))
            if first[row] == node and rows.contains(np.array([row]))[0]
        ][:k]
        expected += [(-1, np.inf)] * (k - len(expected))
        assert list(zip(found.ids[query].tolist(), found.distances[query].tolist(), strict=True)) == expected
    assert members.nodes == len({values[row] for start, stop in rows for row in range(start, stop)})
