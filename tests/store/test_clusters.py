"""Clusters of near keys: each live record of a domain is in one, and following leads to all that share it."""

import numpy as np
import pytest

from knnstore.datastore.records import positions_of
from knnstore.store import KNNStore, Selection
from knnstore.store.pointers import clusters

SIZE = 10


@pytest.fixture
def filled(store: KNNStore, writer) -> KNNStore:
    writer.add("law", *map(str, range(12)), n=30)
    writer.add("news", "a", "b", n=40)
    return store


def records(store: KNNStore, domain: str) -> dict[int, np.ndarray]:
    """Keys of a domain by record."""
    snapshot, keys = store.view().snapshot, {}
    for ids, some, _ in store.datastore.iterate():
        mine = snapshot.groups[snapshot.documents_at(positions_of(ids))] == snapshot.domains[domain]
        keys.update(zip(ids[mine].tolist(), some[mine], strict=True))
    return keys


def divided(store: KNNStore, domain: str) -> set[frozenset[int]]:
    """The clusters that the records of a domain lead into, each followed alone."""
    ids = np.array(sorted(records(store, domain)))[:, None]
    found = store.follow(np.zeros((len(ids), 8), np.float32), ids, cluster_size=SIZE).ids
    return {frozenset(row[row >= 0].tolist()) for row in found} - {frozenset()}


def test_clusters_divide_what_is_live_of_each_domain(filled, writer) -> None:
    for domain in ("law", "news"):
        parts, there = divided(filled, domain), records(filled, domain)
        assert sum(map(len, parts)) == len(set().union(*parts))
        assert set().union(*parts) <= set(there)
        assert len(there) / len(parts) == pytest.approx(SIZE, rel=0.5)
    before = divided(filled, "law")
    writer.add("law", "new", n=60)
    after, there = divided(filled, "law"), records(filled, "law")
    assert sum(map(len, after)) == len(set().union(*after))
    assert set().union(*after) <= set(there)
    # The old ones are together as they were.
    old = set().union(*before)
    assert {part & old for part in after} - {frozenset()} == before


def test_nothing_is_left_of_what_was_removed(filled) -> None:
    """Clusters are then those of a process that never saw it."""
    divided(filled, "law")
    filled.remove_document("3", domain="law")
    with KNNStore.open(filled.home.path) as another:
        assert divided(filled, "law") == divided(another, "law")


def test_records_of_a_cluster_are_near_each_other(filled) -> None:
    keys = records(filled, "law")
    spread = np.var(list(keys.values()), axis=0).sum()
    within = [len(part) * np.var([keys[id] for id in part], axis=0).sum() for part in divided(filled, "law")]
    assert sum(within) / len(keys) < 0.6 * spread


def test_every_one_is_measured_and_only_selected_ones_are_found(filled, writer) -> None:
    keys = records(filled, "law")
    first = np.array(sorted(keys))[:1]
    queries = np.random.default_rng(1).standard_normal((1, 8)).astype(np.float32)
    one = filled.follow(queries, first[None], cluster_size=10**6)
    assert set(one.ids[0].tolist()) == set(keys)
    np.testing.assert_allclose(
        one.distances[0], [((keys[id] - queries[0]) ** 2).sum() for id in one.ids[0].tolist()], rtol=1e-4
    )
    selected = filled.follow(
        queries, first[None], Selection(domains=("law",), documents=("0", "5")), cluster_size=10**6
    )
    assert (selected.ids >= 0).sum() == 60
    nothing = filled.follow(queries, np.array([[-1]]), cluster_size=SIZE)
    assert nothing.ids.shape[0] == 1
    assert (nothing.ids == -1).all()


@pytest.mark.parametrize("size", [None, SIZE])
def test_everything_was_removed_meanwhile(filled, size) -> None:
    ids = np.array(sorted(records(filled, "law")))[None, :9]
    filled.follow(np.zeros((1, 8), np.float32), ids, cluster_size=SIZE)
    for domain in ("law", "news"):
        filled.remove_domain(domain)
    found = filled.follow(np.zeros((1, 8), np.float32), ids, cluster_size=size)
    assert (found.ids == -1).all()


def test_a_query_is_led_to_few_clusters(filled, monkeypatch) -> None:
    """Those of the first pointers."""
    ids = np.array(sorted(records(filled, "law")))[None, :-1]
    monkeypatch.setattr(clusters, "_MOST_MEMBERS", 40)
    found = filled.follow(np.zeros((1, 8), np.float32), ids, cluster_size=SIZE).ids[0]
    alone = filled.follow(np.zeros((1, 8), np.float32), ids[:, :1], cluster_size=SIZE).ids[0]
    assert set(alone.tolist()) <= set(found.tolist())
    assert len(found) <= 40
