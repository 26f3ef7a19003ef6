"""Exact search by matrix multiplication against float64, and the joining of results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from knnstore_faiss import FaissDatastore
from knnstore_faiss.faiss_datastore import find_nearest_rows as nearest_rows_by_faiss
from knnstore_hnswlib import HnswlibDatastore

from knnstore.datastore import Datastore, IdRanges, Metric, distances, find_nearest_rows
from knnstore.datastore.embedded import exact
from knnstore.datastore.embedded.exact import ExactIndex, NearestRows
from knnstore.datastore.embedded.segment import Segment
from knnstore.datastore.memory import MemoryDatastore
from knnstore.datastore.neighbors import Neighbors, merge_neighbors


def true_distances(queries: np.ndarray, keys: np.ndarray, metric: Metric) -> np.ndarray:
    q, x = queries.astype(np.float64), keys.astype(np.float64)
    return ((q[:, None] - x) ** 2).sum(-1) if metric is Metric.L2 else -(q @ x.T)


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("shift", [0, 200])
@pytest.mark.parametrize("queries", [1, 100])
def test_near_duplicates_far_from_the_origin(
    metric: Metric, shift: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances are right to 1e-5 however much cancels, in any batch, in one product or several."""
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(2000, 64)) + shift).astype(np.float16).astype(np.float32)
    asked = keys[:queries] + rng.normal(size=(queries, 64)).astype(np.float32) * 1e-2
    index = ExactIndex(64, metric)
    index.update([Segment.from_arrays(0, np.arange(2000) * 3, keys)])
    for size in (1 << 23, 5000):
        monkeypatch.setattr(distances, "_PRODUCT_SIZE", size)
        found = index.search(asked, 20, None)
        truth = true_distances(asked, keys, metric)
        own = np.take_along_axis(truth, found.ids // 3, axis=1)
        np.testing.assert_allclose(found.distances, own, rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(found.distances, np.sort(truth)[:, :20], rtol=2e-5, atol=1e-5)


def test_rows_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are added, die in parts and leave, and filters cut long and short slices."""
    monkeypatch.setattr(exact, "_CHUNK", 70)
    monkeypatch.setattr(exact, "_LONG_SLICE", 40)
    rng = np.random.default_rng(0)
    index, keys = ExactIndex(4, Metric.L2), rng.normal(size=(900, 4)).astype(np.float16)
    queries = rng.normal(size=(5, 4)).astype(np.float32)
    whole = [
        Segment.from_arrays(0, np.arange(start, start + 300), keys[start : start + 300])
        for start in (0, 300, 600)
    ]
    dead = [IdRanges([(0, 20), (100, 290)]), IdRanges([(5, 6)]), IdRanges([(0, 299)])]
    for dying, chosen in (
        ((), [0]),
        ((), [0, 1]),
        ((1,), [1, 2, 0]),
        ((0, 1, 2), [2, 0, 1]),
        ((0, 1, 2), [1]),
    ):
        segments = [replace(whole[i], dead=dead[i] if i in dying else IdRanges()) for i in chosen]
        index.update(segments)
        alive = np.concatenate(
            [s.first_id + np.flatnonzero(~s.dead.contains(np.arange(300))) for s in segments]
        )
        for ids in (None, IdRanges([(10, 15), (200, 560), (700, 701)]), IdRanges()):
            rows = np.sort(alive if ids is None else alive[ids.contains(alive)])
            found = index.search(queries, 50, ids)
            truth = np.sort(true_distances(queries, keys[rows], Metric.L2))[:, :50]
            assert index.count(ids) == len(rows)
            assert ((found.ids >= 0).sum(axis=1) == truth.shape[1]).all()
            assert np.isin(found.ids, [*rows, -1]).all()
            np.testing.assert_allclose(found.distances[:, : truth.shape[1]], truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("nearest", [find_nearest_rows, nearest_rows_by_faiss], ids=["numpy", "faiss"])
@pytest.mark.parametrize(("copies", "k"), [(30, 5), (900, 64)])
def test_equal_keys_are_cut_by_id(metric: Metric, nearest: NearestRows, copies: int, k: int) -> None:
    """At k, and whatever batch a query is in; most copies are far from where BLAS finds the first."""
    rng = np.random.default_rng(copies)
    keys = (rng.normal(size=(3000, 48)) * 4 + 7).astype(np.float16)
    at = rng.choice(len(keys), copies, replace=False)
    spread = np.resize([[0.02], [0.5]], (20, 1))
    queries = (keys[at[:1]] + rng.normal(size=(20, 48)) * spread).astype(np.float32)
    keys[at] = keys[at[0]] * np.float16(8 if metric is Metric.IP else 1)
    whole = [Segment.from_arrays(0, np.arange(i, i + 1000), keys[i : i + 1000]) for i in (2000, 0, 1000)]
    index = ExactIndex(48, metric, nearest)
    index.update(whole)
    for ids in (None, IdRanges([(10, 700), (800, 2300), (2310, 2315)])):
        rows = np.arange(3000) if ids is None else np.arange(3000)[ids.contains(np.arange(3000))]
        truth = true_distances(queries, keys[rows], metric)
        wanted = rows[np.argsort(truth, axis=1, kind="stable")[:, :k]]  # equal ones by id
        for batch in (20, 3, 1):
            for start in range(0, 20, 4):
                some = slice(start, start + batch)
                found = index.search(queries[some], k, ids)
                np.testing.assert_array_equal(np.sort(found.ids), np.sort(wanted[some]))
                assert (np.diff(found.distances) >= 0).all()


@pytest.mark.parametrize("engine", [FaissDatastore, HnswlibDatastore])
def test_equal_keys_of_several_domains_are_cut_by_id(engine: type[Datastore], tmp_path: Path) -> None:
    """All documents of all domains begin with the same state; the oracle says which k of them are found."""
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(2000, 32)) * 3 + 20).astype(np.float16).astype(np.float32)
    keys[::20] = keys[0] - 20  # far from the others: a query loses digits where these are made its origin
    groups = (np.arange(2000) // 20 % 3).astype(np.int32)
    keys[groups == 1] += 4 * (np.arange(2000)[groups == 1] % 20 > 0)[:, None]  # domains differ
    ids = np.arange(2000) << 20
    queries = keys[:1] + rng.normal(size=(50, 32)).astype(np.float32) * 1e-3
    oracle = MemoryDatastore.open("", dim=32)
    with engine.open(tmp_path / "store", dim=32) as store:
        for some in (oracle, store):
            some.add(ids, keys, groups)
        for k in (10, 64):
            wanted = np.sort(oracle.search(queries, k).ids)
            np.testing.assert_array_equal(np.sort(store.search(queries, k).ids), wanted)


@given(
    parts=st.lists(st.lists(st.integers(0, 9), max_size=8).map(sorted), max_size=4),
    k=st.integers(1, 12),
)
def test_merge(parts: list[list[int]], k: int) -> None:
    """Several sorted rows become the k least of all, padded at the end."""
    width = [min(len(part), k) for part in parts]
    found = merge_neighbors(
        [
            Neighbors(
                np.array([part[:w]], np.int64).reshape(1, -1), np.array([part[:w]], np.float32).reshape(1, -1)
            )
            for part, w in zip(parts, width, strict=True)
        ],
        1,
        k,
    )
    expected = sorted(value for part in parts for value in part)[:k]
    assert found.ids[0].tolist() == expected + [-1] * (k - len(expected))
    assert found.distances[0].tolist() == expected + [np.inf] * (k - len(expected))


@pytest.mark.parametrize("metric", list(Metric))
def test_one_formula_for_arrays_and_tensors(metric: Metric) -> None:
    rng = np.random.default_rng(0)
    queries, keys = (rng.normal(size=(n, 16)).astype(np.float32) + 50 for n in (5, 30))
    truth = true_distances(queries, keys, metric)
    measured = distances.pairwise_distances(queries, keys, metric)
    np.testing.assert_allclose(measured, truth, rtol=1e-4)
    by_torch = distances.pairwise_distances(torch.from_numpy(queries), torch.from_numpy(keys), metric)
    np.testing.assert_allclose(by_torch.numpy(), truth, rtol=1e-4)
    rows = distances.paired_distances(queries, keys[:5], metric)
    np.testing.assert_allclose(rows, np.diagonal(truth), rtol=1e-5)
    np.testing.assert_allclose(distances.paired_distances(queries[0], keys, metric), truth[0], rtol=1e-5)


def test_neighbors_are_joined_spread_and_replaced() -> None:
    two = Neighbors(np.array([[3, 1]]), np.float32([[0.1, 0.3]]))
    one = Neighbors(np.array([[5]]), np.float32([[0.2]]))
    found = Neighbors.concatenate([two, one]).select_nearest(4)
    assert found.ids.tolist() == [[3, 5, 1, -1]]
    left = found.mask_neighbors(found.ids == 3).select_nearest(4).scatter_rows(np.array([False, True]))
    assert left.ids.tolist() == [[-1] * 4, [5, 1, -1, -1]]
    below = Neighbors.concatenate([one, two], axis=0).select_rows(np.array([1, 0]))
    assert below.ids.tolist() == [[3, 1], [5, -1]]
    below.replace_rows(np.array([0]), one)
    assert below.ids.tolist() == [[5, -1], [5, -1]]
    assert below.distances.tolist() == [[np.float32(0.2), np.inf]] * 2
