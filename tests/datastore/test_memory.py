"""The in-memory reference store, against the kit and against loops in plain Python."""

import math

import numpy as np
import pytest

from knnstore.datastore import Filter, IdRanges, Metric
from knnstore.datastore.memory import MemoryDatastore
from knnstore.testing import DatastoreTests


class TestMemoryDatastore(DatastoreTests):
    datastore_class = MemoryDatastore


def _nearest(query, records, k, metric):
    """The contract in plain Python: (id, distance) of the k nearest, equally near ones by id."""
    distances = []
    for record_id, key in records.items():
        if metric is Metric.L2:
            distance = math.fsum((float(a) - float(b)) ** 2 for a, b in zip(query, key, strict=True))
        else:
            distance = -math.fsum(float(a) * float(b) for a, b in zip(query, key, strict=True))
        distances.append((distance, record_id))
    nearest = sorted(distances)[:k] + [(math.inf, -1)] * (k - len(distances))
    return [record_id for _, record_id in nearest], [distance for distance, _ in nearest]


@pytest.mark.parametrize("metric", list(Metric))
def test_agrees_with_a_loop(metric):
    rng = np.random.default_rng(0)
    ids = rng.choice(2**40, 60, replace=False)
    keys = rng.normal(size=(60, 5)).astype(np.float32)
    store = MemoryDatastore.open("", dim=5, metric=metric)
    store.add(ids, keys, np.zeros(60, np.int32))
    chosen = IdRanges([(0, 2**39)])
    queries = rng.normal(size=(7, 5)).astype(np.float32)
    for where in (None, Filter(ids=chosen)):
        records = {int(i): key for i, key in zip(ids, keys, strict=True) if where is None or i < 2**39}
        found = store.search(queries, 50, where=where)
        for row, query in enumerate(queries):
            expected_ids, expected_distances = _nearest(query, records, 50, metric)
            assert found.ids[row].tolist() == expected_ids
            np.testing.assert_allclose(found.distances[row], expected_distances, rtol=1e-5, atol=1e-6)


def test_equally_near_records_come_by_id():
    store = MemoryDatastore.open("", dim=1)
    store.add(np.array([9, 3, 7, 5]), np.array([[1.0], [1.0], [-1.0], [0.0]]), np.zeros(4, np.int32))
    assert store.search(np.zeros((1, 1)), 3).ids.tolist() == [[5, 3, 7]]


def test_distances_are_exact_where_the_expanded_square_is_not():
    """Between 4096 and 4096.5, |q|² - 2qx + |x|² in float32 is off by more than the distance."""
    store = MemoryDatastore.open("", dim=1)
    store.add(np.array([1]), np.array([[4096.5]]), np.array([0]))
    assert store.search(np.array([[4096.0]]), 1).distances.tolist() == [[0.25]]


def test_blocks_join_without_a_seam(monkeypatch):
    keys = np.random.default_rng(1).normal(size=(100, 3)).astype(np.float32)
    store = MemoryDatastore.open("", dim=3)
    store.add(np.arange(100), keys, np.zeros(100, np.int32))
    whole = store.search(keys, 100)
    monkeypatch.setattr("knnstore.datastore.memory._BLOCK_ROWS", 7)
    blocks = store.search(keys, 100)
    np.testing.assert_array_equal(blocks.ids, whole.ids)
    np.testing.assert_array_equal(blocks.distances, whole.distances)


def test_a_running_iteration_does_not_see_changes():
    store = MemoryDatastore.open("", dim=1)
    store.add(np.arange(4), np.zeros((4, 1)), np.zeros(4, np.int32))
    batches = store.iterate(batch_size=2)
    first, _, _ = next(batches)
    store.delete(IdRanges([(0, 100)]))
    rest = [ids.tolist() for ids, _, _ in batches]
    assert [first.tolist(), *rest] == [[0, 1], [2, 3]]
