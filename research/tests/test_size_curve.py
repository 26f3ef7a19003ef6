"""Perplexity against the size of the store: against evaluations that retrieve from the same documents."""

from dataclasses import replace

import numpy as np
import pytest
from knnstore_research.size_curve import measure_size_curve

from knnstore.errors import InputError
from knnstore.lm import CacheSettings, KNNSettings, NGramSettings
from knnstore.store import Selection
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(5)
OF_A = phrases(RNG, 12)
STORED = documents(RNG, OF_A, "a", 24)
HELD_OUT = documents(RNG, OF_A, "h", 3)


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with two domains."""
    lm = make_lm({"a": STORED, "b": documents(RNG, OF_A, "b", 3)}, max_length=32, stride=16)
    lm.store.close()
    return lm.store.home.path


@pytest.mark.parametrize("probes", [2, None])
def test_each_point_is_an_evaluation_with_these_documents(lm, probes) -> None:
    of_a = Selection(domains=("a",))
    settings = KNNSettings(
        9,
        lm.knn.temperature,
        probes=probes,
        cache=CacheSettings(64, 20.0, 0.2),
        ngrams=NGramSettings(3, 0.3),
        selection=of_a,
    )
    points = measure_size_curve(lm, HELD_OUT, settings)
    assert [one.documents for one in points] == [0, 1, 2, 3, 6, 12, 24]
    order = sorted((one for one in lm.store.documents(domain="a")), key=lambda one: one.content_hash)
    for point in points[1:]:
        part = Selection(domains=("a",), documents=tuple(one.id for one in order[: point.documents]))
        found = lm.evaluate(HELD_OUT, replace(settings, selection=part))
        assert point.perplexity.ppl == pytest.approx(found.knn_ppl, rel=1e-5)
        assert point.records == lm.store.record_count(part)
    assert points[0].perplexity.ppl == pytest.approx(found.base_ppl)


def test_a_stored_document_has_no_curve(lm) -> None:
    with pytest.raises(InputError, match="in the store"):
        measure_size_curve(lm, STORED[:1])


def test_an_empty_store_has_the_model_alone(make_lm) -> None:
    lm = make_lm(max_length=32, stride=16)
    (point,) = measure_size_curve(lm, HELD_OUT)
    assert (point.documents, point.perplexity.ppl) == (0, pytest.approx(lm.evaluate(HELD_OUT).base_ppl))
