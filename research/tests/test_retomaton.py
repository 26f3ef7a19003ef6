"""Pointers in place of searches: a text followed by hand, and what must equal a search."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from knnstore_research.retomaton import Clusters, follow_pointers
from knnstore_research.stored_records import StoredRecords

from knnstore.datastore import Neighbors, record_ids
from knnstore.lm.calibration import ScoredText, score_once
from knnstore.lm.mixing import Evidence
from knnstore.store import EVERYTHING
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(11)
PHRASES = phrases(RNG, 6, 4, 30, length=5)


def scored_text(queries: list[float], targets: list[int], documents: list[int]) -> ScoredText:
    """Return a text with keys of one component."""
    zeros = torch.zeros(len(queries))
    evidence = Evidence(zeros, keys=torch.tensor(queries)[:, None])
    return ScoredText(zeros, torch.tensor(documents), evidence, targets=torch.tensor(targets))


@pytest.fixture
def records() -> StoredRecords:
    """Two documents, of tokens 5 6 7 and 5 8."""
    ids = record_ids(np.arange(5), np.array([5, 6, 7, 5, 8]))
    keys = np.array([[0], [10], [20], [1], [50]], np.float32)
    return StoredRecords(
        SimpleNamespace(
            identity=SimpleNamespace(metric="l2"),
            records=lambda selection: [SimpleNamespace(ids=ids, keys=keys)],
            document_numbers=lambda ids: np.array([0, 0, 0, 1, 1]),
        )
    )


def test_pointers_lead_to_the_next_record_of_the_document(records) -> None:
    assert records.successors.tolist() == [1, 2, -1, 4, -1]
    text = scored_text([0, 10, 20, 30, 20], [5, 6, 7, 7, 7], [0, 0, 0, 0, 1])
    found = [[0, 3], [2, 3], [0, 2], [2, 4], [2, 1]]
    neighbors = Neighbors(records.ids[found], np.zeros((5, 2), np.float32))
    followed = follow_pointers(records, text, neighbors, 100.0, min_pointers=2)
    # 5 came, which records 0 and 3 predicted: they lead to 1 and 4, and no search is made. Then 6 came:
    # record 1 leads to 2, which is too few. Then 7 came: record 2 is the last of its document. At last a new
    # text begins.
    assert followed.is_searched.tolist() == [True, False, True, True, True]
    assert followed.saved == pytest.approx(0.2)
    far = math.exp(-16)  # of record 4 to the second query
    near = math.exp(-1)  # of record 2 to the fourth query
    assert followed.knn_probs.tolist() == pytest.approx(
        [1, 1 / (1 + far), 1 / (1 + math.exp(-4)), near / (near + math.exp(-4)), 1 / (1 + near)]
    )


def test_pointers_beside_a_search_count_once(records) -> None:
    """Without savings, what pointers add is what the search did not find."""
    text = scored_text([0, 10], [5, 6], [0, 0])
    neighbors = Neighbors(records.ids[[[0, 3], [1, 2]]], np.zeros((2, 2), np.float32))
    followed = follow_pointers(records, text, neighbors, 100.0, min_pointers=None)
    assert bool(followed.is_searched.all())
    assert followed.knn_probs.tolist() == pytest.approx([1, 1 / (1 + math.exp(-1) + math.exp(-16))])
    few = follow_pointers(records, text, neighbors, 100.0, min_pointers=1, max_pointers=1)
    assert few.is_searched.tolist() == [True, False]
    assert few.knn_probs.tolist() == pytest.approx([1, 1])  # record 0 is nearer than 3, and leads to 1


def test_where_nothing_is_retrieved_the_model_is_alone(records) -> None:
    text = scored_text([0.0], [5], [0])
    followed = follow_pointers(records, text, Neighbors.all_missing(1, 2), 1.0)
    assert followed.knn_probs.isnan().all()
    assert followed.log_probs(torch.tensor([-2.0]), 0.5).tolist() == [-2.0]


def test_one_cluster_of_everything_is_a_search(make_lm) -> None:
    """The store is small: ties at the k-th place would be broken by rounding, so all records are found."""
    lm = make_lm({"one": documents(RNG, PHRASES, "d", 6, of=5)}, max_length=16, stride=8)
    held_out = documents(RNG, PHRASES, "h", 5, of=7)
    records = StoredRecords(lm.store)
    text = score_once(lm.store, lm.reader, held_out, k=len(records), selection=EVERYTHING, ngrams=None)
    found = lm.store.search(text.evidence.keys.numpy(), len(records))
    clusters = Clusters(records, 10**6)
    followed = follow_pointers(records, text, found, 15.0, min_pointers=3, clusters=clusters)
    assert followed.saved > 0.2
    expected = (text.sums.weights(15.0) * text.sums.hits).sum(1)
    torch.testing.assert_close(followed.knn_probs, expected, atol=1e-3, rtol=1e-3)


def test_clusters_divide_the_records_into_near_ones(records) -> None:
    clusters = Clusters(records, 2)
    around = [frozenset(clusters.around(np.array([row])).tolist()) for row in range(5)]
    assert all(row in members for row, members in enumerate(around))
    assert sum(map(len, set(around))) == len(records)
    assert clusters.around(np.array([4, 0])).tolist()[: len(around[4])] == sorted(around[4])
