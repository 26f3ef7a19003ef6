"""What a text retrieves as arrays, and as a file of Parquet; settings that leave something to the store."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet
import pytest
import torch

import knnstore
from knnstore.datastore import tokens_from_ids
from knnstore.errors import InputError
from knnstore.lm import (
    CacheSettings,
    KNNLMForCausalLM,
    KNNSettings,
    NGramSettings,
    save_settings,
    settings_for,
)
from knnstore.store import Selection
from tests.lm.phrases import words as random_words

words = partial(random_words, np.random.default_rng(9))
EXACT = KNNSettings(k=9, temperature=7.0, lam=0.4)


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"a": [words(40), words(30)], "b": [words(50)]}, max_length=16, stride=8)


def brute_force(lm, queries, k, temperature):
    """Ids and distances of the nearest records, and p_kNN, one query at a time.

    None where the k-th nearest and the next are as near, up to rounding.
    """
    records = list(lm.store.records())
    ids, stored = (np.concatenate([one[at] for one in records]) for at in (0, 1))
    for query in queries:
        squares = ((stored.astype(np.float64) - query) ** 2).sum(1)
        near, after = np.split(np.argsort(squares, kind="stable")[: k + 1], [k])
        if squares[after[0]] - squares[near[-1]] <= 1e-3 * (1 + squares[near[-1]]):
            yield None
            continue
        weights = np.exp(-(squares[near] - squares[near[0]]) / temperature)
        probs = np.zeros(lm.store.identity.vocab_size)
        np.add.at(probs, tokens_from_ids(ids[near]), weights / weights.sum())
        yield ids[near], squares[near], probs


def test_keys_neighbors_and_p_knn_are_those_of_a_search_by_hand(lm) -> None:
    text = words(37)  # several windows
    keys, found, probs = lm.keys(text), lm.neighbors(text, EXACT), lm.p_knn(text, EXACT)
    assert found.tokens.tolist() == lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found.positions.tolist() == list(range(37))
    assert (keys.shape, keys.dtype, probs.dtype) == ((37, lm.store.identity.dim), np.float32, np.float32)
    searched = [*enumerate(brute_force(lm, keys, 9, 7.0))]
    compared = [(row, *nearest) for row, nearest in searched if nearest is not None]
    assert len(compared) > 20
    for row, ids, squares, expected in compared:
        assert set(found.ids[row]) == set(ids)
        assert found.distances[row] == pytest.approx(squares, rel=1e-3, abs=1e-3)
        assert probs[row] == pytest.approx(expected, abs=1e-3)
        assert found.retrieved[row].tolist() == tokens_from_ids(found.ids[row]).tolist()
    explained = [one.p_knn for one in lm.explain(text, EXACT)]
    assert explained == pytest.approx(probs[np.arange(37), found.tokens].tolist(), rel=1e-5)
    assert lm.neighbors("", EXACT).ids.shape == (0, 0)
    assert lm.keys("").shape == (0, lm.store.identity.dim)


def test_a_file_of_parquet_has_a_row_for_each_token(lm, tmp_path) -> None:
    documents = [{"id": "x", "text": words(20)}, {"id": "y", "text": words(12)}]
    settings = replace(EXACT, cache=CacheSettings(4, 5.0, 0.2), ngrams=NGramSettings(3, 0.2))
    assert lm.export(documents, tmp_path / "out.parquet", settings, neighbors=3) == 32
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    by_place = {(row["document"], row["position"]): row for row in rows}
    for document in documents:
        probs, found = lm.p_knn(document["text"], EXACT), lm.neighbors(document["text"], EXACT)
        for at, explained in enumerate(lm.explain(document["text"], EXACT, neighbors=3)):
            row = by_place[document["id"], at]
            dense = np.zeros(probs.shape[1])
            dense[row["knn_tokens"]] = row["knn_probs"]
            assert dense == pytest.approx(probs[at], abs=1e-5)
            assert row["knn_probs"] == sorted(row["knn_probs"], reverse=True)
            assert row["token"] == explained.token == found.tokens[at]
            assert (row["p_lm"], row["p_knn"]) == pytest.approx((explained.p_lm, explained.p_knn), rel=1e-4)
            shares = [one["share"] for one in row["sources"]]
            assert shares == pytest.approx([source.share for source in explained.neighbors], abs=1e-4)
            # Every document begins with the same key: which one of these comes first is anybody's choice.
            places = [(one["position"], one["document"] if one["position"] else "") for one in row["sources"]]
            assert places == [
                (source.position, source.document if source.position else "")
                for source in explained.neighbors
            ]
    with pytest.raises(InputError):
        lm.export([{"id": "x"}], tmp_path / "out.parquet")
    assert len(pyarrow.parquet.read_table(tmp_path / "out.parquet")) == 32  # the old file stays


def test_what_settings_leave_open_is_the_stores_for_the_selection(make_lm) -> None:
    lm, held_out = make_lm({"a": [words(40)], "b": [words(40)]}), [words(30)]
    whole = KNNSettings(k=7, temperature=11.0, lam=0.6, cache=CacheSettings(5, 3.0, 0.1))
    of_b = KNNSettings(k=3, temperature=2.0, lam=0.2, ngrams=NGramSettings(3, 0.4))
    save_settings(lm.store, whole)
    save_settings(lm.store, of_b, ["b"])
    in_b = Selection(domains=("b",))
    fresh = KNNLMForCausalLM.from_base(lm.base, lm.store, tokenizer=lm.tokenizer)
    ids = torch.tensor([[0, 5, 6, 7, 5, 6]])
    for given, meant in [
        (KNNSettings(), whole),
        (KNNSettings(k=4), replace(whole, k=4)),
        (KNNSettings(temperature=5.0), replace(whole, temperature=5.0)),
        (KNNSettings(cache=None), replace(whole, cache=None)),
        (KNNSettings(selection=in_b), replace(of_b, selection=in_b)),
        (KNNSettings(selection=in_b, lam=0.5), replace(of_b, selection=in_b, lam=0.5, ngrams=None)),
        (replace(KNNSettings(k=4), selection=in_b), replace(of_b, selection=in_b, k=4)),
    ]:
        assert lm.evaluate(held_out, given).knn_ppl == lm.evaluate(held_out, meant).knn_ppl
        assert [one.p for one in lm.explain(held_out[0], given)] == [
            one.p for one in lm.explain(held_out[0], meant)
        ]
        assert torch.equal(fresh(ids, knn=given).logits, fresh(ids, knn=meant).logits)
    assert torch.equal(fresh(ids).logits, fresh(ids, knn=whole).logits)
    assert fresh.evaluate(held_out).knn_ppl == lm.evaluate(held_out, whole).knn_ppl
    save_settings(lm.store, replace(whole, k=2))
    assert torch.equal(fresh(ids).logits, fresh(ids, knn=replace(whole, k=2)).logits)  # at once
    assert settings_for(lm.store).unset == frozenset()


def test_settings_say_what_was_given_and_the_package_what_it_has() -> None:
    assert set(dir(knnstore)) == {*knnstore.__all__, "__version__"}
    assert repr(KNNSettings(k=5)) == "KNNSettings(k=5)"
    assert repr(KNNSettings(k=5, lam=0.5)) == "KNNSettings(k=5, mixer=FixedLambda(lam=0.5))"


def test_several_prompts_and_the_end_of_a_block(make_lm, tmp_path) -> None:
    made = make_lm({"a": [words(40)]})
    prompts = [words(3), words(5)]
    assert made.generate_text(prompts, 4) == [made.generate_text(one, max_new_tokens=4) for one in prompts]
    assert made.generate_text([], 4) == []
    with pytest.raises(InputError, match="not int"):
        made.generate_text([3], 4)
    with knnstore.create(tmp_path / "home", made.base.name_or_path) as lm:
        lm.add([words(9)], domain="a")
    with knnstore.load(tmp_path / "home", "a") as again:  # the lock was released
        assert again.store.record_count() == 9
