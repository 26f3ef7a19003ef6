"""Following records into their documents: to the next one, never beyond the end nor to what was removed."""

import numpy as np
import pytest

from knnstore.datastore import Neighbors
from knnstore.datastore.records import tokens_of
from knnstore.store import EVERYTHING, KNNStore, Selection

DOCUMENTS = [("law", "1"), ("law", "2"), ("law", "3"), ("news", "4")]


def record_ids(store: KNNStore, writer, document: tuple[str, str]) -> np.ndarray:
    """The ids of a document's records, found by their own keys."""
    return store.search(writer.keys[document], 1, Selection(domains=(document[0],))).ids[:, 0]


def followed(store: KNNStore, queries: np.ndarray, ids: np.ndarray, selection=EVERYTHING) -> Neighbors:
    """One record followed from each query."""
    found = store.follow(queries, ids[:, None], selection)
    return Neighbors(found.ids[:, 0], found.distances[:, 0])


@pytest.fixture
def filled(store: KNNStore, writer) -> KNNStore:
    for domain, id in DOCUMENTS:
        writer.add(domain, id, n=12)
    return store


def test_the_next_record_of_the_document_at_its_true_distance(filled, writer) -> None:
    queries = np.random.default_rng(1).standard_normal((11, 8)).astype(np.float32)
    for document in DOCUMENTS:
        ids, keys = record_ids(filled, writer, document), writer.keys[document]
        assert tokens_of(ids).tolist() == writer.tokens[document].tolist()
        found = followed(filled, queries, ids[:-1])
        assert found.ids.tolist() == ids[1:].tolist()
        np.testing.assert_allclose(found.distances, ((keys[1:] - queries) ** 2).sum(1), rtol=1e-5)


def test_nothing_follows_the_last_record_nor_a_missing_one(filled, writer) -> None:
    last = np.array([record_ids(filled, writer, document)[-1] for document in DOCUMENTS] + [-1])
    found = followed(filled, np.zeros((5, 8), np.float32), last)
    assert (found.ids == -1).all()
    assert np.isinf(found.distances).all()


def test_many_of_one_query_and_places_stay(filled, writer) -> None:
    first, second = (record_ids(filled, writer, document) for document in DOCUMENTS[:2])
    ids = np.array([[first[3], -1, second[-1], second[0]], [-1, -1, first[3], -1]])
    found = filled.follow(np.zeros((2, 8), np.float32), ids)
    assert found.ids.tolist() == [[first[4], -1, -1, second[1]], [-1, -1, first[4], -1]]
    norms = [float((writer.keys[at][row] ** 2).sum()) for at, row in ((DOCUMENTS[0], 4), (DOCUMENTS[1], 1))]
    expected = [[norms[0], np.inf, np.inf, norms[1]], [np.inf, np.inf, norms[0], np.inf]]
    np.testing.assert_allclose(found.distances, expected, rtol=1e-5)


def test_nothing_leads_to_removed_or_unselected_documents(filled, writer) -> None:
    ids = {document: record_ids(filled, writer, document) for document in DOCUMENTS}
    queries = np.zeros((12, 8), np.float32)
    filled.remove_document("2", domain="law")
    found = followed(filled, queries, ids["law", "2"])
    assert (found.ids == -1).all()
    # The last one before it would lead into it, and its own last one into the next.
    assert followed(filled, queries, ids["law", "1"]).ids.tolist() == [*ids["law", "1"][1:], -1]
    elsewhere = followed(filled, queries, ids["law", "1"], Selection(domains=("news",)))
    assert (elsewhere.ids == -1).all()
    assert np.isinf(elsewhere.distances).all()


def test_no_queries(filled) -> None:
    assert filled.follow(np.zeros((0, 8), np.float32), np.zeros((0, 3), np.int64)).ids.shape == (0, 3)
    assert filled.follow(np.zeros((2, 8), np.float32), np.zeros((2, 0), np.int64)).ids.shape == (2, 0)
