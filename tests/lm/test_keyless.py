"""A store without keys: no pass of the model when adding, and n-grams wherever keys would be."""

import contextlib
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import CacheSettings, KNNSettings, settings_for
from knnstore.lm.reading import Encoder
from knnstore.lm.scoring.passage_search import _score_records_by_words
from knnstore.store import Selection
from tests.kneser_ney import KneserNey
from tests.lm.phrases import documents, phrases, words

V = 101
RNG = np.random.default_rng(7)
PHRASES = phrases(RNG, 30)
STORED, HELD_OUT = documents(RNG, PHRASES, "s", 12), documents(RNG, PHRASES, "h", 12)
NOISE = [words(RNG, 50, 60, 100) for _ in range(3)]
CHOSEN = Selection(domains=("phrases",))


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home without keys, that was filled without the model."""
    made = make_lm(key=None, max_length=32, stride=16)
    with pytest.MonkeyPatch.context() as patched:
        for method in ("compute_keys", "encode", "compute_key_states"):
            patched.setattr(Encoder, method, lambda *_: pytest.fail("the model ran"))
        added = made.add(STORED, domain="phrases")
        made.add(NOISE, domain="noise")
    assert (added.added, added.tokens) == (12, 12 * 108)
    made.store.close()
    return made.store.home.path


def test_text_is_predicted_by_its_n_grams_alone(lm):
    domains = [(one.name, one.records) for one in lm.store.domains()]
    assert domains == [("noise", 0), ("phrases", 0)]
    assert not (lm.store.home.path / "keys").exists()
    assert lm.knn == KNNSettings(k=1, lam=0.0, ngrams=lm.knn.ngrams)
    counted = KneserNey([lm.reader.tokenize(one.text) for one in STORED], 7)
    text = lm.reader.tokenize(HELD_OUT[0].text)[:30].tolist()
    ids, chosen = torch.tensor([[0, *text]]), settings_for(lm.store, CHOSEN)
    with torch.no_grad():
        mixed, alone = lm(ids, knn=chosen).logits[0].exp(), lm.base(ids).logits[0].softmax(-1)
    said = np.array([counted.probs([-1, *text[:at]], V) for at in range(len(text) + 1)])
    longest = [min(counted.longest([-1, *text[:at]]), 6) for at in range(len(text) + 1)]
    lam = np.array(chosen.ngrams.by_length)[longest][:, None]
    np.testing.assert_allclose(mixed.numpy(), lam * said + (1 - lam) * alone.numpy(), atol=1e-5)
    found = lm.evaluate(HELD_OUT, chosen)
    assert found.ngram_ppl == found.knn_ppl < 0.5 * found.base_ppl == pytest.approx(0.5 * found.store_ppl)


@pytest.mark.slow
def test_everything_that_needs_no_keys_is_fitted_and_used(lm):
    found = lm.calibrate(HELD_OUT, domains=["phrases"])
    names = [one.name for one in found.comparison.candidates]
    assert names == ["n-grams", "cache", "n-grams + cache", "gate over all"]
    best = found.comparison.best
    assert best.held_out.ppl == min(one.held_out.ppl for one in found.comparison.candidates)
    used = settings_for(lm.store, CHOSEN)
    assert used == replace(best.settings, selection=CHOSEN, scoring_only=used.scoring_only)
    assert not used.retrieves
    assert lm.evaluate(HELD_OUT, used).knn_ppl < found.comparison.candidates[0].held_out.ppl * 1.1
    assert found.comparison.current is not None, "what is derived is compared with too"
    assert found.record is not None
    assert not found.record.is_stale(lm.store)
    gate = found.comparison.candidates[-1].settings
    lm.knn = replace(gate, selection=CHOSEN)
    prompt = torch.tensor([[0, 5, 6, 7]])
    written = lm.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=2)
    with torch.no_grad():
        whole = lm(written[:, :-1]).logits[0, 3:]
    whole[:, 1] = -torch.inf
    assert whole.argmax(-1).tolist() == written[0, 4:].tolist()


def test_places_are_found_by_their_words(lm):
    tokens = lm.reader.tokenize(STORED[3].text)
    passages = lm.search(lm.reader.decode(tokens[40:52].tolist()))
    assert (passages[0].document, passages[0].domain) == (STORED[3].id, "phrases")
    assert 40 < passages[0].position < 52
    expected, asked = {}, [*tokens[40:52].tolist(), *tokens[40:44].tolist()]  # some places are found twice
    stored = {one.id: lm.reader.tokenize(one.text).tolist() for one in STORED}
    for at in range(1, len(asked)):
        runs = {}
        for id, text in stored.items():
            for place in (place for place, token in enumerate(text) if token == asked[at]):
                same = [a == b for a, b in zip(reversed(asked[:at]), reversed(text[:place]), strict=False)][
                    :7
                ]
                runs[id, place] = [*same, False].index(False)
        longest = [place for place, run in runs.items() if run == max(runs.values()) > 0]
        for place in longest:
            expected[place] = expected.get(place, 0) + 1 / len(longest) / (len(asked) - 1)
    shares = _score_records_by_words(lm.store, asked, CHOSEN)
    places = lm.store.provenance(np.array(list(shares), np.int64))
    found = {
        (place.document, place.position): share for place, share in zip(places, shares.values(), strict=True)
    }
    assert found == pytest.approx(expected)
    assert lm.search(NOISE[1], limit=1)[0].domain == "noise"
    assert lm.search(NOISE[1], KNNSettings(selection=CHOSEN)) == []
    assert lm.search("w50") == []
    explained = lm.explain(STORED[3].text, replace(lm.knn, selection=CHOSEN)).tokens[50]
    assert STORED[3].id in {one.document for one in explained.causes}
    assert {one.part for one in explained.causes} == {"n-grams"}
    parts = {one.name: one for one in explained.parts}
    assert explained.p == pytest.approx(sum(one.weight * one.p for one in parts.values()), rel=1e-4)


def test_what_is_removed_and_replaced_counts_no_more(lm):
    store = lm.store
    assert store.verify() == []
    with contextlib.closing(sqlite3.connect(store.home.path / "catalog.db")) as catalog, catalog:
        stored = "knnstore_document_tokens"
        (row, tokens), *_ = catalog.execute(f"SELECT document_id, tokens FROM {stored}").fetchall()
        for damaged in (tokens[:-4], tokens[:8] + b"\xff\xff\xff\xff" + tokens[12:], tokens):
            catalog.execute(f"UPDATE {stored} SET tokens = ? WHERE document_id = ?", (damaged, row))
            catalog.commit()
            assert len(store.verify()) == (damaged is not tokens)
    store.remove_domain("noise")
    lm.sync([*STORED[:6], replace(STORED[6], text=NOISE[0])], domain="phrases")
    left = [*(one.text for one in STORED[:6]), NOISE[0]]
    counted = KneserNey([lm.reader.tokenize(text) for text in left], 7)
    ids = lm.reader.tokenize(STORED[8].text)[:20].tolist()
    with torch.no_grad():
        row = lm(torch.tensor([[0, *ids]])).logits[0, -1].exp().numpy()
        alone = lm.base(torch.tensor([[0, *ids]])).logits[0, -1].softmax(-1).numpy()
    lam = lm.knn.ngrams.by_length[min(counted.longest([-1, *ids]), 6)]
    np.testing.assert_allclose(row, lam * counted.probs([-1, *ids], V) + (1 - lam) * alone, atol=1e-5)
    gone = lm.reader.tokenize(STORED[9].text).astype("<u4").tobytes()[40:80]
    assert store.erase().unreached == ()
    assert not [path for path in store.home.path.rglob("*") if path.is_file() and gone in path.read_bytes()]
    assert store.verify() == []


def test_what_needs_keys_is_refused_in_one_line(lm, tmp_path, model_path):
    store = lm.store
    for needs_keys in (
        lambda: lm.evaluate(HELD_OUT[:1], KNNSettings(lam=0.5)),
        lambda: store.move("faiss", "elsewhere"),
    ):
        with pytest.raises(ConfigError, match=r"no keys|keeps none|cannot get keys") as refused:
            needs_keys()
        assert "\n" not in str(refused.value)
    assert lm.evaluate(HELD_OUT[:1], replace(lm.knn, cache=CacheSettings(20, 50.0, 0.2))).cache_ppl
    for given in ({"store": "faiss"}, {"location": "there"}, {"params": {"codes": "pq32"}}):
        with pytest.raises(ConfigError):
            knnstore.create(tmp_path / "refused", model_path, key=None, **given)
        assert not (tmp_path / "refused").exists()
    made = knnstore.create(tmp_path / "keyed", model_path)
    with made.store, pytest.raises(ConfigError, match="cannot get keys"):
        made.store.move("none", "keys2")
