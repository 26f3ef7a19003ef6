"""Smaller stores: which records stay, what they stand for, and what becomes of that when documents go."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnstore import failpoints
from knnstore.catalog import NewDocument
from knnstore.datastore import Neighbors
from knnstore.datastore.records import tokens_of
from knnstore.errors import ConfigError, DomainNotFoundError
from knnstore.store import KNNStore, Selection, drop_highest, merge_chooser, random_chooser
from knnstore.store.relocation.choices import merge_nearest


@pytest.fixture
def add(store: KNNStore) -> Callable[..., None]:
    """A function that adds a document of given tokens and keys."""

    def add(id: str, tokens: list[int], keys: np.ndarray, domain: str = "law") -> None:
        new = NewDocument(
            id, domain, f"{hash((id, tuple(tokens))) % 16**8:064x}", np.array(tokens, np.uint32)
        )
        with store.ingest([new]) as group:
            n = len(tokens)
            group.add(np.zeros(n, np.int64), np.arange(n), np.array(tokens), keys.astype(np.float32))

    return add


def p_knn(found: Neighbors, temperature: float) -> np.ndarray:
    """The distribution over 1000 tokens of each query, spelled out."""
    weights = np.zeros(found.ids.shape) if found.log_weights is None else found.log_weights
    scores = np.exp(found.distances[:, :1] / temperature - found.distances / temperature + weights)
    return np.array(
        [
            np.bincount(tokens_of(i)[i >= 0], s[i >= 0], 1000) / s[i >= 0].sum()
            for i, s in zip(found.ids, scores, strict=True)
        ]
    )


def greedy(tokens: np.ndarray, keys: np.ndarray, left: int) -> np.ndarray:
    """The representative of each record, one merge at a time."""
    representatives, weights = np.arange(len(tokens)), np.ones(len(tokens))
    while (representatives == np.arange(len(tokens))).sum() > left:
        alive = np.flatnonzero(representatives == np.arange(len(tokens)))
        pairs = [
            (((keys[a] - keys[b]) ** 2).sum(), a, b)
            for a in alive
            for b in alive
            if a < b and tokens[a] == tokens[b]
        ]
        if not pairs:
            break
        _, a, b = min(pairs)
        stays, goes = (a, b) if weights[a] >= weights[b] else (b, a)
        weights[stays] += weights[goes]
        representatives[representatives == goes] = stays
    return representatives


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 14), st.integers(1, 4), st.integers(1, 14))
def test_the_nearest_of_the_same_token_are_merged_first(seed, n, tokens, left) -> None:
    rng = np.random.default_rng(seed)
    values, keys = rng.integers(0, tokens, n), rng.standard_normal((n, 3)).astype(np.float32)
    choice = merge_nearest(values, keys, np.ones(n), left)
    assert np.array_equal(choice.representatives, greedy(values, keys, left))


def test_more_candidates_are_looked_for_where_the_first_do_not_suffice(monkeypatch) -> None:
    monkeypatch.setattr("knnstore.store.relocation.choices.NEAREST", 1)
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((300, 3)).astype(np.float32)
    representatives = merge_nearest(np.zeros(300, np.int64), keys, np.ones(300), 7).representatives
    assert len(np.unique(representatives)) == 7
    assert np.array_equal(representatives[representatives], representatives)


def test_what_was_equal_leaves_every_probability_as_it_was(store, add) -> None:
    rng = np.random.default_rng(1)
    keys = np.repeat(rng.standard_normal((10, 8)), 4, axis=0).astype(np.float16)
    tokens = np.repeat(rng.integers(0, 6, 10), 4)
    for part in range(4):
        rows = np.arange(part, 40, 4)
        add(f"d{part}", tokens[rows].tolist(), keys[rows])
    queries = rng.standard_normal((5, 8)).astype(np.float32)
    before = store.search(queries, 40)
    assert before.log_weights is None
    done = store.prune(0.25, merge_chooser())
    assert [(d.tokens, d.before, d.after, d.merged, d.dropped) for d in done.domains] == [(40, 40, 10, 30, 0)]
    after = store.search(queries, 10)
    for temperature in (0.1, 1.0, 20.0):
        np.testing.assert_allclose(
            p_knn(after, temperature), p_knn(before, temperature), rtol=2e-4, atol=1e-7
        )
    assert store.verify() == []
    assert store.datastore.count() == 10
    assert [(d.tokens, d.records) for d in store.domains()] == [(40, 10)]


def test_a_document_that_goes_takes_its_part_along(store, add, home) -> None:
    key, far = np.zeros((1, 8)), np.full((1, 8), 9.0)
    for id in ("first", "second", "third"):
        add(id, [7, 8], np.concatenate([key, far]))
    add("other", [7], key, domain="news")
    store.prune(0.34, merge_chooser(), domains=["law"])

    def weights(handle: KNNStore) -> dict[tuple[str, int], float]:
        found = handle.search(key.astype(np.float32), 10)
        logs = np.zeros_like(found.distances) if found.log_weights is None else found.log_weights
        places = handle.provenance(found.ids[0])
        rows = zip(places, logs[0], strict=True)
        return {(p.document, p.position): round(float(np.exp(w)), 3) for p, w in rows if p}

    with KNNStore.open(home) as reader:
        assert weights(reader) == {("first", 0): 3, ("first", 1): 3, ("other", 0): 1}
        store.remove_document("second")
        assert weights(reader) == {("first", 0): 2, ("first", 1): 2, ("other", 0): 1}
        store.remove_document("first")
        assert weights(reader) == {("other", 0): 1}, "what it stood for is lost with it"
        assert store.verify() == []
        assert reader.search(key.astype(np.float32), 1, Selection(documents=("third",))).ids[0, 0] == -1
        store.remove_document("third")
        add("third", [7, 8], np.concatenate([key, far]))
        assert weights(reader) == {("third", 0): 1, ("third", 1): 1, ("other", 0): 1}
    assert store.verify() == []


def test_pruning_again_keeps_count_of_what_everything_stands_for(store, add) -> None:
    keys = np.array([[0.0] * 8, [0.1] * 8, [1.0] * 8, [5.0] * 8])
    add("a", [3, 3, 3, 4], keys)
    store.prune(0.75, merge_chooser())
    assert store.prune(0.75, merge_chooser()).before == store.engine, "nothing is left to do"
    add("b", [3, 4], keys[:2])
    store.prune(0.34, merge_chooser())
    found = store.search(np.zeros((1, 8), np.float32), 10)
    assert np.round(np.exp(found.log_weights[0, :2]), 3).tolist() == [4, 2]
    assert store.prune(0.1, random_chooser()).domains[0].after == 1
    found = store.search(np.zeros((1, 8), np.float32), 10)
    assert found.log_weights[0, 0] == pytest.approx(
        np.log(4 * 2) if tokens_of(found.ids)[0, 0] == 3 else np.log(2 * 2)
    )
    assert store.verify() == []


def test_at_random_a_domain_keeps_its_part_beside_others(store, writer) -> None:
    writer.add("law", "1", n=400)
    writer.add("news", "2", n=400)
    queries = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float32)
    done = store.prune(0.5, random_chooser(seed=3), domains=["law"])
    assert (done.domains[0].after, done.domains[0].dropped) == (200, 200)
    found = store.search(queries, 600)
    law = np.array([[p.domain == "law" for p in store.provenance(row)] for row in found.ids])
    assert np.exp(found.log_weights[law]) == pytest.approx(2)
    assert (found.log_weights[~law] == 0).all()
    assert store.verify() == []


def test_the_records_with_the_highest_scores_go(store, writer) -> None:
    writer.add("law", "1", n=20)
    scores = np.random.default_rng(4).permutation(20)
    store.prune(0.5, lambda records, left, _: drop_highest(scores, left))
    found = store.search(writer.keys["law", "1"], 1)
    assert np.array_equal(found.distances[:, 0] < 1e-4, scores < 10)
    assert found.log_weights is None, "they stand for nothing but themselves"
    assert store.verify() == []


def test_verify_knows_what_is_missing_by_design_to_the_record(store, writer) -> None:
    writer.add("law", "1", "2", n=30)
    store.prune(0.5, random_chooser())
    ids, keys, groups = (np.concatenate(column) for column in zip(*store.datastore.iterate(), strict=True))
    store.datastore.delete(store.view().scope(Selection()).live)
    store.datastore.add(ids[1:], keys[1:], groups[1:])
    assert len(store.verify()) == 1
    store.datastore.add(ids, keys, groups)
    assert store.verify() == []
    start = int(store.view().snapshot.starts[0])
    kept = store.view().snapshot.representatives.has_record(start + np.arange(30))
    gone = start + int(np.flatnonzero(~kept)[0])
    token = int(writer.tokens["law", "1"][gone - start])
    store.datastore.add(np.array([gone << 20 | token]), keys[:1], groups[:1])
    assert len(store.verify()) == 1


def test_a_pruned_store_is_moved_optimised_and_added_to(store, writer) -> None:
    writer.add("law", "1", "2", n=50)
    store.prune(0.5, random_chooser())
    before = store.search(writer.keys["law", "1"], 20)
    store.optimize()
    store.move("faiss", "elsewhere")
    after = store.search(writer.keys["law", "1"], 20)
    assert np.array_equal(before.ids, after.ids)
    assert np.array_equal(before.log_weights, after.log_weights)
    writer.add("law", "1", n=10)  # replaced by a new version, with all its records
    (law,) = store.domains()
    assert (law.tokens, law.records) == (60, 10 + store.view().snapshot.records[0])
    assert store.verify() == []


def test_what_cannot_be_done_is_said_and_changes_nothing(store, writer, home) -> None:
    writer.add("law", "1", n=50)
    for keep in (0, -1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            store.prune(keep, random_chooser())
    with pytest.raises(DomainNotFoundError):
        store.prune(0.5, random_chooser(), domains=["tax"])

    def refuse(preview: object) -> None:
        assert preview.search(writer.keys["law", "1"], 5).log_weights is not None  # type: ignore[attr-defined]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.prune(0.5, random_chooser(), inspect=refuse)
    assert store.engine.location == "keys"
    assert store.search(writer.keys["law", "1"], 5).log_weights is None
    assert store.verify() == []
    assert store.info()["unfinished_move"] == "keys-2"
    assert store.prune(0.5, random_chooser()).after.location == "keys-2"
    assert not (home / "keys").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "move.planned",
        "move.copied",
        "move.compared",
        "catalog.move.inside",
        "catalog.move.after",
        "move.erased",
    ],
)
def test_a_reader_sees_all_of_it_or_none_when_it_is_killed(store, writer, home, place) -> None:
    writer.add("law", "1", "2", n=60)
    store.close()
    switched = place in ("catalog.move.after", "move.erased")
    prune = (
        "import sys; from knnstore.store import KNNStore, random_chooser\n"
        "with KNNStore.open(sys.argv[1], 'a') as store: store.prune(0.5, random_chooser())"
    )
    killed = subprocess.run(
        [sys.executable, "-c", prune, home], check=False, env=os.environ | {failpoints.VARIABLE: place}
    )
    assert killed.returncode == -signal.SIGKILL

    def state(handle: KNNStore) -> tuple[int, bool]:
        found = handle.search(writer.keys["law", "1"], 10)
        assert handle.verify() == []
        return handle.datastore.count(), found.log_weights is not None

    with KNNStore.open(home) as reader:
        assert state(reader) == ((60, True) if switched else (120, False))
        with KNNStore.open(home, "a") as again:
            done = again.prune(0.5, random_chooser())
            assert (done.before == done.after) == switched
            assert state(again) == state(reader) == (60, True)
    assert {path.name for path in home.iterdir() if path.is_dir()} == {"keys-2"}
    assert not (home / "move.json").exists()


def test_on_postgresql(postgres, home, identity, writer_of) -> None:
    url = postgres.new_database().render_as_string(hide_password=False)
    with KNNStore.create(home, identity, catalog=url) as made:
        writer = writer_of(made)
        writer.add("law", "1", "2", n=60)
        made.prune(0.5, random_chooser())
        assert [(domain.tokens, domain.records) for domain in made.domains()] == [(120, 60)]
        with KNNStore.open(home) as reader:
            assert reader.search(writer.keys["law", "1"], 5).log_weights is not None
            made.remove_document("1")
            assert reader.verify() == []
