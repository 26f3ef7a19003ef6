"""A store that compares by inner products: its distances, its default settings, and calibrating it."""

import numpy as np
import pytest

from knnstore.datastore import tokens_from_ids
from knnstore.lm import default_settings
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(7)
PHRASES = phrases(RNG, 30)
STORED, HELD_OUT = documents(RNG, PHRASES, "s", 10, of=11), documents(RNG, PHRASES, "h", 8, of=11)


@pytest.fixture(scope="module")
def filled(make_lm):
    options = {"key": "attention_input@1", "metric": "ip", "max_length": 32}
    with make_lm({"phrases": STORED}, **options).store as store:
        return store.home.path


def test_the_nearest_have_the_greatest_products(lm) -> None:
    store = lm.store
    assert store.identity.key == "transformer.h.1.attn:input +0.5 +0.35"
    ids, keys, _ = next(store.datastore.iterate(batch_size=10_000))
    text = " ".join(HELD_OUT[0].text.split()[:20])
    tokens = lm.tokenizer("<s> " + text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    queries = lm.key_encoder.encode(tokens, np.arange(20)).keys.numpy()
    found = store.search(queries, 9)
    products = queries.astype(np.float64) @ keys.astype(np.float64).T
    np.testing.assert_allclose(-found.distances, -np.sort(-products, 1)[:, :9], rtol=1e-3, atol=1e-3)
    # p_kNN with the default settings, whose T is of the scale that products have.
    scores = np.exp((products - products.max(1)[:, None]) / lm.knn.temperature)
    scores[products < -np.sort(-products, 1)[:, lm.knn.k - 1 : lm.knn.k]] = 0
    hits = tokens_from_ids(ids) == tokens[0, 1:].numpy()[:, None]
    expected = (scores * hits).sum(1) / scores.sum(1)
    explained = [token.p_knn for token in lm.explain(text)]
    np.testing.assert_allclose(explained, expected, rtol=0.02, atol=1e-3)


def test_a_product_moves_half_as_far_as_a_squared_distance(lm, make_lm) -> None:
    # |q|² + |x|² - 2 q·x: for the same keys the default temperature is half of that of squared distances.
    squares = make_lm({"phrases": STORED}, key="attention_input@1", metric="l2", max_length=32)
    assert default_settings(lm.store).temperature == pytest.approx(
        default_settings(squares.store).temperature / 2, rel=1e-4
    )


@pytest.mark.slow
def test_calibrating_finds_settings_that_help(lm) -> None:
    before = lm.evaluate(HELD_OUT)
    found = lm.calibrate(HELD_OUT, max_k=64)
    assert found.record is not None
    assert found.comparison.best.held_out.ppl < before.base_ppl / 2
    assert lm.evaluate(HELD_OUT).knn_ppl <= before.knn_ppl
